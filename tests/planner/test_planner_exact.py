"""The exact search against brute force over every use of the devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from planner_ground import MIB_PER_GIB, make_cluster, make_job

from shoal_planner.candidates import Pricer, Unit
from shoal_planner.cluster import parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.layouts import form_units
from shoal_planner.memory import held_elements, stage_memory, usable_bytes
from shoal_planner.profile import Profile
from shoal_planner.search import Search
from shoal_planner.split import pipeline_seconds


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


# --- the exact search ------------------------------------------------------------------------------------------------


def set_partitions(items: tuple[Unit, ...]) -> Iterator[list[list[Unit]]]:
    if not items:
        yield []
        return
    for partition in set_partitions(items[1:]):
        yield [[items[0]], *partition]
        for index, block in enumerate(partition):
            yield [*partition[:index], [items[0], *block], *partition[index + 1 :]]


def brute_force(costs: CostModel) -> float:
    """The least time over every use of the devices: units, groups, orders, layers, micro-batches, shares."""
    job, pricer = costs.job, Pricer(costs)
    best = math.inf
    cuts = [list(_all_cuts(node.devices)) for node in costs.snapshot.nodes]
    for choice in itertools.product(*cuts):
        units = form_units(zip(costs.snapshot.nodes, choice, strict=True), frozenset(), KINDS)
        if any(job.model.num_kv_heads % unit.tp for unit in units):
            continue
        for size in range(1, len(units) + 1):
            for used in itertools.combinations(units, size):
                for partition in set_partitions(used):
                    best = min(best, _best_partition(partition, pricer, costs))
    return best


KINDS: dict[object, int] = {}


def _all_cuts(devices: int) -> Iterator[tuple[int, ...]]:
    for counts in itertools.product(range(devices + 1), repeat=devices):
        if sum((tp + 1) * count for tp, count in enumerate(counts)) == devices:
            yield tuple(tp + 1 for tp, count in enumerate(counts) for _ in range(count))


def _best_partition(partition: list[list[Unit]], pricer: Pricer, costs: CostModel) -> float:
    batch = costs.job.train.global_batch
    tables = [
        [math.inf, *(_best_pipeline(tuple(block), n, len(partition), pricer, costs) for n in range(1, batch + 1))]
        for block in partition
    ]
    best = math.inf
    for counts in itertools.product(range(1, batch + 1), repeat=len(partition)):
        if sum(counts) == batch:
            best = min(best, max(table[count] for table, count in zip(tables, counts, strict=True)))
    return best


_PIPELINES: dict[tuple[object, ...], float] = {}


def _best_pipeline(block: tuple[Unit, ...], samples: int, pipelines: int, pricer: Pricer, costs: CostModel) -> float:
    key = (id(costs), tuple(sorted((u.kind, u.node) for u in block)), samples, pipelines)
    if key not in _PIPELINES:
        _PIPELINES[key] = min(
            _split_by_hand(word, size, samples // size, pipelines, pricer, costs)
            for word in itertools.permutations(block)
            for size in range(1, samples + 1)
            if samples % size == 0
        )
    return _PIPELINES[key]


def _split_by_hand(
    word: tuple[Unit, ...], size: int, micro_batches: int, pipelines: int, pricer: Pricer, costs: CostModel
) -> float:
    """Every composition of the layers, each stage's memory asked of the memory model itself."""
    model, train = costs.job.model, costs.job.train
    stages = pricer.stages(word, pipelines, size)
    best = math.inf
    for counts in compositions(model.layers, len(word)):
        if any(count == 0 for count in counts[1:-1]) or (len(word) == 1 and counts[0] == 0):
            continue
        fits = True
        for index, (unit, count) in enumerate(zip(word, counts, strict=True)):
            ends = {"embedding": index == 0, "head": index == len(word) - 1}
            memory = stage_memory(
                model,
                train.seq_len,
                train.precision,
                tp=unit.tp,
                samples=size,
                in_flight=min(len(word) - index, micro_batches),
                layers=count,
                **ends,
                owned=held_elements(model, unit.tp, count, **ends) / pipelines,
            )
            fits = fits and memory.total <= usable_bytes(costs.device(unit.node))
        if fits:
            seconds = pipeline_seconds(stages, np.array([counts]), np.array([micro_batches]))
            best = min(best, float(seconds[0]))
    return best


SMALL = {
    "three kinds": make_cluster(
        ("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 1, 1), ("c", "slow", 1, 1), memory_mib={"cpu-2t": 60, "cpu-1t": 40}
    ),
    "two pairs": make_cluster(("a", "cpu-2t", 1, 2), ("b", "cpu-1t", 1, 2), memory_mib={"cpu-2t": 50, "cpu-1t": 30}),
    "equal nodes": make_cluster(("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 3, 1), memory_mib={"cpu-2t": 80, "cpu-1t": 30}),
    "gpus": make_cluster(("a", "T4", 1, 2), ("b", "L4", 2, 1), memory_mib={}),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("layers", "batch"), [(4, 4), (3, 5)])
def test_the_search_equals_brute_force(name: str, layers: int, batch: int) -> None:
    cluster = SMALL[name]
    if name == "three kinds":
        cluster = parse_cluster(
            {
                "nodes": [{"name": node.id[0], "device": node.device} for node in cluster.nodes],
                "devices": {
                    "cpu-2t": {"memory_gib": 60 / MIB_PER_GIB},
                    "cpu-1t": {"memory_gib": 40 / MIB_PER_GIB},
                    "slow": {"memory_gib": 0.2, "tflops_fp32": 0.03, "threads": 1},
                },
            }
        )
    job = make_job(layers=layers, batch=batch)
    costs = CostModel(job, cluster, Profile())
    search = Search(costs, 0, 0, lambda share: False)
    search.run()
    expected = brute_force(costs)
    assert search.best()[0].seconds == pytest.approx(expected, rel=1e-9)
