"""Where copies go."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.holding import held_state, keeping, state_held
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.memory import snapshot_bytes
from shoal_planner.parameters import num_parameters, parameters
from shoal_planner.placement import Copies, Placement
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage
from shoal_planner.pools import pool_name
from shoal_recovery.placement import backups, host_elements, network_bytes_per_parameter, place_copies, told
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Span


def _node(name: str, zone: str = "z", host_memory_bytes: int = 1 << 40, *, spot: bool = False) -> Node:
    return Node(
        id=name,
        spot=spot,
        device="cpu",
        devices=1,
        host_memory_bytes=host_memory_bytes,
        intra_bytes_per_s=1.0,
        inter_bytes_per_s=1.0,
        zone=zone,
    )


@given(st.lists(st.sampled_from("xyz"), max_size=9), st.integers(0, 4))
def test_copies_stand_on_other_nodes_and_other_zones_come_first(zones: list[str], copies: int) -> None:
    nodes = tuple(_node(f"n{index}", zone) for index, zone in enumerate(zones))
    zone_of = {node.id: node.zone for node in nodes}
    chosen = backups(nodes, copies)
    assert set(chosen) == set(zone_of)
    for node, others in chosen.items():
        assert len(others) == len(set(others)) == min(copies, len(nodes) - 1)
        assert node not in others
        reached = {zone_of[node], *(zone_of[other] for other in others)}
        assert len(reached) == min(1 + len(others), len(set(zones)))
    assert backups(tuple(reversed(nodes)), copies) == chosen


@given(st.integers(2, 12), st.integers(1, 4))
def test_equal_nodes_keep_equally_many_copies(num_nodes: int, copies: int) -> None:
    chosen = backups(tuple(_node(f"n{index:02}") for index in range(num_nodes)), copies)
    kept = Counter(other for others in chosen.values() for other in others)
    assert set(kept.values()) == {min(copies, num_nodes - 1)}


def test_four_nodes_in_two_zones() -> None:
    nodes = tuple(_node(name, zone) for name, zone in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "y")))
    assert backups(nodes, 1) == {"a": ("c",), "b": ("d",), "c": ("a",), "d": ("b",)}


# By whether they are spot, how often they are said to be lost.
RATES = {None: 0.28, False: 1e-4, 0.001: 0.001, 3.0: 3.0}


def _pooled(kinds: list[tuple[str, float | bool | None]]) -> tuple[Node, ...]:
    nodes = (_node(f"n{index}", zone, spot=rate is not False) for index, (zone, rate) in enumerate(kinds))
    return tuple(
        node if rate is None or rate is False else dataclasses.replace(node, preemptions_per_hour=rate)
        for node, (_, rate) in zip(nodes, kinds, strict=True)
    )


pooled_nodes = st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from(list(RATES))), max_size=9).map(_pooled)


def stated(node: Node) -> float | bool | None:
    return node.preemptions_per_hour if node.spot else False


@given(pooled_nodes, st.integers(0, 3))
def test_the_first_copy_leaves_its_pool_wherever_that_keeps_load_within_twice_the_least(
    nodes: tuple[Node, ...], copies: int
) -> None:
    """To where nodes are lost least often; and as many zones are reached. Each node's choice is looked at when it was
    made."""
    chosen, even, by_id = backups(nodes, copies), backups(nodes, copies, apart=False), {node.id: node for node in nodes}
    load: Counter[str] = Counter()
    for home, others in chosen.items() if copies else ():
        zones = {by_id[home].zone, *(by_id[other].zone for other in others)}
        assert len(zones) == len({by_id[home].zone, *(by_id[other].zone for other in even[home])})
        elsewhere = [other for other in by_id if by_id[other].zone != by_id[home].zone]
        suiting = elsewhere or [other for other in by_id if other != home]
        if not others:
            continue
        least = min(load[other] + 1 for other in suiting)
        near = [other for other in suiting if load[other] + 1 <= 2 * least]
        apart = [other for other in near if pool_name(by_id[other]) != pool_name(by_id[home])] or near
        lost = {other: RATES[stated(by_id[other])] for other in apart}
        steady = [other for other in apart if lost[other] == min(lost.values())]
        assert others[0] in steady and load[others[0]] == min(load[other] for other in steady)
        load[others[0]] += 1
    assert backups(tuple(reversed(nodes)), copies) == chosen


def test_an_owner_in_another_pool_mirrors_first() -> None:
    """Nothing is sent either way; a third node is a backup."""
    nodes = (_node("a", spot=True), _node("b", spot=True), _node("c", spot=True), _node("d"))
    placement = Placement(nodes, 1)
    assert backups(nodes, 1)["a"] == ("d",)
    assert placement.copies("a", frozenset("bd")) == Copies(live=("d",), sent=())
    assert Placement(nodes, 1, apart=False).copies("a", frozenset("cd")) == Copies(live=("d",), sent=())
    assert placement.copies("a", frozenset("bc")) == Copies(live=("b",), sent=()), "what is live is not sent"


def test_of_other_pools_owners_that_are_lost_least_often_mirror_first() -> None:
    often, seldom = (
        dataclasses.replace(_node(name, name, spot=True), preemptions_per_hour=rate)
        for name, rate in (("b", 2.0), ("c", 0.1))
    )
    nodes = (_node("a", spot=True), often, seldom, _node("d", "d"))
    assert backups(nodes, 1)["a"] == ("d",)
    assert Placement(nodes, 1).copies("a", frozenset("bc")) == Copies(live=("c",), sent=())


# --- state that several nodes own ---


@settings(max_examples=40)
@given(st.data())
def test_every_element_stands_on_as_many_other_nodes_as_there_are_copies(data: st.DataObject) -> None:
    """Sent to nodes that do not own it, or mirrored by a rank that does; each copy once, in as many zones as copies
    that are all sent would reach."""
    model = data.draw(layouts.models())
    plan = data.draw(layouts.plans(model))
    zones = data.draw(st.lists(st.sampled_from("xy"), min_size=len(layouts.NODES), max_size=len(layouts.NODES)))
    nodes = tuple(_node(name, zone) for name, zone in zip(layouts.NODES, zones, strict=True))
    copies = data.draw(st.integers(0, 3))
    shards = shard_map(plan, model)
    found = place_copies(shards, ClusterSnapshot(nodes=nodes), copies)
    zone_of, all_sent = {node.id: node.zone for node in nodes}, backups(nodes, copies)
    for parameter in parameters(model):
        fqn, numel = parameter.fqn, parameter.numel
        kept = {node.id: np.zeros(numel, dtype=int) for node in nodes}
        for state, rank in zip(shards.ranks, found, strict=True):
            for node, spans in rank.sent:
                assert node != state.device.node
                kept[node] += _count(spans, fqn, numel)
            mirrored = _count(rank.mirrors, fqn, numel)
            assert (mirrored <= _count(state.owns, fqn, numel) - _count(state.vouches, fqn, numel)).all()
            kept[state.device.node] += mirrored
        assert (sum(kept.values()) == copies).all()
        for state in shards.ranks:
            home = state.device.node
            mine = _count(state.vouches, fqn, numel).astype(bool)
            assert (kept[home][mine] == 0).all(), "a copy on the same node is none"
            reached = {zone_of[home], *(zone_of[node] for node in all_sent[home])}
            for at in np.flatnonzero(mine):
                holders = [node for node in kept if kept[node][at]]
                assert all(kept[node][at] == 1 for node in holders)
                assert len({zone_of[home], *(zone_of[node] for node in holders)}) >= len(reached)


def _count(spans: tuple[Span, ...], fqn: str, numel: int) -> np.ndarray:
    return layouts.count(spans, fqn, numel)


@given(st.data())
def test_what_owners_have_is_sent_only_where_that_reaches_more_zones(data: st.DataObject) -> None:
    zones = data.draw(st.lists(st.sampled_from("xyz"), min_size=2, max_size=7))
    nodes = tuple(_node(f"n{index}", zone) for index, zone in enumerate(zones))
    copies = data.draw(st.integers(1, 3))
    owners = frozenset(data.draw(st.sets(st.sampled_from([node.id for node in nodes[1:]]))))
    placement = Placement(nodes, copies)
    chosen = placement.copies("n0", owners)
    assert len(chosen.live) + len(chosen.sent) == min(copies, len(nodes) - 1)
    assert not set(chosen.live) & set(chosen.sent) and "n0" not in (*chosen.live, *chosen.sent)
    assert set(chosen.live) <= owners and not owners & set(chosen.sent)
    zone_of = {node.id: node.zone for node in nodes}

    def reached(some: tuple[str, ...]) -> int:
        return len({zone_of["n0"], *(zone_of[node] for node in some)})

    every = (*chosen.live, *chosen.sent)
    for sent, idle in itertools.product(chosen.sent, owners - set(chosen.live)):
        assert reached((*(node for node in every if node != sent), idle)) < reached(every)
    assert placement.copies("n0") == Copies(live=(), sent=backups(nodes, copies)["n0"])


MODEL = ModelSpec(layers=4, hidden=16, heads=4, ffn=12, vocab=256, tie_embeddings=False)
JOB = JobSpec(name="j", model=MODEL, data=DataSpec(uri="stdlib:"), train=TrainSpec(global_batch=4, seq_len=8, steps=9))


def _two_pipelines(optimizer: str) -> Plan:
    """On a and b, and on c and d, each of two equal stages."""

    def stage(first: int, node: str) -> Stage:
        return Stage(layers=((first, first + 2),), replicas=(Replica(node=node, devices=(0,), samples=1),))

    pipelines = tuple(
        Pipeline(micro_batch=1, micro_batches=2, stages=(stage(0, nodes[0]), stage(2, nodes[1])))
        for nodes in ("ab", "cd")
    )
    return Plan(pipelines=pipelines, sharding=Sharding(optimizer=optimizer))  # type: ignore[arg-type]


def test_the_stage_of_the_other_pipeline_mirrors_what_would_have_been_sent() -> None:
    """And does so by the planner's count, too."""
    nodes = tuple(_node(name) for name in "abcd")
    shards = shard_map(_two_pipelines("none"), MODEL)
    found = place_copies(shards, ClusterSnapshot(nodes=nodes), 1)
    assert all(rank.sent == () for rank in found)
    devices = [state.device.node for state in shards.ranks]
    for rank, other in (("a", "c"), ("b", "d"), ("c", "a"), ("d", "b")):
        assert found[devices.index(rank)].mirrors == shards.ranks[devices.index(other)].vouches
    assert network_bytes_per_parameter(shards, found) == 0
    assert told(shards, found) == " No copies of its state are sent, as other nodes keep it live."
    kept = keeping(held_state(_two_pipelines("none"), JOB), Placement(nodes, 1))
    in_spans = host_elements(shards, found)
    assert sum(in_spans.values()) == 2 * num_parameters(MODEL)
    for node in "abcd":
        assert kept[node].sent == kept[node].received == 0
        assert kept[node].kept == pytest.approx(in_spans[node], abs=60)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["none", "node", "cluster"])
def test_shares_and_tied_embeddings_count_for_the_planner_as_for_the_ranks(optimizer: str, tied: bool) -> None:
    """A stage of its own for the end of the model; the other pipeline owes most of the state to one replica."""
    model = dataclasses.replace(MODEL, tie_embeddings=tied)

    def stage(layers: tuple[int, int], node: str, share: float = 1.0) -> Stage:
        return Stage(layers=(layers,), replicas=(Replica(node=node, devices=(0,), samples=1, state_share=share),))

    plan = Plan(
        pipelines=(
            Pipeline(micro_batch=1, micro_batches=3, stages=(stage((0, 4), "a"), stage((4, 4), "b", 0.5))),
            Pipeline(micro_batch=1, micro_batches=1, stages=(stage((0, 4), "c", 3.0),)),
        ),
        sharding=Sharding(optimizer=optimizer),  # type: ignore[arg-type]
    )
    shards = shard_map(plan, model)
    found = place_copies(shards, ClusterSnapshot(nodes=tuple(_node(name) for name in "abc")), 0)
    in_spans = host_elements(shards, found)
    held = state_held(plan, dataclasses.replace(JOB, model=model))
    assert sum(in_spans.values()) == num_parameters(model)
    # Shares are rounded to elements parameter by parameter.
    assert held == pytest.approx(in_spans, abs=len(list(parameters(model))))


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_what_is_split_between_nodes_is_sent(copies: int) -> None:
    nodes = tuple(_node(name) for name in "abcd")
    shards = shard_map(_two_pipelines("cluster"), MODEL)
    found = place_copies(shards, ClusterSnapshot(nodes=nodes), copies)
    assert network_bytes_per_parameter(shards, found) == 12 * copies
    for state, rank in zip(shards.ranks, found, strict=True):
        assert rank.mirrors == ()
        assert rank.sent == tuple((node, state.vouches) for node in backups(nodes, copies)[state.device.node])
    assert told(shards, found) == (
        f" Copies of its state take {12 * copies} bytes per parameter and step on the network." if copies else ""
    )


@pytest.mark.parametrize("room", [0.6, 1.1])
def test_where_an_owner_has_no_room_the_backup_is_sent_it(room: float) -> None:
    """Room on the host of c for so much of all state; a and c own it."""
    sizes = {"a": 1.1, "b": 0.6, "c": room}
    nodes = tuple(
        _node(name, host_memory_bytes=int(snapshot_bytes(num_parameters(MODEL) * part))) for name, part in sizes.items()
    )
    replicas = tuple(Replica(node=node, devices=(0,), samples=1) for node in "ac")
    pipeline = Pipeline(micro_batch=2, micro_batches=2, stages=(Stage(layers=((0, 4),), replicas=replicas),))
    shards = shard_map(Plan(pipelines=(pipeline,), sharding=Sharding(optimizer="none")), MODEL)
    found = place_copies(shards, ClusterSnapshot(nodes=nodes), 1)
    assert network_bytes_per_parameter(shards, found) == pytest.approx(0 if room > 1 else 6, abs=0.1)
    kept = host_elements(shards, found)
    assert all(snapshot_bytes(kept[node.id]) <= node.host_memory_bytes for node in nodes)
