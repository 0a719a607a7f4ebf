"""In which order a stage does its forwards and backwards under each schedule, and what is kept meanwhile.

* 1F1B (PipeDream-Flush, Narayanan et al. 2021a): after a warm-up, one forward and one backward in turn.
* Interleaved (Narayanan et al. 2021b, "Efficient large-scale language model training on GPU clusters"): stages hold v
  chunks of layers, and the bubble is a v-th part. Micro-batches go in groups of as many as there are stages: a group
  passes chunk 0, then chunk 1, ... . There the batch must be whole groups; here groups that hold a few more do as well.
* Zero bubble, ZB-H1 (Qi et al. 2024): the backward is split into the gradient of the input, for which the previous
  stage waits, and that of the weights, for which nobody does. Stage s is s of the latter behind, and does them when it
  would wait at the end. No stage keeps more micro-batches than the first one with 1F1B.

Does not own messages, reductions (`schedule`) or the seconds of an order (`closed_forms`, `simulate`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from shoal_planner.job import Schedule
from shoal_planner.programs import Backward, Forward, InputGradient, WeightGradient, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Stage number `stage` of `stages` in a pipeline, with so many chunks and micro-batches a step."""

    stage: int
    stages: int
    micro_batches: int
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What a stage keeps at one moment: micro-batches between their forward and the gradient of their input, by chunk,
    and those that wait only for the gradients of weights. Of those in the last chunk of a last stage `waiting` are not
    at work then: it keeps what its head made of them."""

    forward: tuple[int, ...]
    weight: int = 0
    waiting: int = 0


def order(schedule: Schedule, place: Place) -> Iterator[Work]:
    match schedule:
        case "1f1b":
            return one_f_one_b(place.stages - place.stage, place.micro_batches)
        case "interleaved":
            return interleaved(place)
        case "zero_bubble":
            return zero_bubble(place)
        case _:
            assert_never(schedule)


def one_f_one_b(depth: int, micro_batches: int) -> Iterator[Forward | Backward]:
    """With `depth` stages from this one to the end of its pipeline, at most min(depth, micro_batches) micro-batches are
    between their forward and their backward at any moment."""
    warm_up = min(depth - 1, micro_batches)
    for number in range(warm_up):
        yield Forward(micro_batch=number)
    for number in range(micro_batches):
        if number + warm_up < micro_batches:
            yield Forward(micro_batch=number + warm_up)
        yield Backward(micro_batch=number)


def interleaved(place: Place) -> Iterator[Forward | Backward]:
    """With one chunk a stage, this is 1F1B."""
    if place.chunks == 1:
        yield from one_f_one_b(place.stages - place.stage, place.micro_batches)
        return
    groups = _groups(place)
    chunks = range(place.chunks)
    forwards = [(chunk, number) for group in groups for chunk in chunks for number in group]
    backwards = [(chunk, number) for group in groups for chunk in reversed(chunks) for number in group]
    # The last stage begins to go backward when the first micro-batch reaches the last chunk; stages before it have to
    # be ahead of it by the way there and back.
    ahead = (place.chunks - 1) * len(groups[0]) + 2 * (place.stages - place.stage - 1)
    warm_up = min(ahead, len(forwards))
    for chunk, number in forwards[:warm_up]:
        yield Forward(micro_batch=number, chunk=chunk)
    for index, (chunk, number) in enumerate(backwards):
        if index + warm_up < len(forwards):
            next_chunk, next_number = forwards[index + warm_up]
            yield Forward(micro_batch=next_number, chunk=next_chunk)
        yield Backward(micro_batch=number, chunk=chunk)


def _groups(place: Place) -> tuple[range, ...]:
    """Of as many micro-batches as there are stages, or a few more; larger ones first."""
    count = max(1, place.micro_batches // place.stages)
    size, more = divmod(place.micro_batches, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return tuple(range(starts[index], starts[index + 1]) for index in range(count))


def zero_bubble(place: Place) -> Iterator[Work]:
    warm_up = min(place.stages - place.stage - 1, place.micro_batches)
    for number in range(warm_up):
        yield Forward(micro_batch=number)
    for number in range(place.micro_batches):
        if number + warm_up < place.micro_batches:
            yield Forward(micro_batch=number + warm_up)
        yield InputGradient(micro_batch=number)
        if number >= place.stage:
            yield WeightGradient(micro_batch=number - place.stage)
    for number in range(max(0, place.micro_batches - place.stage), place.micro_batches):
        yield WeightGradient(micro_batch=number)


@functools.lru_cache(maxsize=4096)
def fullest(schedule: Schedule, place: Place) -> tuple[InFlight, ...]:
    """The moments of a step at which most is kept: all that no other moment exceeds in everything."""
    forward, weight, last = [0] * place.chunks, 0, place.chunks - 1
    has_head = place.stage == place.stages - 1
    seen: set[InFlight] = set()

    def look(chunk: int) -> None:
        waiting = forward[last] - (chunk == last and forward[last] > 0) if has_head else 0
        seen.add(InFlight(forward=tuple(forward), weight=weight, waiting=waiting))

    for work in order(schedule, place):
        match work:
            case Forward():
                forward[work.chunk] += 1
            case Backward():
                look(work.chunk)
                forward[work.chunk] -= 1
            case InputGradient():
                look(work.chunk)
                forward[work.chunk] -= 1
                weight += 1
            case WeightGradient():
                weight -= 1
        look(work.chunk)
    kept = [here for here in seen if not any(_exceeds(other, here) for other in seen)]
    return tuple(sorted(kept, key=lambda moment: (moment.weight, moment.forward, moment.waiting)))


def _exceeds(one: InFlight, other: InFlight) -> bool:
    more = all(here >= there for here, there in zip(one.forward, other.forward, strict=True))
    return one != other and more and one.weight >= other.weight and one.waiting >= other.waiting
