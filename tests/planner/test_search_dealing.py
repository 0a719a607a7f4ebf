"""Dealing samples to pipelines, against trying all."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.dealing import deal
from shoal_planner.options import Floats

SAMPLES = 6


def brute(tables: list[Floats], samples: int) -> float:
    """The earliest time by which all can be done with so many samples dealt; each pipeline gets one at least."""
    best = math.inf
    for counts in itertools.product(range(1, samples + 1), repeat=len(tables)):
        if sum(counts) == samples:
            best = min(best, max(float(table[count]) for table, count in zip(tables, counts, strict=True)))
    return best


def check(tables: list[Floats], samples: int) -> None:
    found, best = deal(tables, samples), brute(tables, samples)
    if found is None:
        assert best == math.inf
        return
    assert sum(found) == samples and min(found) >= 1
    assert max(float(table[count]) for table, count in zip(tables, found, strict=True)) == best


times = st.one_of(st.integers(1, 9).map(float), st.just(math.inf))


@settings(deadline=None, max_examples=500)
@given(
    rows=st.lists(st.lists(times, min_size=SAMPLES, max_size=SAMPLES), min_size=1, max_size=3),
    samples=st.integers(1, SAMPLES),
    alike=st.booleans(),
)
def test_a_deal_is_what_trying_all_finds(rows: list[list[float]], samples: int, alike: bool) -> None:
    """Whatever the times: numbers of samples may be impossible, and more of them may take less."""
    tables = [np.array([math.inf, *row]) for row in rows]
    check([tables[0]] * len(tables) if alike else tables, samples)


@settings(deadline=None, max_examples=300)
@given(
    pipelines=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 9), st.sampled_from([(1,), (1, 2), (1, 2, 4), (2,), (3, 4), (4,)])),
        min_size=1,
        max_size=4,
    ),
    samples=st.integers(1, 12),
)
def test_a_deal_of_micro_batches_is_what_trying_all_finds(
    pipelines: list[tuple[int, int, tuple[int, ...]]], samples: int
) -> None:
    """Times as pipelines have them: for each micro-batch size, some seconds to fill and some for each micro-batch."""
    tables = []
    for period, fill, sizes in pipelines:
        table = np.full(samples + 1, math.inf)
        for size in sizes:
            for number in range(1, samples // size + 1):
                table[number * size] = min(table[number * size], fill + number * (period * size**0.8))
        tables.append(table)
    check(tables, samples)


def test_too_many_pipelines_cannot_be_dealt_to() -> None:
    table = np.array([math.inf, 1.0, 2.0])
    assert deal([table] * 3, 2) is None
    assert deal([table, table], 2) == (1, 1)
