"""Deals the global batch to pipelines so that the last one to finish finishes as early as possible, and all samples
are dealt. Owns the arithmetic alone; seconds per number of samples come in as tables."""

from __future__ import annotations

from collections import Counter

import numpy as np

from shoal_planner.split import Floats, Ints


def least_time(tables: tuple[Floats, ...], samples: int) -> float:
    """A bound from below: the least time within which the pipelines could run `samples` in all, or more.

    `tables[p][n]` is pipeline p's time for n samples, inf where it cannot; index 0 is not used. Inf if there is none.
    """
    alike = Counter(map(id, tables))  # pipelines of one kind share their table
    different = list({id(table): table for table in tables}.items())
    capacities = [(alike[key], np.minimum.accumulate(table[:0:-1])[::-1]) for key, table in different]
    times = np.unique(np.concatenate([capacity for _, capacity in capacities]))  # least time for n or more
    times = times[np.isfinite(times)]
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        done = [(count, int(np.searchsorted(found, times[middle], side="right"))) for count, found in capacities]
        if min(most for _, most in done) >= 1 and sum(count * most for count, most in done) >= samples:
            high = middle
        else:
            low = middle + 1
    return float(times[low]) if low < len(times) else float("inf")


def deal(tables: tuple[Floats, ...], samples: int) -> tuple[float, tuple[int, ...]] | None:
    """The least time in which the pipelines run exactly `samples`, each at least one, and how many each; or None."""
    bound = least_time(tables, samples)
    if not np.isfinite(bound):
        return None
    times = np.unique(np.concatenate([table[1:] for table in {id(table): table for table in tables}.values()]))
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
    by_table = {id(table): np.flatnonzero(table[1 : samples + 1] <= time_s) + 1 for table in tables}
    runs = {key: _runs(found) for key, found in by_table.items()}
    options = [by_table[id(table)] for table in tables]
    reached = [1]
    whole = (1 << (samples + 1)) - 1
    for table in tables:
        mask = 0
        for first, length in runs[id(table)]:
            mask |= _spread(reached[-1], length) << first
        reached.append(mask & whole)
    if not reached[-1] >> samples & 1:
        return None
    left, dealt = samples, []
    for index in range(len(tables) - 1, -1, -1):
        count = _next_share(options[index], reached[index], left, index + 1)
        dealt.append(count)
        left -= count
    return tuple(reversed(dealt))


def _runs(choices: Ints) -> list[tuple[int, int]]:
    """Runs of neighbouring numbers, as (first, how many)."""
    if not len(choices):
        return []
    breaks = np.flatnonzero(np.diff(choices) > 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(choices, breaks)]


def _spread(mask: int, length: int) -> int:
    """The mask shifted by 0 to length - 1, all joined; by doubling, as masks are long and most runs too."""
    done = 1
    while done < length:
        step = min(done, length - done)
        mask |= mask << step
        done += step
    return mask


def _next_share(choices: Ints, reached: int, left: int, pipelines_left: int) -> int:
    """Of the shares that leave a sum the others can reach, the one nearest to the mean of what is left: as all are
    within the time, even shares are the least surprising."""
    mean = left / pipelines_left
    possible = choices[choices <= left]
    for count in possible[np.argsort(np.abs(possible - mean), kind="stable")]:
        if reached >> (left - int(count)) & 1:
            return int(count)
    raise AssertionError("a sum that was reached is reached by some share")
