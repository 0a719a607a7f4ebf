"""Deals the global batch to pipelines so that the last one to finish finishes as early as possible, and all samples
are dealt. Owns the arithmetic alone; seconds per number of samples come in as tables."""

from __future__ import annotations

import numpy as np

from shoal_planner.split import Floats


def least_time(tables: tuple[Floats, ...], samples: int) -> float:
    """A bound from below: the least time within which the pipelines could run `samples` in all, or more.

    `tables[p][n]` is pipeline p's time for n samples, inf where it cannot; index 0 is not used. Inf if there is none.
    """
    capacities = [np.minimum.accumulate(table[:0:-1])[::-1] for table in tables]  # least time for n or more
    times = np.unique(np.concatenate(capacities))
    times = times[np.isfinite(times)]
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        done = [int(np.searchsorted(capacity, times[middle], side="right")) for capacity in capacities]
        if min(done) >= 1 and sum(done) >= samples:
            high = middle
        else:
            low = middle + 1
    return float(times[low]) if low < len(times) else float("inf")


def deal(tables: tuple[Floats, ...], samples: int) -> tuple[float, tuple[int, ...]] | None:
    """The least time in which the pipelines run exactly `samples`, each at least one, and how many each; or None."""
    bound = least_time(tables, samples)
    if not np.isfinite(bound):
        return None
    times = np.unique(np.concatenate([table[1:] for table in tables]))
    times = times[np.isfinite(times) & (times >= bound)]
    low, high = 0, len(times) - 1
    if low > high or _reach(tables, samples, float(times[high])) is None:
        return None
    # Most often the bound itself can be reached; beyond it, what can be reached grows with the time.
    found = _reach(tables, samples, float(times[low]))
    while found is None and low < high:
        middle = (low + high) // 2
        if _reach(tables, samples, float(times[middle])) is None:
            low = middle + 1
        else:
            high = middle
        if low == high:
            found = _reach(tables, samples, float(times[low]))
    assert found is not None
    return float(times[low]), found


def _reach(tables: tuple[Floats, ...], samples: int, time_s: float) -> tuple[int, ...] | None:
    """Numbers of samples that the pipelines can run within the time and that add up; bit n of a mask stands for n."""
    options: list[list[int]] = [(np.flatnonzero(table[1 : samples + 1] <= time_s) + 1).tolist() for table in tables]
    reached = [1]
    whole = (1 << (samples + 1)) - 1
    for choices in options:
        mask = 0
        for count in choices:
            mask |= reached[-1] << count
        reached.append(mask & whole)
    if not reached[-1] >> samples & 1:
        return None
    left, dealt = samples, []
    for index in range(len(tables) - 1, -1, -1):
        count = _next_share(options[index], reached[index], left, index + 1)
        dealt.append(count)
        left -= count
    return tuple(reversed(dealt))


def _next_share(choices: list[int], reached: int, left: int, pipelines_left: int) -> int:
    """Of the shares that leave a sum the others can reach, the one nearest to the mean of what is left: as all are
    within the time, even shares are the least surprising."""
    possible = [count for count in choices if count <= left and reached >> (left - count) & 1]
    mean = left / pipelines_left
    return min(possible, key=lambda count: (abs(count - mean), count))
