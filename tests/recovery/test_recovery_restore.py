"""plan_restore in cases made by hand; `test_recovery_restore_worlds` has the random ones."""

from __future__ import annotations

from collections import Counter

import layouts
import pytest
from layouts import Shard
from restore_worlds import DONE, NEWER, Files, stored

from shoal_planner.job import ModelSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.errors import StateLost
from shoal_recovery.restore import plan_restore, whole_steps
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import OWNED_KINDS, Inventory, Kind, RankState, ShardMap, Snapshot, Tier

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
    files: Files = {}
    manifest = stored(before, MODEL, DONE, files)
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


def test_peers_in_the_zone_of_the_reader_go_before_others_and_before_the_store() -> None:
    """All peers hold all; near ones share the load. What only a far one has comes from there, and nothing from the
    store."""
    before, after = shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL), shard_map(_plan({"z": (0, 6)}), MODEL)
    manifest = stored(before, MODEL, DONE, {})
    (_, one), (_, other) = _shards(before, DONE)
    everywhere = [layouts.snapshot(held, peer, DONE) for peer in ("p0", "p1", "p2") for held in (one, other)]
    zones = {"z": "x", "p0": "y", "p1": "x", "p2": "x"}

    def sent(*snapshots: Snapshot) -> dict[str, int]:
        plan = plan_restore(after, Inventory(snapshots=snapshots), (manifest,), MODEL, "fp32", zones)
        assert plan.bytes_by_tier()[Tier.STORE] == 0
        load: Counter[str] = Counter()
        for transfer in plan.transfers:
            if transfer.tier is Tier.PEER:
                load[str(transfer.node)] += transfer.num_bytes
        return dict(load)

    near = sent(*everywhere)
    assert sorted(near) == ["p1", "p2"] and max(near.values()) <= sum(near.values()) / 2 * 1.05
    apart = sent(layouts.snapshot(one, "p0", DONE), layouts.snapshot(other, "p0", DONE), everywhere[2])
    assert everywhere[2].node == "p1"
    assert apart["p1"] == sum(piece.num_bytes for piece in one.pieces)
    zones.clear()
    assert sorted(sent(*everywhere)) == ["p0", "p1", "p2"]


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
    with pytest.raises(StateLost, match=r", for example: embedding.weight master \[160, 320\)") as lost:
        plan_restore(before, half, (), MODEL, "fp32")
    assert len(lost.value.missing) == 3
    gone = before.ranks[1].owns  # each moment and the master of them; one interval of each parameter
    assert len({span.fqn for span in gone}) == len(gone)
    num_bytes = 3 * 4 * sum(span.numel for span in gone)
    assert f"step {DONE}, lacks {3 * len(gone)} intervals of {len(gone)} parameters, {num_bytes:,} bytes in all" in str(
        lost.value
    )


def test_lost_state_is_counted_once_however_many_need_it() -> None:
    """Both ranks of the new plan compute with all weights, and so need one and the same master."""
    (whole,) = shard_map(_plan({"a": (0, 6)}), MODEL).ranks
    live = Inventory(live=(layouts.live(whole, NEWER),))
    pipeline = Pipeline(
        micro_batch=2,
        micro_batches=1,
        stages=(Stage(layers=((0, 6),), replicas=tuple(Replica(node=n, devices=(0,), samples=1) for n in "bc")),),
    )
    with pytest.raises(StateLost, match="only in memory that no rank of the new plan can use") as lost:
        plan_restore(shard_map(Plan(pipelines=(pipeline,)), MODEL), live, (), MODEL, "fp32")
    num_bytes = 3 * 4 * sum(span.numel for span in whole.owns)
    assert f"step {NEWER} is left whole only in memory" in str(lost.value)
    assert f"of {len(whole.owns)} parameters, {num_bytes:,} bytes in all" in str(lost.value)


def test_live_memory_that_no_wanted_rank_can_use_is_not_enough() -> None:
    before = shard_map(_plan({"a": (0, 3), "b": (3, 6)}), MODEL)
    live = Inventory(live=tuple(layouts.live(state, NEWER) for state in before.ranks))
    assert plan_restore(before, live, (), MODEL, "fp32").step == NEWER
    assert whole_steps(live, (), MODEL) == (NEWER,)
    with pytest.raises(StateLost, match="only in memory that no rank of the new plan can use"):
        plan_restore(shard_map(_plan({"a": (0, 6)}), MODEL), live, (), MODEL, "fp32")
