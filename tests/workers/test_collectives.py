"""Gradients added up and weights gathered by the algorithm that a plan names: the same numbers as one process, on the
wire the messages and bytes of the formulas, and no more memory than the planner counts with."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from engine_runs import assert_holders_agree, assert_same_bits, worst_difference
from numpy.typing import NDArray

from shoal_planner.algorithms import DIRECT, Algorithm, algorithm_of, depth
from shoal_planner.collective_counts import Fabric, counts_of
from shoal_planner.collective_menus import factorisations
from shoal_planner.collectives import by_level
from shoal_planner.errors import InvalidField
from shoal_planner.groups import Group
from shoal_planner.holder_trees import arranged
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.memory import GRADIENT_BYTES, unit_elements
from shoal_planner.overlap import Overlap
from shoal_planner.parameters import num_parameters, parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ShardMap, Span
from shoal_workers.collective_routes import Rounds, RoundsByUnit, ways
from shoal_workers.courier import STAGING
from shoal_workers.processes import PlanRun, Processes
from shoal_workers.reduction import NO_ROUTES, Message
from shoal_workers.solo import RunRequest, SoloRun, run_solo
from shoal_workers.tags import Purpose
from shoal_workers.traffic import Link

STEPS = 20
BOUND = 1e-5
LAYERS = 3


def job(*, tied: bool = False) -> JobSpec:
    return JobSpec(
        name="collectives",
        model=ModelSpec(layers=LAYERS, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, tie_embeddings=tied),
        data=DataSpec(uri="stdlib:"),
        train=TrainSpec(global_batch=12, seq_len=16, steps=STEPS, lr=1e-3, warmup_steps=5),
    )


Given = tuple[str, int, int, float]  # of a replica: node, tp, samples and share of state


def plan(*pipelines: tuple[int, tuple[tuple[int, tuple[Given, ...]], ...]]) -> Plan:
    """From (number of micro-batches, stages) of each pipeline; a stage is (layers, replicas)."""
    devices: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
    return Plan(pipelines=tuple(_pipeline(times, stages, devices) for times, stages in pipelines))


def _pipeline(
    times: int, stages: tuple[tuple[int, tuple[Given, ...]], ...], devices: Mapping[str, Iterator[int]]
) -> Pipeline:
    borders = list(itertools.accumulate((layers for layers, _ in stages), initial=0))
    built = tuple(
        Stage(
            layers=((first, last),),
            replicas=tuple(
                Replica(
                    node=node,
                    devices=tuple(itertools.islice(devices[node], tp)),
                    tp=tp,
                    samples=samples,
                    state_share=share,
                )
                for node, tp, samples, share in given
            ),
        )
        for (first, last), (_, given) in zip(itertools.pairwise(borders), stages, strict=True)
    )
    return Pipeline(micro_batch=built[0].samples, micro_batches=times, stages=built)


def replicas(*nodes: str, samples: int = 1, shares: tuple[float, ...] | None = None) -> tuple[Given, ...]:
    found = shares or (1.0,) * len(nodes)
    return tuple((node, 1, samples, share) for node, share in zip(nodes, found, strict=True))


def by(plan: Plan, collective: str, **levels: str) -> Plan:
    named = replace(plan, groups=(Group(layers=(0, LAYERS), collective=collective),))
    return replace(named, sharding=replace(named.sharding, **levels))  # type: ignore[arg-type]


TWO = plan((6, ((LAYERS, replicas("a", "b", shares=(3.0, 1.0))),)))
THREE = plan((2, ((LAYERS, (("a", 1, 3, 0.2), ("a", 1, 1, 1.0), ("b", 1, 2, 2.0))),)))
FOUR = plan(
    (3, ((LAYERS, (("a", 1, 2, 0.5), ("b", 1, 1, 1.0))),)), (1, ((LAYERS, (("b", 1, 2, 2.0), ("a", 1, 1, 1.0))),))
)
MIXED = plan(  # tensor parallelism in one of three, and pipelines that are cut at other layers
    (2, ((1, (("a", 2, 2, 1.0), ("b", 1, 1, 0.3))), (2, (("b", 1, 3, 1.0),)))), (3, ((LAYERS, (("a", 1, 2, 1.0),)),))
)
LAYOUTS = {"two": TWO, "three": THREE, "four": FOUR, "mixed": MIXED}


@pytest.fixture(scope="module")
def solo() -> dict[bool, SoloRun]:
    return {tied: run_solo(job(tied=tied), STEPS) for tied in (True, False)}


@pytest.mark.parametrize(
    ("layout", "collective", "optimizer", "tied"),
    [
        ("two", "ring", "none", True),
        ("three", "ring", "cluster", False),
        pytest.param("three", "parameter_server", "none", False, marks=pytest.mark.long),
        ("three", "tree: ring 2 > parameter_server 2", "cluster", True),
        ("four", "halving_doubling", "cluster", True),
        pytest.param("four", "parameter_server 2x2", "none", False, marks=pytest.mark.long),
        ("four", "tree: parameter_server 2 > halving_doubling 2", "none", True),
        ("mixed", "ring", "cluster", True),
        pytest.param("mixed", "parameter_server", "none", False, marks=pytest.mark.long),
    ],
)
def test_every_algorithm_equals_one_process(
    processes: Processes, solo: dict[bool, SoloRun], layout: str, collective: str, optimizer: str, tied: bool
) -> None:
    spec, named = job(tied=tied), by(LAYOUTS[layout], collective, optimizer=optimizer)
    run = processes.run(RunRequest(job=spec, plan=named, until_step=STEPS))
    assert worst_difference(run.weights, solo[tied].weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo[tied].losses, rtol=1e-5)
    assert_holders_agree(run, spec)
    for rank in run.ranks:
        for key, values in rank.owned.items():
            whole = run.state.values[key.kind][key.fqn].reshape(-1)[key.first : key.last]
            assert values.tobytes() == whole.tobytes(), "owners of one interval have the same"


@pytest.mark.parametrize("layout", ["three", "mixed"])
def test_all_serving_all_is_the_direct_exchange_to_the_bit(processes: Processes, layout: str) -> None:
    """With the same sums in the same order: within a node, or where they begin in the backward."""
    named = RunRequest(job=job(), plan=by(LAYOUTS[layout], "parameter_server"), until_step=3)
    early = replace(LAYOUTS[layout], overlap=Overlap(gradients=True))
    run = processes.run(named)
    assert_same_bits(run.state, processes.run(replace(named, plan=early)).state)
    alone = plan((3, ((LAYERS, replicas("a", "a", "a", "a")),)))
    both = (processes.run(replace(named, plan=by(alone, name))).state for name in (DIRECT, "parameter_server"))
    assert_same_bits(*both)


def test_each_rank_sums_in_one_order_whatever_comes_first(processes: Processes) -> None:
    request = RunRequest(job=job(tied=True), plan=by(FOUR, "parameter_server 2x2"), until_step=3)
    assert_same_bits(processes.run(request).state, processes.run(request).state)


def test_an_algorithm_for_other_replicas_is_refused_by_name() -> None:
    def refused(named: Plan, zones: Mapping[str, str]) -> str:
        with pytest.raises(InvalidField) as caught:
            ways(named, job().model, shard_map(named, job().model), 0, zones)
        return str(caught.value)

    tree = "tree: parameter_server 2 > ring 2"
    assert ways(by(FOUR, tree), job().model, shard_map(FOUR, job().model), 0, {"a": "x", "b": "y"})
    assert "groups = 'halving_doubling': is for a power of two, and 3 replicas" in refused(
        by(THREE, "halving_doubling"), {}
    )
    assert "must be for the levels that the replicas stand on: 2 > 2" in refused(
        by(FOUR, "tree: ring 2 > ring 2 > ring 2"), {}
    )
    for split in (by(TWO, "ring"), plan((6, ((LAYERS, (("a", 1, 2, 1.0), ("b", 1, 0, 1.0))),)))):
        with pytest.raises(InvalidField, match="there everything is exchanged directly"):
            by(split, "ring", optimizer="node")


# --- on the wire ---

EQUAL = plan((3, ((LAYERS, replicas("a", "b", "b", "a")),)))
MODEL_BYTES = 4 * num_parameters(job().model)
CROSSING = {  # by all ranks in a reduce-scatter: within nodes and between them, in multiples of the model
    DIRECT: (2.0, 1.0),
    "parameter_server": (1.0, 2.0),
    "ring": (1.5, 1.5),
    "halving_doubling": (2.0, 1.0),
    "parameter_server 2x2": (2.0, 1.0),
    "tree: ring 2 > parameter_server 2": (2.0, 1.0),
}


@pytest.mark.parametrize(
    ("collective", "optimizer"), [*((name, "cluster") for name in CROSSING), (DIRECT, "none"), ("ring", "none")]
)
def test_bytes_on_each_link_are_those_of_the_algorithm(processes: Processes, collective: str, optimizer: str) -> None:
    run = processes.run(RunRequest(job=job(), plan=by(EQUAL, collective, optimizer=optimizer), until_step=1))
    back = Purpose.GATHER if optimizer == "cluster" else Purpose.SPREAD
    found = received(run)
    for purpose in (Purpose.REDUCE, back):
        for link, times in zip((Link.NODE, Link.ZONE), CROSSING[collective], strict=True):
            assert found[purpose, link] == pytest.approx(times * MODEL_BYTES, rel=0.01), (purpose, link)
    for rank in run.ranks:
        sent = sum(moved.sent_bytes for moved in rank.reports[-1].moved)
        assert sent == pytest.approx(2 * 3 / 4 * MODEL_BYTES, rel=0.01), "2 (n - 1) / n, whatever the algorithm"


def received(run: PlanRun) -> Counter[tuple[Purpose, Link]]:
    sent, found = Counter[tuple[Purpose, Link]](), Counter[tuple[Purpose, Link]]()
    for rank in run.ranks:
        for moved in rank.reports[-1].moved:
            sent[moved.purpose, moved.link] += moved.sent_bytes
            found[moved.purpose, moved.link] += moved.received_bytes
    assert sent == found
    return found


def test_buffers_are_no_more_than_where_everybody_serves_all_at_once(processes: Processes) -> None:
    """Of samples so short that nothing else takes as much."""
    spec = job()
    spec = replace(spec, model=replace(spec.model, hidden=64, ffn=176), train=replace(spec.train, seq_len=2))
    most = {
        name: _most_staged(processes.run(RunRequest(job=spec, plan=by(EQUAL, name), until_step=1)))
        for name in ("parameter_server", DIRECT, "ring", "halving_doubling")
    }
    largest = max(unit_elements(spec.model, unit, 1) for unit in range(LAYERS + 2))
    assert max(most.values()) == most["parameter_server"] <= 2 * 2 * 3 / 4 * GRADIENT_BYTES * largest
    assert most["ring"] <= 2 * GRADIENT_BYTES * largest


def _most_staged(run: PlanRun) -> int:
    return max(rank.breakdown[STAGING] for rank in run.ranks)


# --- the routes alone ---

FABRIC = Fabric(alpha_s=1e-5, beta_s_per_byte=1e-9)
FAR = {"c": "far"}
Arrays = list[dict[str, NDArray[np.int64]]]  # by rank and parameter


def spread_out(holders: int) -> Plan:
    """Over two nodes, from five on also over one in another zone; every third with two ranks, no two with one share."""
    nodes = [("a", "b", "a", "c")[at % 4 if holders > 4 else at % 3] for at in range(holders)]
    given = tuple((node, 1 + (at % 3 == 2), 1, 0.1 + at) for at, node in enumerate(nodes))
    return plan((1, ((LAYERS, given),)))


def names(uneven: Plan) -> Iterator[str]:
    nodes = [replica.node for replica in uneven.replicas()]
    tree, _ = arranged(nodes, FAR)
    yield by_level(tree, 2.0**20, (FABRIC,) * depth(tree)).name
    yield from ("ring", "parameter_server")
    if len(nodes) & (len(nodes) - 1) == 0:
        yield "halving_doubling"
    for factors in factorisations(len(nodes)):
        if len(factors) > 1:
            yield Algorithm(kind="parameter_server", holders=len(nodes), factors=factors).name


@pytest.mark.parametrize("holders", range(2, 10))
def test_every_algorithm_brings_all_sums_and_all_weights(holders: int) -> None:
    uneven, model = spread_out(holders), job(tied=True).model
    ranks = shard_map(uneven, model).ranks
    random = np.random.default_rng(0)
    for name in names(uneven):
        found = [ways(by(uneven, name), model, ShardMap(ranks=ranks), state.rank, FAR) for state in ranks]
        held: Arrays = [{one.fqn: random.integers(-99, 99, one.numel) for one in parameters(model)} for _ in ranks]
        total = {one.fqn: np.zeros(one.numel, dtype=np.int64) for one in parameters(model)}
        for state in ranks:
            for span in state.contributes:
                _of(total, span)[:] += _of(held[state.rank], span)
        _carry_out([way.reduces for way in found], held, model, add=True)
        weights: Arrays = [{fqn: np.zeros_like(array) for fqn, array in total.items()} for _ in ranks]
        for state in ranks:
            for span in state.vouches:
                np.testing.assert_array_equal(_of(held[state.rank], span), _of(total, span), err_msg=name)
                _of(weights[state.rank], span)[:] = _of(total, span)
        _carry_out([way.gathers for way in found], weights, model, add=False)
        for state in ranks:
            for span in state.keeps:
                np.testing.assert_array_equal(_of(weights[state.rank], span), _of(total, span), err_msg=name)


def _carry_out(ways: list[RoundsByUnit], held: Arrays, model: ModelSpec, *, add: bool) -> None:
    """All rounds of all ranks: what is sent is what there was when the round began. One message between any two."""
    for unit in range(model.layers + 2):
        for routes in zip(*(by_unit[unit] for by_unit in ways), strict=True):
            sent = [message for one in routes for message in one.sends]
            came = [message for one in routes for message in one.receives]
            assert len({(one.source, one.destination) for one in sent}) == len(sent)
            assert sorted(sent, key=_ends) == sorted(came, key=_ends)
            there = [[_of(held[one.source], span).copy() for span in one.spans] for one in sent]
            for message, values in zip(sent, there, strict=True):
                for span, value in zip(message.spans, values, strict=True):
                    mine = _of(held[message.destination], span)
                    mine[:] = mine + value if add else value


def _ends(message: Message) -> tuple[int, int]:
    return message.source, message.destination


def _of(arrays: Mapping[str, NDArray[np.int64]], span: Span) -> NDArray[np.int64]:
    return arrays[span.fqn][span.first : span.last]


@pytest.mark.parametrize("holders", range(2, 10))
def test_rounds_and_bytes_are_those_that_the_planner_counts(holders: int) -> None:
    """Among equal holders; of a block, whose elements divide among them but for a few."""
    equal = plan((1, ((LAYERS, replicas(*"ab" * (holders // 2), *"a" * (holders % 2))),)))
    model = job().model
    shards, elements = shard_map(equal, model), unit_elements(model, 1, 1)
    for name in names(equal):
        if name.startswith("tree"):
            continue  # levels side by side: counted on messages, in the planner's tests
        counts = counts_of(algorithm_of(name, holders))
        for state in shards.ranks:
            found = ways(by(equal, name), model, shards, state.rank, {})
            both = (*found.reduces[1], *(routes for routes in found.gathers[1] if routes != NO_ROUTES))
            assert len(both) == counts.rounds, name
            assert sum(len(routes.sends) - 1 for routes in both) == counts.peers, name
            moved = [sum(span.numel for one in some for span in one.spans) for some in _both_ways(both)]
            assert moved == pytest.approx([counts.sent * elements] * 2, rel=0.01), name


def _both_ways(rounds: Rounds) -> Iterator[list[Message]]:
    yield [message for routes in rounds for message in routes.sends]
    yield [message for routes in rounds for message in routes.receives]
