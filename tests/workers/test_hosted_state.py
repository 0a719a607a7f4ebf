"""Optimizer state in the memory of hosts: the same numbers as one process, to the bit those of state on the device; the
device has no memory of it, and what hosts give is charged and limited."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_runs import LAYOUTS, assert_holders_agree, assert_same_bits, hosting, job, worst_difference

from shoal_planner.cluster import GIB, ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.levels import Sharding
from shoal_planner.loads import replica_loads, segments
from shoal_planner.memory import snapshot_bytes
from shoal_planner.parameters import num_parameters, parameters
from shoal_planner.plan import Plan, Schedule
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_recovery.placement import place_copies
from shoal_recovery.shard_map import shard_map
from shoal_workers.errors import OutOfHostMemory
from shoal_workers.exchange import SoloExchange
from shoal_workers.host_room import host_limits
from shoal_workers.live import OPTIMIZER, PASSING
from shoal_workers.processes import Processes
from shoal_workers.solo import RankRun, RunRequest, SoloRun, build_rank, run_rank, run_solo, solo_plan, whole_state

STEPS = 20
BOUND = 1e-5
SPLIT = Sharding(weights="cluster", gradients="cluster")
IN_NODES = Sharding(weights="node", gradients="none", optimizer="node")


@pytest.fixture(scope="module")
def solo() -> SoloRun:
    return run_solo(job(), STEPS)


@pytest.mark.parametrize(
    ("layout", "layers", "sharding", "schedule"),
    [
        ("tp 1 beside tp 2", ((0, 6),), Sharding(optimizer="none"), "1f1b"),
        ("uneven state, head alone", ((0, 1), (3, 5)), SPLIT, "1f1b"),
        pytest.param("3 stages beside 1", ((1, 3),), Sharding(), "zero_bubble", marks=pytest.mark.long),
        pytest.param("replicas of 3 and 1", ((0, 4),), IN_NODES, "zero_bubble", marks=pytest.mark.long),
        pytest.param("tp 2", ((2, 3),), Sharding(), "1f1b", marks=pytest.mark.long),
    ],
)
def test_state_on_hosts_equals_one_process(
    processes: Processes,
    solo: SoloRun,
    layout: str,
    layers: tuple[tuple[int, int], ...],
    sharding: Sharding,
    schedule: Schedule,
) -> None:
    given = replace(hosting(LAYOUTS[layout], *layers), sharding=sharding, schedule=schedule)
    given = in_slices(given, 2 if sharding == SPLIT else 1)
    run = processes.run(RunRequest(job=job(), plan=given, until_step=STEPS))
    assert any(rank.host_breakdown for rank in run.ranks)
    assert worst_difference(run.weights, solo.weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo.losses, rtol=1e-5)
    assert_holders_agree(run, job())


def test_one_pipeline_may_have_on_hosts_what_another_has_on_devices(processes: Processes) -> None:
    """They own parts of the same layers. Clipping and all bits are as if everything lay on devices."""
    spec = job()
    spec = replace(spec, train=replace(spec.train, clip_norm=0.3))
    plain = LAYOUTS["3 stages beside 1"]
    mixed = replace(plain, pipelines=(hosting(plain, (0, 6)).pipelines[0], plain.pipelines[1]))
    run = processes.run(RunRequest(job=spec, plan=mixed, until_step=4))
    assert [bool(rank.host_breakdown) for rank in run.ranks] == [True] * 4 + [False]
    assert_same_bits(run.state, processes.run(RunRequest(job=spec, plan=plain, until_step=4)).state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_on_hosts_and_what_on_devices_continue_each_other(precision: str) -> None:
    """To the bit, in either direction."""
    spec = job(precision=precision)  # type: ignore[arg-type]
    plain = RunRequest(job=spec, plan=solo_plan(spec), until_step=6)
    hosted = replace(plain, plan=hosting(plain.plan, (0, 2), (4, 6)))
    whole = run(plain)
    for first, then in ((plain, hosted), (hosted, plain)):
        start = whole_state(spec, [run(replace(first, until_step=3))])
        rest = run(replace(then, start=start))
        assert_same_bits(whole_state(spec, [rest]), whole_state(spec, [whole]))
        assert rest.losses == whole.losses[3:]
        for key, weights in whole.kept.items():
            assert rest.kept[key].tobytes() == weights.tobytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_devices_hold_nothing_of_it_and_hosts_what_was_predicted(precision: str) -> None:
    spec = job(precision=precision)  # type: ignore[arg-type]
    plain = solo_plan(spec)
    given = hosting(plain, (1, 5))
    here = run(RunRequest(job=spec, plan=given, until_step=1))
    before = run(RunRequest(job=spec, plan=plain, until_step=1))
    block = sum(parameter.numel for parameter in parameters(spec.model) if parameter.units == (1,))
    assert here.host_breakdown == {OPTIMIZER: 4 * block * 12, PASSING: block * 4}

    cluster = ClusterSnapshot(nodes=(_node("solo"),))
    scored = score(given, spec, cluster)
    assert scored.prediction is not None
    assert scored.prediction.host_bytes == (("solo:0", sum(here.host_breakdown.values())),)
    costs = CostModel(spec, cluster, Profile())
    own_bytes = 8 if precision == "fp32" else 12  # fp32 weights are their own masters, which plans do not count on
    for found, one, elements in ((here, given, -4 * block), (before, plain, 0)):
        elements += num_parameters(spec.model)
        assert found.breakdown[OPTIMIZER] == own_bytes * elements
        assert replica_loads(one, costs, segments(one, costs))[0].memory.optimizer == 12 * elements
    assert before.peak_bytes - here.peak_bytes == 4 * block * own_bytes


def test_masters_on_hosts_are_never_the_weights_themselves() -> None:
    spec = job()
    live = build_rank(RunRequest(job=spec, plan=hosting(solo_plan(spec), (0, 6)), until_step=0), 0, SoloExchange()).live
    for span in live.state.hosted:
        assert torch.equal(live.master(span), live.weight(span))
        assert live.master(span).data_ptr() != live.weight(span).data_ptr()
    assert {span.fqn.split(".")[0] for span in live.state.owns if span not in live.state.hosted} == {
        "embedding", "final_norm",
    }  # fmt: skip


def test_the_limit_of_hosts_holds_exactly_and_leaves_nothing_charged() -> None:
    spec = job()
    request = RunRequest(job=spec, plan=hosting(solo_plan(spec), (0, 3)), until_step=1)
    need_bytes = sum(run(request).host_breakdown.values())
    run(replace(request, host_limit_bytes=need_bytes))
    with pytest.raises(OutOfHostMemory) as caught:
        run(replace(request, host_limit_bytes=need_bytes - 1))
    assert (caught.value.device, caught.value.need_bytes) == ("solo:0", need_bytes)
    assert (caught.value.limit_bytes, caught.value.what) == (need_bytes - 1, PASSING)


def test_ranks_share_what_snapshots_leave_of_their_host() -> None:
    """Half of it, for the plan that comes after; a backup's host has its own snapshots and theirs."""
    spec = job()
    plain = LAYOUTS["two equal pipelines"]
    mixed = replace(plain, pipelines=(hosting(plain, (0, 2)).pipelines[0], hosting(plain, (0, 6)).pipelines[1]))
    shards = shard_map(mixed, spec.model)
    cluster = ClusterSnapshot(nodes=tuple(_node(name) for name in ("here", "there")))
    elements = sum(span.numel for state in shards.ranks for span in state.vouches)
    room_bytes = (GIB - snapshot_bytes(elements)) / 2
    few, many = host_limits(shards, cluster, place_copies(shards, cluster, 1))
    assert (few + many, many / few) == (pytest.approx(room_bytes, abs=2), pytest.approx(3.0))
    shards = shard_map(plain, spec.model)
    assert host_limits(shards, cluster, place_copies(shards, cluster, 1)) == (0, 0)


def in_slices(plan: Plan, slices: int) -> Plan:
    pipelines = (
        replace(pipeline, stages=tuple(replace(stage, slices=slices) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines))


def _node(name: str) -> Node:
    return Node(
        id=name, device="cpu-1t", devices=2, host_memory_bytes=GIB, intra_bytes_per_s=1e9, inter_bytes_per_s=1e9
    )


def run(request: RunRequest) -> RankRun:
    return run_rank(request, 0, SoloExchange())
