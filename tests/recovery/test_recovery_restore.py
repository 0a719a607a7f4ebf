"""plan_restore carried out on real bytes: random plans, random survivors, one true state to compare with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import layouts
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from layouts import Arrays, Shard

from shoal_planner.cluster import DeviceRef
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.checkpoints import checksum
from shoal_recovery.errors import StateLost
from shoal_recovery.restore import plan_restore, whole_steps
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import (
    OWNED_KINDS,
    Inventory,
    Kind,
    Manifest,
    RankState,
    RecoveryPlan,
    ShardMap,
    Tier,
    Transfer,
)

STORED, DONE, NEWER = 4, 6, 7
STEPS = (NEWER, DONE, STORED)
Masks = dict[tuple[str, Kind], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class World:
    """What is left of a cluster, with the bytes behind every description."""

    model: ModelSpec
    wanted: ShardMap
    inventory: Inventory
    manifests: tuple[Manifest, ...]
    files: dict[tuple[str | None, str, int], bytes]  # by node (None: store), name, step

    def restore(self) -> RecoveryPlan:
        return plan_restore(self.wanted, self.inventory, self.manifests, self.model, "fp32")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    model = draw(layouts.models())
    old, new = draw(layouts.plans(model)), draw(layouts.plans(model))
    before = shard_map(old, model)
    files: dict[tuple[str | None, str, int], bytes] = {}
    live, snapshots, manifests = [], [], []
    dead = draw(st.sets(st.sampled_from(layouts.NODES), max_size=4))
    whole = draw(st.booleans())  # else any snapshot may be missing, as after a blow in the middle of copying
    for state in before.ranks:
        if state.device.node not in dead and draw(st.booleans()):
            live.append(layouts.live(state, draw(st.sampled_from((DONE, DONE, NEWER)))))
        for step in (DONE, NEWER):
            held = layouts.shard(state, layouts.arrays(model, step))
            for node in {state.device.node, draw(st.sampled_from(layouts.NODES))} - dead:
                if (whole and step == DONE) or draw(st.booleans()):
                    snapshots.append(layouts.snapshot(held, node, step))
                    files[node, held.name, step] = held.content
    if draw(st.booleans()):
        step = draw(st.sampled_from((STORED, DONE)))
        manifests.append(_stored(shard_map(draw(layouts.plans(model)), model), model, step, files))
    return World(
        model=model,
        wanted=shard_map(new, model),
        inventory=Inventory(live=tuple(live), snapshots=tuple(snapshots)),
        manifests=tuple(manifests),
        files=files,
    )


def _stored(
    sharding: ShardMap, model: ModelSpec, step: int, files: dict[tuple[str | None, str, int], bytes]
) -> Manifest:
    pieces = []
    for state in sharding.ranks:
        held = layouts.shard(state, layouts.arrays(model, step))
        files[None, held.name, step] = held.content
        pieces.extend(layouts.stored_pieces(held, held.name))
    return Manifest(version=1, job="j", step=step, epoch=1, next_sample=0, pieces=tuple(pieces))


def _masks(model: ModelSpec) -> Masks:
    return {
        (parameter.fqn, kind): np.zeros(parameter.numel, dtype=bool) for parameter in parameters(model) for kind in Kind
    }


@dataclass(frozen=True, kw_only=True)
class Reach:
    """An oracle that knows no intervals, only elements: what can be had of one step, from where."""

    live: dict[DeviceRef, Masks]
    near: dict[str, Masks]
    peers: Masks
    store: Masks


def _reach(world: World, step: int) -> Reach:
    reach = Reach(live={}, near={}, peers=_masks(world.model), store=_masks(world.model))
    for live in world.inventory.live:
        if live.step == step:
            masks = reach.live.setdefault(live.device, _masks(world.model))
            for key in live.keys:
                masks[key.fqn, key.kind][key.first : key.last] = True
    for snapshot in world.inventory.snapshots:
        if snapshot.step == step:
            near = reach.near.setdefault(snapshot.node, _masks(world.model))
            for piece in snapshot.pieces:
                for masks in (near, reach.peers):
                    masks[piece.key.fqn, piece.key.kind][piece.key.first : piece.key.last] = True
    for manifest in world.manifests:
        if manifest.step == step:
            for stored in manifest.pieces:
                reach.store[stored.key.fqn, stored.key.kind][stored.key.first : stored.key.last] = True
    return reach


def _expected_bytes(world: World, step: int) -> Counter[Tier] | None:
    """By tier, element by element; None if something is out of reach."""
    reach, found = _reach(world, step), Counter({tier: 0 for tier in Tier})
    for state in world.wanted.ranks:
        live = reach.live.get(state.device, _masks(world.model))
        near = reach.near.get(state.device.node, _masks(world.model))
        owned = _masks(world.model)
        for span in state.owns:
            owned[span.fqn, Kind.MASTER][span.first : span.last] = True
        needs = [(span, kind) for span in state.owns for kind in OWNED_KINDS]
        needs += [(span, Kind.WEIGHT) for span in state.keeps]
        for span, kind in needs:
            source = Kind.MASTER if kind is Kind.WEIGHT else kind
            own = live[span.fqn, kind].copy()
            if kind is Kind.WEIGHT:
                own |= owned[span.fqn, Kind.MASTER]
            left = np.ones(span.numel, dtype=bool)
            for tier, mask in (
                (Tier.OWN, own),
                (Tier.NODE, near[span.fqn, source]),
                (Tier.PEER, reach.peers[span.fqn, source]),
                (Tier.STORE, reach.store[span.fqn, source]),
            ):
                taken = left & mask[span.first : span.last]
                found[tier] += int(taken.sum()) * 4
                left &= ~taken
            if left.any():
                return None
    return found


def _bytes_of(world: World, transfer: Transfer, step: int) -> np.ndarray:
    state = world.wanted.ranks[transfer.rank]
    match transfer.tier:
        case Tier.NODE:
            assert transfer.node == state.device.node
        case Tier.PEER:
            assert transfer.node not in (None, state.device.node)
        case Tier.STORE:
            assert transfer.node is None
        case Tier.OWN:
            raise AssertionError(transfer)
    assert transfer.name is not None
    content = world.files[transfer.node, transfer.name, step]
    data = content[transfer.offset : transfer.offset + transfer.num_bytes]
    assert transfer.checksum in (None, checksum(data))
    return np.frombuffer(data, dtype="<f4")


def _carry_out(world: World, plan: RecoveryPlan) -> dict[int, Arrays]:
    """Every rank's memory afterwards; NaN where nothing was brought. Nothing is written twice."""
    truth = layouts.arrays(world.model, plan.step)
    reach = _reach(world, plan.step)
    memory: dict[int, Arrays] = {}
    for state in world.wanted.ranks:
        memory[state.rank] = {
            (parameter.fqn, kind): np.full(parameter.numel, np.nan, dtype="<f4")
            for parameter in parameters(world.model)
            for kind in Kind
        }
    for transfer in plan.transfers:
        key, mine = transfer.key, memory[transfer.rank]
        place = mine[key.fqn, key.kind][key.first : key.last]
        assert np.isnan(place).all(), f"brought twice: {transfer}"
        assert transfer.num_bytes == key.numel * 4
        if transfer.tier is not Tier.OWN:
            place[:] = _bytes_of(world, transfer, plan.step)
        elif (key.kind, transfer.source_kind) == (Kind.WEIGHT, Kind.MASTER):
            place[:] = mine[key.fqn, Kind.MASTER][key.first : key.last]
        else:
            assert transfer.source_kind is key.kind
            assert reach.live[world.wanted.ranks[transfer.rank].device][key.fqn, key.kind][key.first : key.last].all()
            place[:] = truth[key.fqn, key.kind][key.first : key.last]
    return memory


def _check_state(world: World, plan: RecoveryPlan) -> None:
    truth, memory = layouts.arrays(world.model, plan.step), _carry_out(world, plan)
    for state in world.wanted.ranks:
        needed = _masks(world.model)
        for key in (*layouts.owned_keys(state), *(span.key(Kind.WEIGHT) for span in state.keeps)):
            needed[key.fqn, key.kind][key.first : key.last] = True
        for address, mask in needed.items():
            np.testing.assert_array_equal(memory[state.rank][address][mask], truth[address][mask])
            assert np.isnan(memory[state.rank][address][~mask]).all(), "more was brought than is needed"


@settings(max_examples=80)
@given(worlds())
def test_every_rank_gets_exactly_its_state_from_the_nearest_source(world: World) -> None:
    expected = next(((step, found) for step in STEPS if (found := _expected_bytes(world, step)) is not None), None)
    event("lost" if expected is None else f"step {expected[0]}")
    if expected is None:
        with pytest.raises(StateLost):
            world.restore()
        return
    plan = world.restore()
    for tier, num_bytes in expected[1].items():
        event(f"{tier} {num_bytes > 0}")
    assert (plan.step, plan.bytes_by_tier()) == expected
    assert plan.step in whole_steps(world.inventory, world.manifests, world.model)
    _check_state(world, plan)
    assert world.restore() == plan


@settings(max_examples=40)
@given(worlds())
def test_whole_steps_are_those_of_which_every_element_is_somewhere(world: World) -> None:
    expected = []
    for step in STEPS:
        reach = _reach(world, step)
        somewhere = [reach.peers, reach.store, *reach.live.values()]
        if all(
            np.logical_or.reduce([masks[address] for masks in somewhere]).all()
            for address in reach.peers
            if address[1] in OWNED_KINDS
        ):
            expected.append(step)
    assert whole_steps(world.inventory, world.manifests, world.model) == tuple(expected)


MODEL = ModelSpec(layers=6, hidden=16, heads=4, ffn=12, vocab=20)


def _plan(nodes: dict[str, tuple[int, int]]) -> Plan:
    """One pipeline; each node has one device with one stage."""
    stages = tuple(
        Stage(layers=(layers,), replicas=(Replica(node=node, devices=(0,)),)) for node, layers in nodes.items()
    )
    return Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=stages),))


def _shards(sharding: ShardMap, step: int) -> list[tuple[RankState, Shard]]:
    return [(state, layouts.shard(state, layouts.arrays(MODEL, step))) for state in sharding.ranks]


def test_the_store_is_read_for_exactly_what_no_survivor_holds() -> None:
    before = shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL)
    after = shard_map(_plan({"a": (0, 6)}), MODEL)
    files: dict[tuple[str | None, str, int], bytes] = {}
    manifest = _stored(before, MODEL, DONE, files)
    (state, held), _ = _shards(before, DONE)
    inventory = Inventory(live=(layouts.live(state, DONE),), snapshots=(layouts.snapshot(held, "a", DONE),))
    plan = plan_restore(after, inventory, (manifest,), MODEL, "bf16")
    lost = sum(span.numel for span in before.ranks[1].owns)
    assert plan.bytes_by_tier()[Tier.STORE] == lost * 4 * len(OWNED_KINDS)
    assert plan.bytes_by_tier()[Tier.NODE] == 0, "live memory is nearer than the agent"
    moved = [transfer for transfer in plan.transfers if transfer.tier is Tier.STORE]
    assert all(transfer.checksum for transfer in moved if transfer.key.fqn != "embedding.weight")


def test_weights_in_place_count_in_the_precision_of_the_job() -> None:
    before = shard_map(_plan({"a": (0, 6)}), MODEL)
    inventory = Inventory(live=(layouts.live(before.ranks[0], DONE),))
    weights = sum(span.numel for span in before.ranks[0].holds)
    for precision, weight_bytes in (("fp32", 4), ("bf16", 2)):
        plan = plan_restore(before, inventory, (), MODEL, precision)
        assert plan.bytes_by_tier() == {
            Tier.OWN: weights * (3 * 4 + weight_bytes),
            Tier.NODE: 0,
            Tier.PEER: 0,
            Tier.STORE: 0,
        }


@pytest.mark.parametrize("num_peers", [2, 3, 5])
def test_peers_are_loaded_evenly(num_peers: int) -> None:
    """All peers hold all: no load differs from another by more than the largest shard."""
    before = shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL)
    peers = [f"p{index}" for index in range(num_peers)]
    snapshots = tuple(layouts.snapshot(held, peer, DONE) for peer in peers for _, held in _shards(before, DONE))
    plan = plan_restore(shard_map(_plan({"z": (0, 6)}), MODEL), Inventory(snapshots=snapshots), (), MODEL, "fp32")
    load: Counter[str] = Counter()
    for transfer in plan.transfers:
        if transfer.tier is Tier.PEER:
            load[str(transfer.node)] += transfer.num_bytes
    assert sorted(load) == peers
    total = sum(load.values())
    assert max(load.values()) <= total / num_peers * 1.02


def test_a_newer_step_that_is_not_whole_is_passed_over() -> None:
    before = shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL)
    snapshots = [layouts.snapshot(held, "c", DONE) for _, held in _shards(before, DONE)]
    snapshots.append(layouts.snapshot(_shards(before, NEWER)[0][1], "c", NEWER))
    inventory = Inventory(snapshots=tuple(snapshots))
    assert whole_steps(inventory, (), MODEL) == (DONE,)
    assert plan_restore(before, inventory, (), MODEL, "fp32").step == DONE


def test_neighbours_from_one_shard_are_one_transfer_however_others_are_cut() -> None:
    """Also: weights in a snapshot are no source, they may not be in full precision."""
    whole, halves = shard_map(_plan({"z": (0, 6)}), MODEL), shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL)
    (_, held), weights = _shards(whole, DONE)[0], whole.ranks[0].holds[0].key(Kind.WEIGHT)
    useless = layouts.Piece(key=weights, offset=0, num_bytes=weights.numel * 4, checksum="")
    near = layouts.Shard(name=held.name, content=held.content, pieces=(*held.pieces, useless))
    others = [layouts.snapshot(other, "p", DONE) for _, other in _shards(halves, DONE)]
    inventory = Inventory(snapshots=(layouts.snapshot(near, "z", DONE), *others))
    plan = plan_restore(whole, inventory, (), MODEL, "fp32")
    brought = [transfer for transfer in plan.transfers if transfer.tier is not Tier.OWN]
    assert [(t.key, t.offset, t.num_bytes, t.checksum) for t in brought] == [
        (piece.key, piece.offset, piece.num_bytes, piece.checksum)
        for piece in sorted(held.pieces, key=lambda piece: (piece.key.fqn, piece.key.kind))
    ]


def test_lost_state_is_named() -> None:
    before = shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL)
    with pytest.raises(StateLost, match="have any state"):
        plan_restore(before, Inventory(), (), MODEL, "fp32")
    half = Inventory(snapshots=(layouts.snapshot(_shards(before, DONE)[0][1], "a", DONE),))
    with pytest.raises(
        StateLost, match=rf"step {DONE}, lacks for example: embedding.weight master \[160, 320\)"
    ) as lost:
        plan_restore(before, half, (), MODEL, "fp32")
    assert len(lost.value.missing) == 3


def test_live_memory_that_no_wanted_rank_can_use_is_not_enough() -> None:
    before = shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL)
    live = Inventory(live=tuple(layouts.live(state, NEWER) for state in before.ranks))
    assert plan_restore(before, live, (), MODEL, "fp32").step == NEWER
    assert whole_steps(live, (), MODEL) == (NEWER,)
    with pytest.raises(StateLost, match="only in memory that no rank of the new plan can use"):
        plan_restore(shard_map(_plan({"a": (0, 6)}), MODEL), live, (), MODEL, "fp32")
