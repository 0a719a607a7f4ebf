"""Sources that failed: what is planned again without them, against the same oracle, and how it is told."""

from __future__ import annotations

import dataclasses

import layouts
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from restore_worlds import World, check_state, check_zones, nearest, worlds

from shoal_recovery.errors import StateLost
from shoal_recovery.faults import Fault, disputed, fault_of, told, without
from shoal_recovery.restore import plan_again
from shoal_recovery.state import Inventory, Kind, Manifest, ShardKey, Snapshot, Tier, Transfer

KEY = ShardKey(fqn="w", kind=Kind.MASTER, first=0, last=10)


@settings(max_examples=12)
@given(worlds(), st.data())
def test_what_failed_comes_from_the_next_nearest_source(world: World, data: st.DataObject) -> None:
    try:
        plan = world.restore()
    except StateLost:
        assume(False)
    fetched = [transfer for transfer in plan.transfers if transfer.tier is not Tier.OWN]
    assume(fetched)
    failed = tuple(data.draw(st.lists(st.sampled_from(fetched), min_size=1, max_size=6, unique=True)))
    faults = [fault_of(one, plan.step, "broken", silent=data.draw(st.booleans())) for one in failed]
    inventory, manifests = without(faults, world.inventory, world.manifests)
    left = dataclasses.replace(world, inventory=inventory, manifests=manifests)
    expected = nearest(left, plan.step, failed)
    event("lost" if expected is None else "found")
    if expected is None:
        with pytest.raises(StateLost, match="nobody else has"):
            plan_again(failed, plan.step, world.wanted, inventory, manifests, world.precision, world.zones)
        return
    again = plan_again(failed, plan.step, world.wanted, inventory, manifests, world.precision, world.zones)
    check_zones(left, dataclasses.replace(plan, transfers=again))
    assert {tier: sum(one.num_bytes for one in again if one.tier is tier) for tier in expected} == expected
    kept = tuple(one for one in plan.transfers if one not in failed)
    order = sorted((*kept, *again), key=lambda one: one.is_derived)
    check_state(left, dataclasses.replace(plan, transfers=tuple(order)), held=world)
    for one in again:
        assert not any(fault.node == one.node and fault.spoils(str(one.name), one.source_key) for fault in faults)


def _snapshot(node: str, checksum: str) -> Snapshot:
    piece = layouts.Piece(key=KEY, offset=0, num_bytes=40, checksum=checksum)
    return Snapshot(node=node, name="000001-0", step=4, pieces=(piece,))


def _manifest(checksum: str) -> Manifest:
    piece = layouts.StoredPiece(key=KEY, object="o", offset=0, num_bytes=40, checksum=checksum)
    return Manifest(version=1, job="j", step=4, epoch=1, next_sample=0, pieces=(piece,))


def test_where_checksums_differ_most_are_believed_and_else_nobody() -> None:
    two = Inventory(snapshots=(_snapshot("a", "right"), _snapshot("b", "wrong")))
    assert {fault.node for fault in disputed(two, ())} == {"a", "b"}
    (liar,) = disputed(two, (_manifest("right"),))
    assert (liar.node, liar.name, liar.step, liar.key) == ("b", "000001-0", 4, KEY)
    inventory, _ = without((liar,), two, ())
    assert [len(snapshot.pieces) for snapshot in inventory.snapshots] == [1, 0]
    assert disputed(Inventory(snapshots=two.snapshots[:1]), (_manifest("right"),)) == ()


def test_who_is_silent_has_nothing() -> None:
    both = Inventory(snapshots=(_snapshot("a", "same"), _snapshot("b", "same")))
    silent = Fault(node="a", name="other", step=1, key=KEY, problem="end of file", silent=True)
    inventory, _ = without((silent,), both, ())
    assert [snapshot.node for snapshot in inventory.snapshots] == ["b"]


def test_what_failed_is_told_with_what_took_its_place() -> None:
    half = dataclasses.replace(KEY, last=5)
    faults = [
        Fault(node="a", name="x", step=4, key=KEY, problem="flipped"),
        Fault(node="a", name="x", step=4, key=KEY, problem="said again"),
        Fault(node=None, name="o", step=9, key=KEY, problem="cut short"),
        Fault(node="b", name="y", step=3, key=KEY, problem="old"),
    ]
    transfers = (
        Transfer(rank=0, key=half, source_kind=Kind.MASTER, tier=Tier.PEER, num_bytes=20, node="c", name="z"),
        Transfer(rank=1, key=half, source_kind=Kind.MASTER, tier=Tier.OWN, num_bytes=20),
    )
    spoilt, stored, old = told(faults, 4, transfers)
    assert (spoilt.source, spoilt.object, spoilt.num_bytes, spoilt.problem) == ("agent of a", "x", 40, "flipped")
    assert spoilt.instead == ("agent of c",)
    assert (stored.source, stored.step, stored.instead) == ("object store", 9, ("step 4",))
    assert old.instead == ("nothing: it was not needed",)
