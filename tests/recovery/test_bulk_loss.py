"""What a bulk loss would cost is what a restore after it reads from the store."""

from __future__ import annotations

from collections import Counter

import layouts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restore_worlds import stored

from shoal_planner.cluster import DeviceRef, Node
from shoal_planner.memory import snapshot_bytes
from shoal_recovery.bulk_loss import BulkLoss, bulk_losses
from shoal_recovery.placement import backups, held_by
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Inventory, RankState, ShardMap, Span, Tier

STEP = 6


def a_node(name: str, zone: str, device: str, *, spot: bool = True, host_memory_bytes: int = 1 << 40) -> Node:
    return Node(
        id=name,
        device=device,
        devices=9,
        host_memory_bytes=host_memory_bytes,
        intra_bytes_per_s=1.0,
        inter_bytes_per_s=1.0,
        zone=zone,
        spot=spot,
    )


clusters = st.tuples(
    *(
        st.builds(a_node, st.just(name), st.sampled_from("xy"), st.sampled_from(("T4", "A40")), spot=st.booleans())
        for name in layouts.NODES
    )
)


@settings(max_examples=8)
@given(st.data(), clusters, st.integers(0, 2))
def test_it_costs_what_is_read_from_the_store_after_it(
    data: st.DataObject, nodes: tuple[Node, ...], copies: int
) -> None:
    """By one new rank elsewhere that has to have the whole state."""
    model = data.draw(layouts.models())
    shards = shard_map(data.draw(layouts.plans(model)), model)
    truth, files = layouts.arrays(model, STEP), {}
    manifest = stored(shards, model, STEP, files)
    whole = tuple(span for state in shards.ranks for span in state.vouches)
    wanted = ShardMap(ranks=(_owner_of(tuple(sorted(whole))),))
    kept_on = backups(nodes, copies)
    held = [(layouts.shard(state, truth), state.device.node) for state in shards.ranks]
    found = bulk_losses(shards, nodes, copies)
    assert {loss.domain for loss in found} == {"node", "pool", "zone"}
    assert [loss.store_bytes for loss in found] == sorted((loss.store_bytes for loss in found), reverse=True)
    for loss in data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=3)):
        snapshots = tuple(
            layouts.snapshot(shard, node, STEP)
            for shard, home in held
            for node in (home, *kept_on[home])
            if node not in loss.nodes
        )
        plan = plan_restore(wanted, Inventory(snapshots=snapshots), (manifest,), model, "fp32")
        assert plan.bytes_by_tier()[Tier.STORE] == loss.store_bytes, loss


def _owner_of(spans: tuple[Span, ...]) -> RankState:
    nothing: tuple[Span, ...] = ()
    return RankState(
        rank=0,
        device=DeviceRef(node="new", index=0),
        holds=spans,
        keeps=spans,
        contributes=spans,
        sums=nothing,
        owns=spans,
        vouches=spans,
    )


def test_copies_in_another_zone_survive_a_zone_and_not_two() -> None:
    nodes = tuple(a_node(name, "x" if index < 2 else "y", "T4") for index, name in enumerate(layouts.NODES[:4]))
    spans = tuple(Span(fqn="w", first=10 * index, last=10 * index + 10) for index in range(2))
    ranks = tuple(_of(rank, nodes[rank].id, span) for rank, span in enumerate(spans))
    shards = ShardMap(ranks=ranks)

    def costs(copies: int) -> dict[str, int]:
        return {loss.name: loss.store_bytes for loss in bulk_losses(shards, nodes, copies)}

    alone = costs(0)
    assert (alone["n0"], alone["x"], alone["T4 in x"], alone["y"]) == (120, 240, 240, 0)
    copied = costs(1)
    assert set(copied.values()) == {0}
    (worst, *_) = bulk_losses(shards, nodes, 0)
    assert worst == BulkLoss(domain="pool", name="T4 in x", nodes=("n0", "n1"), store_bytes=240)


def fleet(spot: int, on_demand: int, host_memory_bytes: int = 1 << 40) -> tuple[Node, ...]:
    """Of one type and zone; those that are bought first are named first."""
    names = [(f"a{number}", True) for number in range(spot)] + [(f"b{number}", False) for number in range(on_demand)]
    return tuple(a_node(name, "x", "T4", spot=is_spot, host_memory_bytes=host_memory_bytes) for name, is_spot in names)


def shared_out(nodes: tuple[Node, ...]) -> ShardMap:
    """A span of ten elements for each."""
    spans = [Span(fqn="w", first=10 * index, last=10 * index + 10) for index in range(len(nodes))]
    return ShardMap(ranks=tuple(_of(rank, nodes[rank].id, span) for rank, span in enumerate(spans)))


@pytest.mark.parametrize(("spot", "on_demand"), [(2, 2), (4, 2), (8, 4), (3, 6)])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_whole_pool_may_go_where_another_has_room_for_its_copies(spot: int, on_demand: int, copies: int) -> None:
    nodes = fleet(spot, on_demand)
    losses = bulk_losses(shared_out(nodes), nodes, copies)
    assert [loss.store_bytes for loss in losses if loss.domain == "pool"] == [0, 0]


def test_where_hosts_have_no_room_for_more_copies_are_spread_evenly() -> None:
    """Each has room for its own state and one copy: two of four copies of spot nodes have to stand in their pool."""
    nodes = fleet(4, 2, host_memory_bytes=int(snapshot_bytes(20)))
    shards = shared_out(nodes)
    kept: Counter[str] = Counter()
    for holders, num_elements in held_by(shards, nodes, 1):
        kept.update({node: num_elements for node in holders})
    assert set(kept.values()) == {20}
    (pool,) = (loss for loss in bulk_losses(shards, nodes, 1) if loss.name == "T4 in x")
    assert pool.store_bytes == 2 * 10 * 12
    roomy = fleet(4, 2, host_memory_bytes=int(snapshot_bytes(30)))
    assert all(loss.store_bytes == 0 for loss in bulk_losses(shards, roomy, 1) if loss.domain == "pool")


def _of(rank: int, node: str, span: Span) -> RankState:
    return RankState(
        rank=rank,
        device=DeviceRef(node=node, index=0),
        holds=(span,),
        keeps=(span,),
        contributes=(span,),
        sums=(),
        owns=(span,),
        vouches=(span,),
    )
