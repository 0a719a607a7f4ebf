"""What a rank may do with each layer of its stage where memory is short, and what each choice costs.

Owns the values and the arithmetic of one layer. Does not own how many layers take which choice (`mixes`, `recurrence`),
nor where the plain figures come from (costs and memory).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from shoal_planner.plan import Override, Recompute

Offload = Literal["none", "optimizer"]
Floats: TypeAlias = NDArray[np.float64]
Figure: TypeAlias = float | Floats

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is done with one layer."""

    recompute: Recompute = "none"
    offload: Offload = "none"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFigures:
    """One layer on one rank: numbers, or arrays with one entry per stage. Seconds are those that nothing hides.

    `kept_bytes`, `selective_bytes` and `full_bytes` stay of one micro-batch from its forward to its backward, with
    nothing, some or all of the layer recomputed. That takes `selective_s` or `full_s` per micro-batch and, of one layer
    at a time, `again_bytes`. `host_s` is added to a step where the host updates the layer (infinite: no host can).
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
    offloads: Sequence[Offload] = OFFLOADS,
) -> Options:
    """The choices that any of these stages can take."""
    every = (Choice(recompute=how, offload=where) for how, where in itertools.product(recomputes, offloads))
    choices = [choice for choice in every if _legal(figures, choice).any()]
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
    with the rest, in the order of the choices."""
    taken = Counter[Recompute]()
    for choice, count in zip(choices, counts, strict=True):
        taken[choice.recompute] += count
    usual = max(RECOMPUTES, key=lambda recompute: taken[recompute])
    found, begin = [], first
    for choice, count in zip(choices, counts, strict=True):
        end = begin + count
        if count and (choice.recompute != usual or choice.offload != "none"):
            found.append(Override(layers=(begin, end), recompute=choice.recompute, offload=choice.offload))
        begin = end
    return usual, tuple(found)


def _legal(figures: LayerFigures, choice: Choice) -> NDArray[np.bool_]:
    return np.isfinite(figures.host_s) | (choice.offload == "none")


def _stack(column: Iterable[Figure | NDArray[np.bool_]]) -> Floats:
    return np.stack(np.broadcast_arrays(*(np.asarray(entry, float) for entry in column)), axis=-1)


def _price(figures: LayerFigures, choice: Choice) -> _Price:
    kept_bytes, again_s = _recomputed(figures, choice.recompute)
    offloaded = choice.offload == "optimizer"
    state = figures.weight_bytes + figures.gradient_bytes + (0.0 if offloaded else figures.optimizer_bytes)
    return _Price(
        micro_batch_s=again_s,
        step_s=figures.host_s if offloaded else 0.0,
        bytes=state + figures.in_flight * kept_bytes,
        peak_bytes=0.0 if choice.recompute == "none" else figures.again_bytes,
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
