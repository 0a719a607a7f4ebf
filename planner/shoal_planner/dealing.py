"""Deals the global batch to pipelines so that the last one to finish finishes as early as possible, and all samples
are dealt. Owns the arithmetic alone; seconds per number of samples come in as tables."""

from __future__ import annotations

import numpy as np

from shoal_planner.options import Floats, Ints

_MORE_TIMES = 64


def deal(tables: list[Floats], samples: int) -> tuple[int, ...] | None:
    """How many samples each pipeline runs; none if they cannot add up.

    `tables[p][n]` is pipeline p's time for n samples, inf where it cannot; index 0 is not used. Each gets one at least.
    """
    different = list({id(table): table for table in tables}.values())
    times = np.unique(np.concatenate([table[1:] for table in different]))
    times = times[np.isfinite(times)]
    most = [_most(table) for table in different]
    place = {id(table): number for number, table in enumerate(different)}
    counts = np.bincount([place[id(table)] for table in tables], minlength=len(different))

    def reached(time_s: float) -> int:
        each = [_within(table, capacity, time_s) for table, capacity in zip(different, most, strict=True)]
        return int(counts @ np.array(each)) if all(each) else 0

    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if reached(times[middle]) >= samples:
            high = middle
        else:
            low = middle + 1
    for time_s in times[low : low + _MORE_TIMES]:
        dealt = _exactly(tables, samples, float(time_s))
        if dealt is not None:
            return dealt
    return None


def _most(table: Floats) -> Floats:
    """The least time for n or more samples."""
    found: Floats = np.minimum.accumulate(table[:0:-1])[::-1]
    return found


def _within(table: Floats, most: Floats, time_s: float) -> int:
    """The most samples within the time."""
    return int(np.searchsorted(most, time_s, side="right"))


def _exactly(tables: list[Floats], samples: int, time_s: float) -> tuple[int, ...] | None:
    """Everybody gets the most first; what is too much is taken back in the largest portions that can be."""
    choices: dict[int, Ints] = {id(table): np.flatnonzero(table[1 : samples + 1] <= time_s) + 1 for table in tables}
    dealt = [int(choices[id(table)][-1]) if len(choices[id(table)]) else 0 for table in tables]
    if not all(dealt):
        return None
    excess = sum(dealt) - samples
    even = max(1, -(-excess // len(tables)))
    for portion in (even, excess):
        for index, table in enumerate(tables):
            if excess <= 0:
                break
            allowed = choices[id(table)]
            wanted = max(1, dealt[index] - min(portion, excess))
            lower = int(allowed[np.searchsorted(allowed, wanted)])  # the least that takes back no more than wanted
            excess -= dealt[index] - lower
            dealt[index] = lower
    return tuple(dealt) if excess == 0 else None
