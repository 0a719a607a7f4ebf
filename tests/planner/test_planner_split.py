"""Layers to stages and samples to pipelines, against exhaustive enumeration and the golden cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.candidates import Unit
from shoal_planner.deal import deal, least_time
from shoal_planner.layouts import arrangements
from shoal_planner.split import StageCost, pipeline_seconds, split_layers

# --- the split of layers ---------------------------------------------------------------------------------------------


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def brute_split(stages: tuple[StageCost, ...], num_layers: int, micro_batches: int) -> float:
    best = math.inf
    for counts in compositions(num_layers, len(stages)):
        fits = True
        for index, (stage, count) in enumerate(zip(stages, counts, strict=True)):
            flight = min(len(stages) - index, micro_batches)
            used = stage.fixed_bytes + count * stage.layer_bytes
            used += flight * (stage.flight_fixed_bytes + count * stage.flight_layer_bytes)
            fits = fits and used <= stage.capacity_bytes and count >= stage.least
        if fits:
            layers = np.array([counts])
            best = min(best, float(pipeline_seconds(stages, layers, np.array([micro_batches]))[0]))
    return best


stage_costs = st.builds(
    StageCost,
    per_layer_s=st.integers(1, 9).map(float),
    fixed_s=st.integers(0, 5).map(float),
    sync_per_layer_s=st.integers(0, 9).map(float),
    sync_fixed_s=st.integers(0, 9).map(float),
    capacity_bytes=st.integers(0, 60).map(float),
    layer_bytes=st.integers(0, 5).map(float),
    fixed_bytes=st.integers(0, 9).map(float),
    flight_layer_bytes=st.integers(0, 3).map(float),
    flight_fixed_bytes=st.integers(0, 2).map(float),
    least=st.integers(0, 1),
)


@settings(deadline=None, max_examples=300)
@given(stages=st.lists(stage_costs, min_size=1, max_size=4).map(tuple), num_layers=st.integers(1, 7))
def test_the_split_equals_exhaustive_enumeration(stages: tuple[StageCost, ...], num_layers: int) -> None:
    numbers = np.array([1, 2, 5])
    found = split_layers(stages, num_layers, numbers)
    for index, number in enumerate(numbers):
        assert found.seconds[index] == pytest.approx(brute_split(stages, num_layers, int(number)))
        if np.isfinite(found.seconds[index]):
            assert found.layers[index].sum() == num_layers


# --- the golden cases of unequal pipelines ---------------------------------------------------------------------------

GOLDEN = {
    "A": ([(2.0, 80)] * 4 + [(1.0, 80)] * 4, 56.0),
    "B": ([(2.0, 80)] * 2 + [(1.0, 80)] * 4, 84.0),
    "D": ([(2.0, 40)] * 2 + [(1.0, 96)] * 2, 108.0),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_a_golden_case_is_reproduced(case: str) -> None:
    """24 layers of 4 GB and 0.5 GB per micro-batch in flight; 24 micro-batches, the same number for each pipeline."""
    devices, optimum = GOLDEN[case]
    kinds = sorted(set(devices))
    units = tuple(
        sorted(
            Unit(kind=kinds.index(device), node=f"n-{number}", devices=(0,)) for number, device in enumerate(devices)
        )
    )
    times: dict[tuple[tuple[int, ...], int], float] = {}
    best = math.inf
    for words in arrangements(units, len(devices), set()):
        if 24 % len(words) or max(map(len, words)) > 5:
            continue
        keys = [(tuple(unit.kind for unit in word), 24 // len(words)) for word in words]
        for key in keys:
            if key not in times:
                stages = tuple(
                    StageCost(
                        per_layer_s=1 / kinds[kind][0],
                        capacity_bytes=kinds[kind][1],
                        layer_bytes=4,
                        flight_layer_bytes=0.5,
                    )
                    for kind in key[0]
                )
                times[key] = float(split_layers(stages, 24, np.array([key[1]])).seconds[0])
        best = min(best, max(times[key] for key in keys))
    assert best == optimum


# --- dealing samples -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(
        st.lists(st.one_of(st.integers(1, 9), st.just(math.inf)), min_size=6, max_size=6), min_size=1, max_size=3
    )
)
def test_dealing_equals_exhaustive_enumeration(rows: list[list[float]]) -> None:
    tables = tuple(np.array([math.inf, *row], dtype=np.float64) for row in rows)
    best = math.inf
    for counts in itertools.product(range(1, 7), repeat=len(rows)):
        if sum(counts) == 6:
            best = min(best, max(float(table[count]) for table, count in zip(tables, counts, strict=True)))
    found = deal(tables, 6)
    assert least_time(tables, 6) <= best
    if found is None:
        assert best == math.inf
    else:
        assert found[0] == best
        assert sum(found[1]) == 6
        assert max(table[count] for table, count in zip(tables, found[1], strict=True)) <= best
