"""Interval arithmetic against sets of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shoal_recovery.intervals import Interval, clip, covers, intersect, merge, subtract

intervals = st.tuples(st.integers(0, 30), st.integers(0, 30))
many = st.lists(intervals, max_size=8)


def numbers(parts: tuple[Interval, ...] | list[Interval]) -> set[int]:
    return {number for first, last in parts for number in range(first, last)}


@given(many)
def test_merge_keeps_the_numbers_and_leaves_gaps(parts: list[Interval]) -> None:
    merged = merge(parts)
    assert numbers(merged) == numbers(parts)
    assert all(first < last for first, last in merged)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))


@given(intervals, many)
def test_clip_and_subtract_share_out_the_whole(whole: Interval, parts: list[Interval]) -> None:
    merged, wanted = merge(parts), numbers([whole])
    assert numbers(clip(whole, merged)) == wanted & numbers(parts)
    assert numbers(subtract(whole, merged)) == wanted - numbers(parts)
    assert covers(merged, whole) == (wanted <= numbers(parts))


@given(intervals, intervals)
def test_intersect(one: Interval, other: Interval) -> None:
    common = intersect(one, other)
    assert numbers([common] if common else []) == numbers([one]) & numbers([other])
