"""The exact search's own arithmetic: what it expects of a plan is what `score` says, no bound lies above what it
bounds, and its gate hangs on numbers alone. That it equals brute force is tested in test_planner_oracle."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from oracle import Space, draw_countable, draw_tiny, num_copies
from planner_ground import make_cluster, make_job
from random_clusters import Instance

from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.exact import Exact, deals, is_proven, search_exactly
from shoal_planner.options import tp_degrees, usable_nodes
from shoal_planner.overlap_choice import received_ahead
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.score import score_with
from shoal_planner.search import plan, step_s
from shoal_planner.shape_plan import have_ample_hosts, rooms_of
from shoal_planner.shapes import Bounds, chains, frames


class Judge:
    """What a search offers, and what `score` says of it."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.costs = CostModel(instance.job, instance.cluster, Profile())
        self.offered: list[tuple[Plan, float]] = []

    def consider(self, made: Plan) -> float:
        try:
            scored = score_with(received_ahead(made, self.instance.job), self.costs)
        except NoPlanFits:
            self.offered.append((made, math.inf))
            return math.inf
        assert scored.prediction is not None
        self.offered.append((made, scored.prediction.step_s))
        return scored.prediction.step_s

    def exact(self) -> Exact:
        nodes = usable_nodes(self.instance.job, self.instance.cluster)
        return Exact(self.costs, num_copies(self.instance.job, self.instance.cluster), nodes, self.consider)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_lie_below_the_plans_of_their_shapes(seed: int) -> None:
    """Of each shape by itself the best plan is scored: both bounds are at most that."""
    judge = Judge(draw_countable(seed, 400))
    checked = 0
    shapes = list(judge.exact().shapes(1, 16))
    for first_s, shape in shapes[:: max(1, len(shapes) // 20)]:
        search = judge.exact()
        sharper_s = search.bound_s(shape)
        search.search(shape)
        assert first_s <= search.best_s * (1 + 1e-12)
        assert sharper_s <= search.best_s * (1 + 1e-12)
        checked += math.isfinite(search.best_s)
    assert checked or not any(math.isfinite(seconds) for _, seconds in judge.offered)


@pytest.mark.parametrize("seed", range(12))
def test_expected_seconds_are_those_of_the_score(seed: int) -> None:
    """All layers of some shapes: seconds by tables are seconds by score, and what has no room does not fit."""
    judge = Judge(draw_tiny(seed, 0, most_devices=4))
    search = judge.exact()
    shapes = [shape for _, shape in search.shapes(1, 16)]
    for shape in shapes[:: max(1, len(shapes) // 8)]:
        after = search.exchanges.after(shape, [search.times.rows(len(placed.chain.stages)) for placed in shape])
        network_s = search._network_s(shape)
        for place in itertools.islice(np.ndindex(*after.seconds.shape), 0, None, max(1, after.seconds.size // 4)):
            tables = [
                search.times.row(placed.chain, search.times.rows(len(placed.chain.stages))[row], owned)
                for p, (placed, row) in enumerate(zip(shape, place, strict=True))
                for owned in [search._owned(shape, p, place, after)]
            ]
            dealt = deals(judge.instance.job.train.global_batch, len(shape))
            slowest = np.maximum.reduce([network_s, *(table[dealt[:, p]] for p, table in enumerate(tables))])
            expected_s = float(slowest.min() + after.seconds[place])
            judge.offered.clear()
            search.best_s = math.inf
            search._try(shape, tuple(np.intp(index) for index in place), after, network_s)
            if not judge.offered:
                assert math.isinf(expected_s)
            elif after.lacking[place]:
                assert judge.offered[0][1] == math.inf
            else:
                assert judge.offered[0][1] == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_shapes_are_those_of_brute_force(seed: int) -> None:
    """No fewer than the oracle counts by trying all permutations; some may come up twice. Up to three devices: with
    more the oracle tells orders of replicas apart that cost the same, as they all meet the same neighbour."""
    instance = draw_tiny(seed, 0, most_devices=3)
    nodes = usable_nodes(instance.job, instance.cluster)
    costs = CostModel(instance.job, instance.cluster, Profile())
    rooms = rooms_of(nodes, costs, apart=not have_ample_hosts(nodes, costs))
    batch = instance.job.train.global_batch
    bounds = Bounds(tp_degrees(costs, 4), instance.job.model.layers + 2, batch)
    found = chains(rooms, bounds)
    num_shapes = sum(
        math.prod(len(found[slots]) for slots, _ in frame) for frame in frames(list(found), rooms, batch)
    )  # pipelines of the same slots count in any order here
    space = Space(dataclasses.replace(instance, job=with_one_device(instance)), one_replica=False)
    assert sum(1 for _ in space.shapes()) <= num_shapes


def with_one_device(instance: Instance):  # type: ignore[no-untyped-def]
    limits = dataclasses.replace(instance.job.limits, min_devices=1)
    return dataclasses.replace(instance.job, limits=limits)


def test_two_unequal_devices_have_six_shapes() -> None:
    """Alone with each, in a row in both orders, side by side as a stage or as two pipelines."""
    instance = next(
        drawn
        for seed in itertools.count()
        if len((drawn := draw_tiny(seed, 0, most_devices=2)).cluster.nodes) == drawn.cluster.num_devices == 2
    )
    costs = CostModel(instance.job, instance.cluster, Profile())
    rooms = rooms_of(instance.cluster.nodes, costs, apart=True)
    found = chains(rooms, Bounds((1,), 4, 4))
    assert sum(map(len, found.values())) == 2 + 2 + 1
    assert len(list(frames(list(found), rooms, 4))) == 2 + 1 + 1
    assert len(list(frames(list(found), rooms, 1))) == 2 + 1


@pytest.mark.parametrize(("layers", "batch", "searched"), [(32, 64, True), (33, 64, False), (32, 65, False)])
def test_the_gate_counts_layers_and_samples(layers: int, batch: int, searched: bool) -> None:
    instance = draw_tiny(1, 0, most_devices=2)
    job = dataclasses.replace(
        instance.job,
        model=dataclasses.replace(instance.job.model, layers=layers),
        train=dataclasses.replace(instance.job.train, global_batch=batch),
    )
    nodes = tuple(dataclasses.replace(node, host_memory_bytes=2**50) for node in instance.cluster.nodes)
    ample = tuple(dataclasses.replace(entry, memory_bytes=2**40) for entry in instance.cluster.overrides)
    cluster = dataclasses.replace(instance.cluster, nodes=nodes, overrides=ample)
    judge = Judge(dataclasses.replace(instance, job=job, cluster=cluster))
    assert is_proven(judge.costs) is searched
    search_exactly(judge.costs, num_copies(job, cluster), math.inf, judge.consider)
    assert bool(judge.offered) is searched


def test_state_on_hosts_is_part_of_the_proof() -> None:
    """With ever more memory nothing gets slower, from where state must be on hosts to where nothing is short."""
    job = make_job(layers=8, batch=8, hidden=1024, seq_len=2048, precision="bf16", copies=0)
    found, hosted = [], []
    for mib in range(1200, 3800, 200):
        cluster = make_cluster(("n", "L4", 1, 3), memory_mib={"L4": mib})
        best = plan(job, cluster).plan
        stages = [stage for pipeline in best.pipelines for stage in pipeline.stages]
        hosted.append(any(entry.offload == "optimizer" for stage in stages for entry in stage.overrides))
        found.append(step_s(best))
    assert hosted[0] and not hosted[-1]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(found)), found
