"""What a rank may do with each layer of its stage where memory is short, and what each choice costs.

Owns the values and the arithmetic of one layer. Does not own how many layers take which choice (`mixes`, `recurrence`),
nor where the plain figures come from (costs and memory).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from shoal_planner.errors import InvalidField
from shoal_planner.plan import Override, Recompute

Offload = Literal["none", "optimizer"]
Floats: TypeAlias = NDArray[np.float64]
Figure: TypeAlias = float | Floats

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is done with one layer. Its weights are cut into `split` slices, which are used one after the other; of
    these, `sharded` are spread over the replicas and gathered when they are needed (OSDP's operator splitting)."""

    recompute: Recompute = "none"
    sharded: int = 0
    split: int = 1
    offload: Offload = "none"

    def __post_init__(self) -> None:
        if self.split < 1:
            raise InvalidField("split", self.split, "must be at least 1")
        if not 0 <= self.sharded <= self.split:
            raise InvalidField("sharded", self.sharded, f"must be from 0 to split ({self.split})")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFigures:
    """One layer on one rank: numbers, or arrays with one entry per stage. Seconds are those that nothing hides.

    `kept_bytes`, `selective_bytes` and `full_bytes` stay of one micro-batch from its forward to its backward, with
    nothing, some or all of the layer recomputed. That takes `selective_s` or `full_s` per micro-batch and, of one layer
    at a time, `again_bytes`. `share` is the rank's part of state that is sharded (1: there is nobody to share with).
    `gather_s` and `scatter_s` are the seconds of the layer's weights and gradients on the links, beside `message_s` per
    message; `slice_s` is what each slice more adds to a micro-batch. `host_s` is added to a step where the host updates
    the layer (infinite: no host can).
    """

    micro_batches: Figure
    in_flight: Figure
    kept_bytes: Figure
    selective_bytes: Figure
    full_bytes: Figure
    again_bytes: Figure
    selective_s: Figure
    full_s: Figure
    weight_bytes: Figure
    gradient_bytes: Figure
    optimizer_bytes: Figure
    share: Figure = 1.0
    gather_s: Figure = 0.0
    scatter_s: Figure = 0.0
    message_s: Figure = 0.0
    slice_s: Figure = 0.0
    host_s: Figure = math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The choices of a layer, and arrays of what they cost: by choice, or by stage and choice.

    `seconds` are of a step, beyond a layer that keeps everything; `micro_batch_s` is the part of them that each
    micro-batch takes. `bytes` are whole, and stay; `peak_bytes` are needed by one layer of a stage at a time. A choice
    that a stage cannot take has infinite seconds there.
    """

    choices: tuple[Choice, ...]
    seconds: Floats
    micro_batch_s: Floats
    bytes: Floats
    peak_bytes: Floats


class _Price(NamedTuple):
    micro_batch_s: Figure
    step_s: Figure
    bytes: Figure
    peak_bytes: Figure


def options(
    figures: LayerFigures,
    *,
    recomputes: Sequence[Recompute] = RECOMPUTES,
    splits: Sequence[int] = (),
    offloads: Sequence[Offload] = OFFLOADS,
) -> Options:
    """The choices that any of these stages can take. `splits`: into how many slices weights may be cut to be sharded
    (1: whole layers); none means that weights stay where they are used."""
    choices = [choice for choice in _combinations(recomputes, splits, offloads) if _legal(figures, choice).any()]
    prices = [_price(figures, choice) for choice in choices]
    micro_batch_s, step_s, resident, peaks = (_stack(column) for column in zip(*prices, strict=True))
    illegal = ~_stack(_legal(figures, choice) for choice in choices).astype(bool)
    micro_batches = np.expand_dims(np.asarray(figures.micro_batches, float), -1)
    seconds = np.where(illegal, np.inf, micro_batches * micro_batch_s + step_s)
    # Whole bytes add up without rounding, so what fits by one sum fits by every other.
    return Options(
        choices=tuple(choices),
        seconds=seconds,
        micro_batch_s=micro_batch_s,
        bytes=np.ceil(resident),
        peak_bytes=np.ceil(peaks),
    )


def overrides(first: int, choices: Sequence[Choice], counts: Sequence[int]) -> tuple[Recompute, tuple[Override, ...]]:
    """What a stage that begins at layer `first` says in a plan: how most of its layers recompute, and what is otherwise
    with the rest, in the order of the choices. The plan is one that splits what any of them shards. Raises InvalidField
    where some slices of a layer alone are sharded, which plans cannot say."""
    taken = Counter[Recompute]()
    for choice, count in zip(choices, counts, strict=True):
        if count and 0 < choice.sharded < choice.split:
            raise InvalidField("sharded", choice.sharded, f"must be 0 or all {choice.split} slices in a plan")
        taken[choice.recompute] += count
    splits = any(count and choice.sharded for choice, count in zip(choices, counts, strict=True))
    usual = max(RECOMPUTES, key=lambda recompute: taken[recompute])
    found, begin = [], first
    for choice, count in zip(choices, counts, strict=True):
        end = begin + count
        whole = splits and not choice.sharded
        if count and (choice.recompute != usual or choice.offload != "none" or whole):
            found.append(
                Override(
                    layers=(begin, end),
                    recompute=choice.recompute,
                    offload=choice.offload,
                    sharding="none" if whole else None,
                )
            )
        begin = end
    return usual, tuple(found)


def _combinations(
    recomputes: Sequence[Recompute], splits: Sequence[int], offloads: Sequence[Offload]
) -> Iterator[Choice]:
    shards = [(0, 1)] + [(sharded, split) for split in sorted(set(splits)) for sharded in range(1, split + 1)]
    for recompute, (sharded, split), offload in itertools.product(recomputes, shards, offloads):
        yield Choice(recompute=recompute, sharded=sharded, split=split, offload=offload)


def _legal(figures: LayerFigures, choice: Choice) -> NDArray[np.bool_]:
    shared = np.asarray(figures.share) < 1
    hosted = np.isfinite(figures.host_s)
    return (shared | (choice.sharded == 0)) & (hosted | (choice.offload == "none"))


def _stack(column: Iterable[Figure | NDArray[np.bool_]]) -> Floats:
    return np.stack(np.broadcast_arrays(*(np.asarray(entry, float) for entry in column)), axis=-1)


def _price(figures: LayerFigures, choice: Choice) -> _Price:
    """Sharding gathers the weights for forward and backward and scatters the gradients in every micro-batch, where a
    replicated layer does one of each in a step: with one micro-batch, three transfers for two (OSDP)."""
    kept_bytes, again_s = _recomputed(figures, choice.recompute)
    part, more = choice.sharded / choice.split, choice.split - 1
    # Slices are dropped once used, so a recomputed forward has to gather them again; a whole layer stays.
    gathers = 3 if choice.recompute == "full" and more else 2
    exchange_s = part * (gathers * figures.gather_s + figures.scatter_s)
    messages_s = choice.sharded * (gathers + 1) * figures.message_s
    once_s = part * (figures.gather_s + figures.scatter_s) + (2 * figures.message_s if part == 1 else 0.0)
    offloaded = choice.offload == "optimizer"
    states = figures.weight_bytes + figures.gradient_bytes
    resident = states * (1 - part * (1 - figures.share)) + (0.0 if offloaded else figures.optimizer_bytes)
    gathered = states / choice.split if choice.sharded else 0.0
    return _Price(
        micro_batch_s=again_s + exchange_s + messages_s + more * figures.slice_s,
        step_s=(figures.host_s if offloaded else 0.0) - once_s,
        bytes=resident + figures.in_flight * kept_bytes,
        peak_bytes=gathered + (0.0 if choice.recompute == "none" else figures.again_bytes),
    )


def _recomputed(figures: LayerFigures, recompute: Recompute) -> tuple[Figure, Figure]:
    """Bytes kept of a micro-batch, and seconds to make the rest again."""
    match recompute:
        case "none":
            return figures.kept_bytes, 0.0
        case "selective":
            return figures.selective_bytes, figures.selective_s
        case "full":
            return figures.full_bytes, figures.full_s
        case _:
            assert_never(recompute)
