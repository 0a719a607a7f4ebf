"""Deals the global batch to pipelines so that the last one to finish finishes as early as possible, and all samples
are dealt. Owns the arithmetic alone; seconds per number of samples come in as tables."""

from __future__ import annotations

import numpy as np

from shoal_planner.distinct import distinct
from shoal_planner.options import Floats, Ints

_MORE_TIMES = 64
# Where portions cannot be taken back one after the other, all sums are tried, up to so many of them by pipeline.
_MOST_SUMS = 1 << 15


def deal(tables: list[Floats], samples: int) -> tuple[int, ...] | None:
    """How many samples each pipeline runs; none if they cannot add up.

    `tables[p][n]` is pipeline p's time for n samples, inf where it cannot; index 0 is not used. Each gets one at least.
    """
    different = list({id(table): table for table in tables}.values())
    times = distinct(np.concatenate([table[1:] for table in different]))
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
        choices = {id(table): np.flatnonzero(table[1 : samples + 1] <= time_s) + 1 for table in different}
        each = [choices[id(table)] for table in tables]
        dealt = _by_portions(each, samples)
        if dealt is None and len(tables) * samples <= _MOST_SUMS:
            dealt = _by_sums(each, samples)
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


def _by_portions(choices: list[Ints], samples: int) -> tuple[int, ...] | None:
    """Everybody gets the most first; what is too much is taken back in the largest portions that can be. Finds nothing
    where only other portions add up."""
    if not all(len(allowed) for allowed in choices):
        return None
    dealt = [int(allowed[-1]) for allowed in choices]
    excess = sum(dealt) - samples
    even = max(1, -(-excess // len(choices)))
    for portion in (even, excess):
        for index, allowed in enumerate(choices):
            if excess <= 0:
                break
            wanted = max(1, dealt[index] - min(portion, excess))
            lower = int(allowed[np.searchsorted(allowed, wanted)])  # the least that takes back no more than wanted
            excess -= dealt[index] - lower
            dealt[index] = lower
    return tuple(dealt) if excess == 0 else None


def _by_sums(choices: list[Ints], samples: int) -> tuple[int, ...] | None:
    """By all sums that the first pipelines can have together: bit n of a number says that they can have n."""
    within = (1 << (samples + 1)) - 1
    sums = [1]
    for allowed in choices:
        reached = 0
        for count in allowed.tolist():
            reached |= sums[-1] << count
        sums.append(reached & within)
    if not sums[-1] >> samples & 1:
        return None
    left, dealt = samples, []
    for before, allowed in zip(reversed(sums[:-1]), reversed(choices), strict=True):
        count = next(count for count in reversed(allowed.tolist()) if count <= left and before >> (left - count) & 1)
        dealt.append(count)
        left -= count
    return tuple(reversed(dealt))
