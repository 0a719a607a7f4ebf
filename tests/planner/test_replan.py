"""Re-planning: what is kept after a loss, what a change moves and costs, and whether new nodes are worth it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict

import pytest
from planner_ground import make_job
from random_clusters import draw_large

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.finish import Finisher, Unit
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.moving import LONGEST_UPTIME_S, STAY, Outlook, arriving_bytes, move, uptime_s
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.pools import PoolNode
from shoal_planner.preemption import PreemptionRate
from shoal_planner.profile import Profile
from shoal_planner.repair import GOOD_ENOUGH
from shoal_planner.score import score, score_with
from shoal_planner.search import PlanResult, plan, step_s
from shoal_planner.standing import standing
from shoal_recovery.intervals import merge, subtract
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ShardMap

LONG = Outlook(uptime_s=1e8)


def gpu_job(batch: int = 512) -> JobSpec:
    model = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000}
    train = {"global_batch": batch, "seq_len": 2048, "steps": 1000, "precision": "bf16"}
    return parse_job(
        {"name": "big", "model": {**model, "tie_embeddings": False}, "data": {"uri": "stdlib:"}, "train": train}
    )


def gpu_cluster(*nodes: tuple[str, str, int], spot: bool = False) -> ClusterSnapshot:
    """Nodes of 8 devices as (name, device, count)."""
    shape = {
        "devices": 8,
        "intra_gb_per_s": 300,
        "inter_gbit_per_s": 200,
        "nics": 4,
        "host_memory_gib": 1024,
        "spot": spot,
    }
    return parse_cluster(
        {"nodes": [{"name": name, "device": device, "count": count, **shape} for name, device, count in nodes]}
    )


def per_node(job: JobSpec, snapshot: ClusterSnapshot) -> Plan:
    """A pipeline of 8 stages on each node, with the layers and samples that suit them: a good plan without a search."""
    costs = CostModel(job, snapshot, Profile())
    finisher = Finisher(costs, 1)
    words = tuple(tuple(Unit(node.id, (index,)) for index in range(node.devices)) for node in snapshot.nodes)
    draft = finisher.draft(words)
    assert draft is not None
    return score_with(finisher.plan(draft), costs)


MIXED = gpu_cluster(("a100", "A100-80G", 40), ("h100", "H100-80G", 24))
JOB = gpu_job(batch=4096)


@pytest.fixture(scope="module")
def running() -> Plan:
    return per_node(JOB, MIXED)


def layers_by_device(found: Plan) -> dict[tuple[str, int], tuple[int, int]]:
    return {
        (replica.node, index): stage.layers[0]
        for pipeline in found.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for index in replica.devices
    }


def one_stage(*nodes: str, layers: int = 8, micro_batches: int = 4) -> Plan:
    """A pipeline on the first device of each node."""
    stage = [Stage(layers=((0, layers),), replicas=(Replica(node=node, devices=(0,)),)) for node in nodes]
    return Plan(pipelines=tuple(Pipeline(micro_batch=1, micro_batches=micro_batches, stages=(s,)) for s in stage))


def two_stages(first: str, second: str, cut: int = 4) -> Plan:
    stages = (
        Stage(layers=((0, cut),), replicas=(Replica(node=first, devices=(0,)),)),
        Stage(layers=((cut, 8),), replicas=(Replica(node=second, devices=(0,)),)),
    )
    return Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=16, stages=stages),))


EVEN = parse_cluster({"nodes": [{"name": "n", "device": "A100-80G", "count": 4, "devices": 4, "inter_gbit_per_s": 80}]})


# --- a loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["a100-7", "h100-3"])
def test_after_a_loss_most_devices_keep_their_layers(running: Plan, lost: str) -> None:
    rest = MIXED.without([lost])
    result = plan(JOB, rest, previous=running)
    score(result.plan, JOB, rest)  # nothing over memory, and nothing on the node that is gone
    before, after = layers_by_device(running), layers_by_device(result.plan)
    kept = sum(after.get(place) == layers for place, layers in before.items())
    assert kept >= 62 * 8
    assert result.num_candidates < 10  # mended, not searched for
    change = result.change
    assert change is not None and change.move and change.plan == result.plan
    assert re.match(
        rf"Moves, as {lost} can no longer be used: 6[23] of 63 pipelines keep their devices and layers; [\d.]+ GB "
        r"cross between nodes in a pause of [\d.]+ s\. ",
        result.plan.reason,
    )


def test_a_mended_plan_gets_as_much_out_of_its_devices_and_moves_less(running: Plan) -> None:
    rest = MIXED.without(["a100-7"])
    costs = CostModel(JOB, rest, Profile())
    mended = plan(JOB, rest, previous=running).plan
    fresh = per_node(JOB, rest)  # the same nodes in the same order, but everything anew
    assert step_s(mended) <= step_s(fresh) * 1.03
    turned = score(dataclasses.replace(fresh, pipelines=fresh.pipelines[::-1]), JOB, rest)
    moved = sum(arriving_bytes(running, mended, costs).values())
    assert moved <= sum(arriving_bytes(running, turned, costs).values())


def test_units_of_a_broken_pipeline_live_on() -> None:
    """Pipelines across three nodes: what is left of a broken one, or its devices in other pipelines, still trains."""
    snapshot = gpu_cluster(("a100", "A100-80G", 24))
    nodes = [node.id for node in snapshot.nodes]
    words = tuple(
        tuple(Unit(node, (index,)) for node in nodes[at : at + 3] for index in range(8)) for at in range(0, 24, 3)
    )
    costs = CostModel(JOB, snapshot, Profile())
    draft = Finisher(costs, 1).draft(words)
    assert draft is not None
    before = score_with(Finisher(costs, 1).plan(draft), costs)
    rest = snapshot.without([nodes[4]])
    result = plan(JOB, rest, previous=before)
    assert result.num_candidates < 10
    assert len(result.plan.devices()) == 23 * 8
    assert step_s(result.plan) <= step_s(before) * 24 / 23 / GOOD_ENOUGH


def test_a_node_that_joins_as_another_is_lost_takes_its_place_once() -> None:
    shape = {"device": "cpu-1t", "devices": 1, "inter_gbit_per_s": 8000, "intra_gb_per_s": 1000}
    cluster = parse_cluster({"nodes": [{"name": "n", "count": 5, **shape}]})
    model = {"layers": 6, "hidden": 64, "heads": 4, "ffn": 160, "vocab": 256}
    train = {"global_batch": 6, "seq_len": 32, "steps": 100}
    job = parse_job({"name": "small", "model": model, "data": {"uri": "stdlib:"}, "train": train})
    before = Plan(
        pipelines=tuple(
            Pipeline(
                micro_batch=3,
                micro_batches=1,
                stages=tuple(
                    Stage(layers=(layers,), replicas=(Replica(node=node, devices=(0,), samples=3),))
                    for node, layers in zip(nodes, ((0, 3), (3, 6)), strict=True)
                ),
            )
            for nodes in (("n-0", "n-1"), ("n-4", "n-3"))
        )
    )
    found = plan(job, cluster.without(["n-1"]), previous=before).plan
    assert {replica.node for replica in found.replicas()} <= {"n-0", "n-2", "n-3", "n-4"}


def test_without_a_pipeline_that_stays_all_is_searched_for() -> None:
    job, snapshot = make_job(), gpu_cluster(("a100", "A100-80G", 2))
    before = score(two_stages("a100-0", "a100-1"), job, snapshot)
    rest = snapshot.without(["a100-1"])
    result = plan(job, rest, previous=before)
    assert result.change is not None and result.change.move
    assert step_s(result.plan) <= step_s(plan(job, rest).plan) * 1.05  # more devices than are proven again
    assert "Moves, as a100-1 can no longer be used: no pipeline stays as it was" in result.plan.reason


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.long), 4])
def test_random_clusters_lose_a_node(seed: int) -> None:
    """Not worse than a plan from nothing, which costs a search, and nothing over memory."""
    drawn = draw_large(seed, 8, 24)
    before = plan(drawn.job, drawn.cluster).plan
    used = sorted({replica.node for replica in before.replicas()})
    rest = drawn.cluster.without([used[seed % len(used)]])
    fresh = plan(drawn.job, rest).plan
    result = plan(drawn.job, rest, previous=before, outlook=LONG)
    score(result.plan, drawn.job, rest)
    assert step_s(result.plan) <= step_s(fresh) * 1.04
    again = plan(drawn.job, rest, previous=before, outlook=LONG)
    assert again.plan == result.plan and again.change == result.change


# --- new nodes -------------------------------------------------------------------------------------------------------


def joined(uptime_s: float, restart_s: float = 2.0) -> tuple[Plan, PlanResult]:
    small, large = gpu_cluster(("a100", "A100-80G", 4)), gpu_cluster(("a100", "A100-80G", 5))
    before = per_node(JOB, small)
    return before, plan(JOB, large, previous=before, outlook=Outlook(uptime_s=uptime_s, restart_s=restart_s))


def test_a_new_node_is_worth_the_move_where_plans_live_long() -> None:
    before, result = joined(uptime_s=36_000.0)
    change = result.change
    assert change is not None and change.move
    assert step_s(result.plan) < 0.85 * step_s(before)
    assert change.gain == pytest.approx((36_000 - change.pause_s) / step_s(result.plan) / (36_000 / step_s(before)) - 1)
    assert change.moved_bytes > 0 and change.pause_s > 2.0
    assert re.match(
        r"Moves: steps get [12]\d\.\d% shorter; [\d.]+ GB cross between nodes in a pause of [\d.]+ s, which is made "
        r"good after [\d.]+ s of the 10 h until the next change is to be expected\. ",
        result.plan.reason,
    )


def test_steps_that_preemptions_undo_are_told_apart_from_shorter_ones() -> None:
    def spot(count: int) -> ClusterSnapshot:
        drawn = gpu_cluster(("a100", "A100-80G", count), spot=True)
        nodes = tuple(dataclasses.replace(node, preemptions_per_hour=0.5) for node in drawn.nodes)
        return dataclasses.replace(drawn, nodes=nodes)

    before = per_node(JOB, spot(4))
    result = plan(JOB, spot(5), previous=before, outlook=Outlook(uptime_s=36_000.0, restart_s=2.0))
    found = re.match(
        r"Moves: steps get ([\d.]+)% shorter, and ([\d.]+)% less time goes into each that preemptions do not undo; ",
        result.plan.reason,
    )
    assert found is not None, result.plan.reason
    plain = 1 - step_s(result.plan) / step_s(before)
    assert float(found[1]) == pytest.approx(100 * plain, abs=0.06)
    assert float(found[2]) != pytest.approx(100 * plain, abs=0.04)


def test_a_new_node_is_left_alone_where_plans_live_short() -> None:
    before, result = joined(uptime_s=60.0, restart_s=30.0)
    change = result.change
    assert change is not None and not change.move
    assert result.plan.plan_id == before.plan_id
    assert change.gain < 0 and change.pause_s > 30 and change.moved_bytes > 0
    assert re.match(
        r"Stays: moving [\d.]+ GB would cost 3\d s, and the new plan gains \d+ min an hour, too little until the next "
        r"change\. ",
        result.plan.reason,
    )


def test_nothing_changes_where_nothing_changed() -> None:
    job, snapshot = make_job(), gpu_cluster(("a100", "A100-80G", 2))
    before = plan(job, snapshot).plan
    result = plan(job, snapshot, previous=before)
    assert result.plan.plan_id == before.plan_id
    assert result.change is not None and not result.change.move
    assert result.plan.reason.startswith("Stays: ")


# --- what a change takes ---------------------------------------------------------------------------------------------


def test_what_moves_is_what_the_shard_maps_say() -> None:
    job = make_job(tie=False)
    plans = [
        one_stage("n-0", "n-1", "n-2", "n-3"),
        one_stage("n-0", "n-1", micro_batches=8),
        one_stage("n-2", "n-1", micro_batches=8),
        two_stages("n-0", "n-1"),
        two_stages("n-1", "n-3", cut=6),
    ]
    costs = CostModel(job, EVEN, Profile())
    for before, after in itertools.permutations(plans, 2):
        expected = bytes_by_map(before, after, job)
        found = arriving_bytes(before, after, costs)
        assert {node: pytest.approx(count, rel=1e-3, abs=2000) for node, count in expected.items() if count} == {
            node: count for node, count in found.items() if count
        }


def bytes_by_map(before: Plan, after: Plan, job: JobSpec) -> dict[str, float]:
    """By node: 4 bytes for every element of a weight that is new to it, 12 for every element that it newly owns."""
    found: dict[str, float] = defaultdict(float)
    old, new = shard_map(before, job.model), shard_map(after, job.model)
    for kind, size in (("holds", 4), ("owns", 12)):
        there = by_node(old, kind)
        for (node, fqn), intervals in by_node(new, kind).items():
            for interval in merge(intervals):
                missing = subtract(interval, merge(there.get((node, fqn), [])))
                found[node] += size * sum(last - first for first, last in missing)
    return found


def by_node(shards: ShardMap, kind: str) -> dict[tuple[str, str], list[tuple[int, int]]]:
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for rank in shards.ranks:
        for span in getattr(rank, kind):
            found[rank.device.node, span.fqn].append((span.first, span.last))
    return found


def test_uptime_follows_from_the_rates_of_the_nodes() -> None:
    on_demand, spot = gpu_cluster(("a", "A100-80G", 4)), gpu_cluster(("a", "A100-80G", 4), spot=True)
    assert uptime_s(on_demand, Outlook()) == LONGEST_UPTIME_S
    assert uptime_s(gpu_cluster(("a", "A100-80G", 100)), Outlook()) == pytest.approx(3600 / (100 * 1.6e-4))
    assert 600 < uptime_s(spot, Outlook()) < 10 * 3600
    pool = PoolNode(pool="p", rate=PreemptionRate(single_per_h=0.5))
    assert uptime_s(spot, Outlook(pools={node.id: pool for node in spot.nodes})) == pytest.approx(3600 / 2)
    assert uptime_s(spot, Outlook(uptime_s=7.0)) == 7.0


def test_a_pause_is_the_restart_and_the_bytes_over_the_slowest_node() -> None:
    job = make_job(tie=False)
    costs = CostModel(job, EVEN, Profile())
    before, after = one_stage("n-0", "n-1", micro_batches=8), one_stage("n-0", "n-2", micro_batches=8)
    arriving = arriving_bytes(before, after, costs)
    assert arriving.keys() == {"n-2"}
    found = move(before, after, costs, Outlook(restart_s=3.0))
    assert found.moved_bytes == arriving["n-2"]
    assert found.pause_s == pytest.approx(3.0 + arriving["n-2"] / 10e9)
    assert found.steps(2.0, 103.0) == pytest.approx((103.0 - found.pause_s) / 2)
    assert found.steps(2.0, 1.0) == 0.0
    assert STAY.steps(2.0, 100.0) == 50.0


def test_the_end_of_a_job_is_an_end() -> None:
    before, _ = joined(uptime_s=1e6)
    large = gpu_cluster(("a100", "A100-80G", 5))
    few = plan(JOB, large, previous=before, outlook=Outlook(uptime_s=1e6, restart_s=200.0, steps_left=3))
    assert few.change is not None and not few.change.move
    many = plan(JOB, large, previous=before, outlook=Outlook(uptime_s=1e6, restart_s=200.0, steps_left=3000))
    assert many.change is not None and many.change.move


@pytest.mark.parametrize(
    ("field", "value"), [("restart_s", -1.0), ("uptime_s", -1.0), ("uptime_s", float("nan")), ("steps_left", -1)]
)
def test_an_outlook_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidField, match=field):
        Outlook(**{field: value})  # type: ignore[arg-type]


# --- what still stands -----------------------------------------------------------------------------------------------


def test_what_still_stands_is_told_apart() -> None:
    job = make_job(tie=False)
    before = dataclasses.replace(
        Plan(pipelines=(*one_stage("n-0", micro_batches=8).pipelines, *two_stages("n-1", "n-2").pipelines)),
        unused=("n-0:1", "n-1:1"),
    )
    rest = EVEN.without(["n-2"])
    found = standing(before, CostModel(job, rest, Profile()))
    assert found is not None
    assert [place for place, _ in found.kept] == [0]
    assert [(broken.place, broken.rest()) for broken in found.broken] == [(1, (Unit("n-1", (0,)),))]
    assert dict(found.free) == {"n-0": (1, 2, 3), "n-1": (1, 2, 3), "n-3": (0, 1, 2, 3)}
    assert (found.lost, found.joined) == (("n-2",), ("n-3",))


def test_stages_of_several_replicas_are_not_mended() -> None:
    pair = tuple(Replica(node="n-0", devices=(index,), samples=1) for index in range(2))
    before = Plan(
        pipelines=(Pipeline(micro_batch=2, micro_batches=8, stages=(Stage(layers=((0, 8),), replicas=pair),)),)
    )
    job = make_job(tie=False)
    assert standing(before, CostModel(job, EVEN, Profile())) is None
    result = plan(job, EVEN.without(["n-1"]), previous=before)
    assert result.change is not None and result.plan.prediction is not None
