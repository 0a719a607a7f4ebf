"""Arithmetic on half-open intervals of whole numbers, [first, last). Pure; knows nothing of parameters or bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def intersect(one: Interval, other: Interval) -> Interval | None:
    """What both have in common; None if that is nothing."""
    first, last = max(one[0], other[0]), min(one[1], other[1])
    return (first, last) if first < last else None


def merge(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same numbers as sorted intervals that neither overlap nor touch. Empty ones vanish."""
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if first >= last:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def clip(whole: Interval, parts: Sequence[Interval]) -> tuple[Interval, ...]:
    """The parts of `whole` that lie in `parts`, which must be as `merge` returns them."""
    found: list[Interval] = []
    start = max(0, bisect_right(parts, whole[0], key=lambda part: part[0]) - 1)
    for index in range(start, len(parts)):
        if parts[index][0] >= whole[1]:
            break
        common = intersect(whole, parts[index])
        if common is not None:
            found.append(common)
    return tuple(found)


def subtract(whole: Interval, parts: Sequence[Interval]) -> tuple[Interval, ...]:
    """The parts of `whole` that do not lie in `parts`, which must be as `merge` returns them."""
    gaps: list[Interval] = []
    reached = whole[0]
    for first, last in clip(whole, parts):
        if reached < first:
            gaps.append((reached, first))
        reached = last
    if reached < whole[1]:
        gaps.append((reached, whole[1]))
    return tuple(gaps)


def covers(parts: Sequence[Interval], whole: Interval) -> bool:
    """Whether all of `whole` lies in `parts`, which must be as `merge` returns them."""
    return not subtract(whole, parts)
