"""Weights, gradients and optimizer state split at any level: the same numbers as one process, the memory that degrees
say, and on the wire the bytes of the formulas (PAPERS 2.3 and 2.4), link by link."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from engine_runs import assert_holders_agree, assert_same_bits, job, run_poisoned, worst_difference

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.job import JobSpec, ModelSpec, Schedule
from shoal_planner.levels import DeviceGroups, Level, Sharding
from shoal_planner.loads import segments
from shoal_planner.memory import GATHERED_UNITS, GRADIENT_BYTES, SCATTERED_UNITS, STAGING_COPIES, unit_elements
from shoal_planner.overlap import Overlap
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Override, Pipeline, Plan, Recompute, Replica, Stage
from shoal_planner.predict import unit_exchange
from shoal_planner.profile import Profile
from shoal_planner.sharding import exchanged_at
from shoal_recovery.state import Kind
from shoal_workers.courier import STAGING
from shoal_workers.exchange import SoloExchange
from shoal_workers.live import GATHERED, GRADIENTS, OPTIMIZER, SECONDARY, WEIGHTS
from shoal_workers.processes import PlanRun, Processes
from shoal_workers.solo import RunRequest, SoloRun, run_rank, run_solo, solo_plan, whole_state
from shoal_workers.tags import Purpose
from shoal_workers.traffic import Link

STEPS = 20
BOUND = 1e-5
GROUPS = tuple(DeviceGroups(node=node, size=2) for node in ("n0", "n1"))

ZERO_3 = Sharding(weights="cluster", gradients="cluster")
ZERO_PP = replace(ZERO_3, gather="int8", scatter="int4", secondary=True)
ZERO_PP_PLAIN = replace(ZERO_3, secondary=True)
THREE_LEVEL = Sharding(weights="group", gradients="node")


def replica(node: str, first: int, *, tp: int = 1, samples: int = 1, share: float = 1.0) -> Replica:
    return Replica(node=node, devices=tuple(range(first, first + tp)), tp=tp, samples=samples, state_share=share)


def stage(first: int, last: int, *replicas: Replica) -> Stage:
    return Stage(layers=((first, last),), replicas=replicas)


def plan(sharding: Sharding, *pipelines: tuple[int, tuple[Stage, ...]], schedule: Schedule = "1f1b") -> Plan:
    """From (number of micro-batches, stages) of each pipeline."""
    built = (Pipeline(micro_batch=parts[0].samples, micro_batches=times, stages=parts) for times, parts in pipelines)
    ahead = Overlap(stages=True, shards=sharding.weights != "none" or sharding.gradients != "none")
    return Plan(pipelines=tuple(built), schedule=schedule, sharding=sharding, device_groups=GROUPS, overlap=ahead)


EIGHT = tuple(replica(node, device) for node in ("n0", "n1") for device in range(4))
UNEVEN = (  # replicas of one stage: uneven shares and samples, tensor parallelism in one, and one that only holds state
    stage(
        0,
        6,
        replica("n0", 0, share=3.0),
        replica("n0", 1, samples=2),
        replica("n1", 0, tp=2),
        replica("n1", 2, samples=0),
    )
)
TWO_STAGES = (stage(0, 2, replica("n0", 0), replica("n0", 1)), stage(2, 6, replica("n1", 0), replica("n1", 1)))
BESIDE = (stage(0, 6, replica("n0", 2, share=0.5), replica("n1", 2)),)


@pytest.fixture(scope="module")
def solo() -> dict[bool, SoloRun]:
    return {tied: run_solo(job(tied=tied), STEPS) for tied in (True, False)}


_LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("weights", "gradients", "optimizer", "shape", "tied"),
    [
        ("group", "node", "cluster", "uneven", True),
        pytest.param("node", "group", "node", "uneven", False, marks=_LONG),
        ("cluster", "cluster", "cluster", "stages", True),
        pytest.param("cluster", "cluster", "cluster", "uneven", False, marks=_LONG),
        pytest.param("none", "node", "cluster", "uneven", True, marks=_LONG),
        pytest.param("node", "none", "none", "uneven", False, marks=_LONG),
        pytest.param("cluster", "group", "node", "stages", True, marks=_LONG),
        pytest.param("group", "none", "group", "stages", True, marks=_LONG),
        pytest.param("group", "none", "cluster", "stages", False, marks=_LONG),
        pytest.param("none", "none", "none", "stages", True, marks=_LONG),
        pytest.param("node", "cluster", "cluster", "stages", True, marks=_LONG),
    ],
)
def test_every_level_equals_one_process(
    processes: Processes,
    solo: dict[bool, SoloRun],
    weights: Level,
    gradients: Level,
    optimizer: Level,
    shape: str,
    tied: bool,
) -> None:
    """Two pipelines of several stages share what is split at the end of a step; circles lie within their stages."""
    sharding = Sharding(weights=weights, gradients=gradients, optimizer=optimizer)
    split = plan(sharding, (2, (UNEVEN,))) if shape == "uneven" else plan(sharding, (3, TWO_STAGES), (1, BESIDE))
    spec = job(tied=tied)
    run = processes.run(RunRequest(job=spec, plan=split, until_step=STEPS))
    assert worst_difference(run.weights, solo[tied].weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo[tied].losses, rtol=1e-5)
    assert_holders_agree(run, spec)
    for rank in run.ranks:
        for key, values in rank.owned.items():
            whole = run.state.values[key.kind][key.fqn].reshape(-1)[key.first : key.last]
            assert values.tobytes() == whole.tobytes(), "owners of one interval have the same"


def whole(first: int, last: int, one: Stage) -> Stage:
    return replace(one, overrides=(Override(layers=(first, last), sharding="none"),))


@pytest.mark.parametrize(
    "sharding",
    [
        THREE_LEVEL,
        pytest.param(Sharding(weights="node", gradients="group", optimizer="node"), marks=_LONG),
        pytest.param(ZERO_PP_PLAIN, marks=_LONG),
        pytest.param(Sharding(gradients="node"), marks=_LONG),
        pytest.param(Sharding(weights="node"), marks=_LONG),
    ],
)
@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=_LONG)])
def test_whole_layers_among_split_ones_equal_one_process(
    processes: Processes, solo: dict[bool, SoloRun], sharding: Sharding, slices: int
) -> None:
    """Each pipeline keeps others whole, and one device only holds state. A rank keeps what `shard_map` says, and its
    whole layers are passed round once a step."""
    alike = tuple(replica(node, device, tp=tp, samples=samples) for node, device, tp, samples in _MIXED)
    stages = whole(2, 5, stage(0, 6, *alike)), whole(0, 3, stage(0, 6, replica("n0", 3), replica("n1", 3)))
    if slices > 1:
        stages = tuple(replace(one, replicas=_alike(one, 1), slices=slices) for one in stages)
    split = plan(sharding, (1, (stages[0],)), (2, (stages[1],)))
    spec = job(tied=True)
    run = processes.run(RunRequest(job=spec, plan=split, until_step=STEPS))
    assert worst_difference(run.weights, solo[True].weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo[True].losses, rtol=1e-5)
    assert_holders_agree(run, spec)


_MIXED = (("n0", 0, 1, 2), ("n0", 1, 1, 1), ("n1", 0, 2, 1), ("n1", 2, 1, 0))


def _alike(one: Stage, tp: int) -> tuple[Replica, ...]:
    return tuple(replace(each, devices=each.devices[:tp], tp=tp) for each in one.replicas)


@pytest.mark.parametrize("sharding", [THREE_LEVEL, pytest.param(Sharding(optimizer="none"), marks=_LONG)])
def test_clipping_evaluations_and_diagnoses_see_all_that_is_split(processes: Processes, sharding: Sharding) -> None:
    """Also with the optimizer's state in several copies, whose gradients count once."""
    split, spec = plan(sharding, (2, (UNEVEN,))), job(tied=False, steps=6)
    spec = replace(spec, train=replace(spec.train, clip_norm=0.3, eval_every=3, eval_batches=1))
    run = processes.run(RunRequest(job=spec, plan=split, until_step=6))
    alone = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=6), 0, SoloExchange())
    assert worst_difference(run.weights, whole_state(spec, [alone]).values[Kind.MASTER]) <= BOUND
    for rank in run.ranks:
        for ours, theirs in ((rank.reports, alone.reports), (rank.evaluations, alone.evaluations)):
            np.testing.assert_allclose([one.loss for one in ours], [one.loss for one in theirs], rtol=1e-5)
        norms = [report.grad_norm for report in rank.reports]
        np.testing.assert_allclose(norms, [report.grad_norm for report in alone.reports], rtol=1e-4)
        assert min(norms) > 0.3, "each step is clipped"
    for refusal in processes.call(split.num_devices, run_poisoned, RunRequest(job=spec, plan=split, until_step=1), 1):
        assert "the first value that is not finite comes out of layer 0, on rank" in refusal.reason
        assert not refusal.changed


@pytest.mark.parametrize("schedule", ["zero_bubble", pytest.param("interleaved", marks=_LONG)])
def test_every_schedule_and_recomputation_equals_one_process(
    processes: Processes, solo: dict[bool, SoloRun], schedule: Schedule
) -> None:
    """Gradients of a block's vectors and of its matrices go their ways apart where the latter are put off; a device
    that only holds state keeps up with both. Weights are gathered again for what is recomputed."""
    chunks = (((0, 2),), ((2, 6),)) if schedule == "zero_bubble" else (((0, 1), (2, 4)), ((1, 2), (4, 6)))
    replicas = (replica("n0", 0), replica("n0", 1), replica("n1", 0, samples=0)), (replica("n1", 1, samples=2),)
    kinds: tuple[Recompute, ...] = ("full", "selective")
    stages = tuple(
        Stage(layers=layers, replicas=some, recompute=kind)
        for layers, some, kind in zip(chunks, replicas, kinds, strict=True)
    )
    split = plan(replace(ZERO_3, secondary=True), (4, stages), schedule=schedule)
    spec = job(tied=False)
    run = processes.run(RunRequest(job=spec, plan=split, until_step=STEPS))
    assert worst_difference(run.weights, solo[False].weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo[False].losses, rtol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sharding", [ZERO_PP, replace(THREE_LEVEL, gather="int8", scatter="int4")])
def test_few_bits_train_as_well(sharding: Sharding) -> None:
    """The loss after 200 steps, within one per cent."""
    train = replace(job().train, steps=200, lr=1e-3, global_batch=16)
    spec = replace(job(), train=train)
    four = tuple(replica(node, device, samples=2) for node in ("n0", "n1") for device in range(2))
    with Processes(4, timeout_s=1200.0) as started:
        run = started.run(RunRequest(job=spec, plan=plan(sharding, (2, (stage(0, 6, *four),))), until_step=200))
    full = run_solo(spec, 200)
    last = [float(np.mean(losses[-20:])) for losses in (run.losses, full.losses)]
    assert last[0] < full.losses[0] - 1.5
    assert last[0] == pytest.approx(last[1], rel=0.01)


def test_the_same_again_gives_the_same_bits(processes: Processes) -> None:
    request = RunRequest(job=job(), plan=plan(THREE_LEVEL, (2, (UNEVEN,))), until_step=4)
    whole = processes.run(request)
    first = processes.run(replace(request, until_step=2))
    assert_same_bits(processes.run(replace(request, start=first.state)).state, whole.state)


def sized(precision: str = "bf16", steps: int = 1) -> JobSpec:
    """Untied: a tied embedding is passed round for both of its ends. Large enough for scales to be few."""
    spec = job(steps=steps)
    model = ModelSpec(layers=2, hidden=128, heads=4, ffn=512, vocab=512, tie_embeddings=False)
    train = replace(spec.train, precision=precision, seq_len=8, global_batch=64)  # type: ignore[arg-type]
    return replace(spec, model=model, train=train)


def eight(sharding: Sharding, times: int = 1) -> Plan:
    replicas = tuple(replace(one, samples=8 // times) for one in EIGHT)
    return plan(sharding, (times, (stage(0, 2, *replicas),)))


OneStep = Callable[..., PlanRun]


@pytest.fixture(scope="module")
def one_step(processes: Processes) -> OneStep:
    """Each kind of plan runs once for all tests."""

    @functools.cache
    def run(sharding: Sharding, times: int = 1) -> PlanRun:
        return processes.run(RunRequest(job=sized(), plan=eight(sharding, times), until_step=1))

    return run


def received(run: PlanRun) -> Counter[tuple[Purpose, Link]]:
    """By all ranks, in one step; what was sent is the same."""
    sent, found = Counter[tuple[Purpose, Link]](), Counter[tuple[Purpose, Link]]()
    for rank in run.ranks:
        for moved in rank.reports[-1].moved:
            sent[moved.purpose, moved.link] += moved.sent_bytes
            found[moved.purpose, moved.link] += moved.received_bytes
    assert sent == found
    return found


MODEL_BYTES = 2 * num_parameters(sized().model)  # M of the paper
_SHARES = {Link.GROUP: 1, Link.NODE: 2, Link.ZONE: 4}  # of the seven others, how many are reached by each


def test_bytes_of_zero_3_are_those_of_the_formula(one_step: OneStep) -> None:
    """M for each of two gathers and a scatter, for each micro-batch, but for what a device has itself."""
    for times in (1, 2):
        found = received(one_step(ZERO_3, times))
        for link, others in _SHARES.items():
            assert found[Purpose.FETCH, link] == pytest.approx(times * 2 * MODEL_BYTES * others, rel=0.02)
            assert found[Purpose.SCATTER, link] == pytest.approx(times * MODEL_BYTES * others, rel=0.02)
        assert {purpose for purpose, _ in found} == {Purpose.FETCH, Purpose.SCATTER}, "nothing is left for the end"


def test_each_switch_changes_only_its_own_column(one_step: OneStep) -> None:
    """Half of a gather, no gather of a backward between nodes, a quarter of the gradients and less between nodes."""
    plain = received(one_step(ZERO_3))
    int8 = received(one_step(replace(ZERO_3, gather="int8")))
    int4 = received(one_step(replace(ZERO_3, scatter="int4")))
    near = received(one_step(replace(ZERO_3, secondary=True)))
    for link, others in _SHARES.items():
        assert int8[Purpose.FETCH, link] == pytest.approx(0.5 * plain[Purpose.FETCH, link], rel=0.02)
        assert int8[Purpose.SCATTER, link] == near[Purpose.SCATTER, link] == plain[Purpose.SCATTER, link]
        assert int4[Purpose.FETCH, link] == plain[Purpose.FETCH, link]
        inside = MODEL_BYTES * others * (1 + 2) if link is not Link.ZONE else MODEL_BYTES * others
        assert near[Purpose.FETCH, link] == pytest.approx(inside, rel=0.02)
    moved = sum(count for (purpose, _), count in int4.items() if purpose in (Purpose.SCATTER, Purpose.RELAY))
    assert moved == pytest.approx(0.25 * MODEL_BYTES * 7, rel=0.02)
    assert int4[Purpose.RELAY, Link.ZONE] == pytest.approx(8 * 0.25 * MODEL_BYTES / 8, rel=0.02)
    assert not int4[Purpose.SCATTER, Link.ZONE]
    assert not int4[Purpose.RELAY, Link.NODE]


def test_all_switches_together_leave_a_quarter_between_nodes(one_step: OneStep) -> None:
    def between(run: PlanRun) -> int:
        return sum(count for (_, link), count in received(run).items() if link in (Link.ZONE, Link.WORLD))

    assert between(one_step(ZERO_PP)) <= 0.27 * between(one_step(ZERO_3))


def test_three_levels_cross_nodes_once_a_step(one_step: OneStep) -> None:
    """Weights come from the pair, gradients stay in the node, for each micro-batch. At the end each node's part of the
    gradients is summed, and each part of the weights is sent to all who keep it."""
    once, often = (received(one_step(THREE_LEVEL, times)) for times in (1, 8))
    crossing = {key: count for key, count in once.items() if key[1] is Link.ZONE}
    assert crossing == {key: count for key, count in often.items() if key[1] is Link.ZONE}
    for times, found in ((1, once), (8, often)):
        assert found[Purpose.FETCH, Link.GROUP] == pytest.approx(times * 8 * 2 * MODEL_BYTES / 2, rel=0.02)
        scattered = found[Purpose.SCATTER, Link.GROUP] + found[Purpose.SCATTER, Link.NODE]
        assert scattered == pytest.approx(times * 8 * 3 / 4 * MODEL_BYTES, rel=0.02)
    assert crossing[Purpose.REDUCE, Link.ZONE] == pytest.approx(8 * MODEL_BYTES / 4 / 2, rel=0.02)
    assert crossing[Purpose.GATHER, Link.ZONE] == pytest.approx(8 * MODEL_BYTES / 2 / 2, rel=0.02)
    assert once[Purpose.GATHER, Link.NODE] == pytest.approx(8 * MODEL_BYTES / 8, rel=0.02)


def test_whole_layers_cross_nodes_as_often_as_they_are_kept(processes: Processes) -> None:
    """Four replicas of a node send their gradients, and four of the other get the weights; as the planner counts."""
    sharding = Sharding(weights="node", gradients="node")
    moved = {}
    for layers in (0, 2):
        some = eight(sharding)
        if layers:
            some = replace(some, pipelines=tuple(replace(one, stages=_wholes(one, layers)) for one in some.pipelines))
        found = received(processes.run(RunRequest(job=sized(), plan=some, until_step=1)))
        moved[layers] = [found[purpose, Link.ZONE] for purpose in (Purpose.REDUCE, Purpose.GATHER)]
    blocks = 2 * 2 * unit_elements(sized().model, 1, 1)
    ends = MODEL_BYTES - blocks
    assert moved[0] == pytest.approx([2 * MODEL_BYTES / 2] * 2, rel=0.02)
    assert moved[2] == pytest.approx([2 * (ends / 2 + 4 * blocks / 2)] * 2, rel=0.02)
    nodes = parse_cluster({"nodes": [{"name": "n", "device": "A100-40G", "devices": 4, "count": 2}]}).nodes
    cluster = ClusterSnapshot(nodes=tuple(replace(node, id=f"n{index}") for index, node in enumerate(nodes)))
    costs = CostModel(sized(), cluster, Profile())
    whole = replace(eight(sharding), pipelines=some.pipelines)
    counted = Counter[str]()
    for part in segments(whole, costs):
        exchange = unit_exchange(part, costs, exchanged_at(whole, "node", costs))
        counted.update({node: (part.last - part.first) * s * costs.node_rate(node) for node, s in exchange.network_s})
    assert sum(counted.values()) == pytest.approx(moved[2][0], rel=0.02)


def _wholes(pipeline: Pipeline, layers: int) -> tuple[Stage, ...]:
    return tuple(whole(0, layers, one) for one in pipeline.stages)


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "near"),
    [(ZERO_3, 8, 8, 0), (ZERO_PP, 8, 8, 4), (THREE_LEVEL, 2, 4, 0), (Sharding(), 1, 1, 0)],
    ids=["zero-3", "zero++", "three-level", "zero-1"],
)
def test_resident_bytes_are_those_of_the_degrees(
    one_step: OneStep, sharding: Sharding, weights: int, gradients: int, near: int
) -> None:
    """2 / s_w + 4 / s_g + 12 / s_o an element, and 2 / P more for what a node keeps near."""
    elements = num_parameters(sized().model)
    for rank in one_step(sharding).ranks:
        found = rank.breakdown
        assert found[WEIGHTS] == pytest.approx(2 * elements / weights, rel=0.02)
        assert found[GRADIENTS] == pytest.approx(4 * elements / gradients, rel=0.02)
        assert found[OPTIMIZER] == pytest.approx(12 * elements / 8, rel=0.02)
        assert found.get(SECONDARY, 0) == pytest.approx(2 * elements / near if near else 0, rel=0.02)
        assert (GATHERED in found) == (weights > 1)
        whole = GATHERED_UNITS * 2 * (weights > 1) + SCATTERED_UNITS * GRADIENT_BYTES * (gradients > 1)
        largest = max(unit_elements(sized().model, unit, 1) for unit in range(4))
        staged = found.get(GATHERED, 0) + found.get(STAGING, 0)
        assert staged <= largest * (STAGING_COPIES * GRADIENT_BYTES + whole), "no more than the planner counts with"
