"""Random remains of clusters, and an oracle of what can be restored from them that was written apart from plan_restore:
it knows no intervals, only single elements, and asks of each one where it is."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import layouts
import numpy as np
from hypothesis import strategies as st
from layouts import Arrays

from shoal_planner.cluster import DeviceRef
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_recovery.crc import checksum
from shoal_recovery.restore import Precision, plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import (
    OWNED_KINDS,
    Inventory,
    Kind,
    Manifest,
    RankState,
    RecoveryPlan,
    ShardMap,
    Snapshot,
    StoredPiece,
    Tier,
    Transfer,
)

OLDEST, STORED, DONE, NEWER = 2, 4, 6, 7
STEPS = (NEWER, DONE, STORED, OLDEST)
Masks = dict[tuple[str, Kind], np.ndarray]
Files = dict[tuple[str | None, str, int], bytes]  # by node (None: store), name, step


@dataclass(frozen=True, kw_only=True)
class World:
    """What is left of a cluster, with the bytes behind every description."""

    model: ModelSpec
    wanted: ShardMap
    inventory: Inventory
    manifests: tuple[Manifest, ...]
    files: Files = field(repr=False)
    precision: Precision = "fp32"
    zones: dict[str, str] = field(default_factory=dict)

    def restore(self) -> RecoveryPlan:
        return plan_restore(self.wanted, self.inventory, self.manifests, self.model, self.precision, self.zones)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A plan ran, perhaps another one before it from DONE on; some nodes died, and a third plan is to go on. Of what is
    left any piece may be spoilt; the store has any steps, written by any plans, whole or not."""
    model = draw(layouts.models())
    before = shard_map(draw(layouts.plans(model)), model)
    files: Files = {}
    dead = draw(st.sets(st.sampled_from(layouts.NODES), max_size=3))
    live = [
        layouts.live(state, draw(st.sampled_from((DONE, DONE, NEWER))))
        for state in before.ranks
        if state.device.node not in dead and draw(st.booleans())
    ]
    whole = draw(st.booleans())  # else any snapshot may be missing, as after a blow in the middle of copying
    snapshots = draw(_snapshots(model, before, dead, files, 2, (DONE, NEWER), whole))
    if draw(st.booleans()):
        earlier = shard_map(draw(layouts.plans(model)), model)
        snapshots += draw(_snapshots(model, earlier, dead, files, 1, (DONE,), False))
    if draw(st.booleans()):
        snapshots = [draw(_spoilt(snapshot)) for snapshot in snapshots]
    stored = draw(st.sets(st.sampled_from((OLDEST, STORED, DONE)), max_size=3))
    return World(
        model=model,
        wanted=shard_map(draw(layouts.plans(model)), model),
        inventory=Inventory(live=tuple(live), snapshots=tuple(snapshots)),
        manifests=tuple(draw(_manifests(model, step, files)) for step in sorted(stored)),
        files=files,
        precision=draw(st.sampled_from(("fp32", "bf16"))),
        zones=draw(st.dictionaries(st.sampled_from(layouts.NODES), st.sampled_from("xyz"))),  # of some, or of none
    )


@st.composite
def _snapshots(
    draw: st.DrawFn,
    model: ModelSpec,
    sharding: ShardMap,
    dead: set[str],
    files: Files,
    epoch: int,
    steps: tuple[int, ...],
    whole: bool,
) -> list[Snapshot]:
    """Every rank's, with its own node and up to two others."""
    found = []
    for state, step in itertools.product(sharding.ranks, steps):
        held = layouts.shard(state, layouts.arrays(model, step), epoch)
        backups = draw(st.sets(st.sampled_from(layouts.NODES), max_size=2))
        for node in sorted({state.device.node, *backups} - dead):
            if (whole and step == DONE) or draw(st.booleans()):
                found.append(layouts.snapshot(held, node, step))
                files[node, held.name, step] = held.content
    return found


@st.composite
def _spoilt(draw: st.DrawFn, snapshot: Snapshot) -> Snapshot:
    gone = draw(st.sets(st.integers(0, 5), max_size=2))
    pieces = tuple(piece for index, piece in enumerate(snapshot.pieces) if index not in gone)
    return dataclasses.replace(snapshot, pieces=pieces)


@st.composite
def _manifests(draw: st.DrawFn, model: ModelSpec, step: int, files: Files) -> Manifest:
    manifest = stored(shard_map(draw(layouts.plans(model)), model), model, step, files)
    gone = draw(st.sets(st.integers(0, 20), max_size=1)) if draw(st.booleans()) else ()
    pieces = tuple(piece for index, piece in enumerate(manifest.pieces) if index not in gone)
    return dataclasses.replace(manifest, pieces=pieces)


def stored(sharding: ShardMap, model: ModelSpec, step: int, files: Files) -> Manifest:
    pieces: list[StoredPiece] = []
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
    """What can be had of one step, from where, element by element."""

    live: dict[DeviceRef, Masks]
    near: dict[str, Masks]
    peers: Masks
    store: Masks


def reach(world: World, step: int) -> Reach:
    found = Reach(live={}, near={}, peers=_masks(world.model), store=_masks(world.model))
    for live in world.inventory.live:
        if live.step == step:
            masks = found.live.setdefault(live.device, _masks(world.model))
            for key in live.keys:
                masks[key.fqn, key.kind][key.first : key.last] = True
    for snapshot in world.inventory.snapshots:
        if snapshot.step == step:
            near = found.near.setdefault(snapshot.node, _masks(world.model))
            for piece in snapshot.pieces:
                for masks in (near, found.peers):
                    masks[piece.key.fqn, piece.key.kind][piece.key.first : piece.key.last] = True
    for manifest in world.manifests:
        if manifest.step == step:
            for piece_stored in manifest.pieces:
                key = piece_stored.key
                found.store[key.fqn, key.kind][key.first : key.last] = True
    return found


def expected_steps(world: World) -> tuple[int, ...]:
    """Of which every element of master and moments is somewhere, newest first."""
    return tuple(step for step in STEPS if _is_whole(world, reach(world, step)))


def _is_whole(world: World, found: Reach) -> bool:
    somewhere = [found.peers, found.store, *found.live.values()]
    addresses = [(parameter.fqn, kind) for parameter in parameters(world.model) for kind in OWNED_KINDS]
    return all(np.logical_or.reduce([masks[address] for masks in somewhere]).all() for address in addresses)


def expected(world: World) -> tuple[int, dict[Tier, int]] | None:
    """The step to restore and the bytes by tier; None where no step can be restored."""
    for step in expected_steps(world):
        found = _expected_bytes(world, reach(world, step))
        if found is not None:
            return step, found
    return None


def _expected_bytes(world: World, found: Reach) -> dict[Tier, int] | None:
    """None if something is out of reach."""
    num_bytes: Counter[Tier] = Counter()
    for state in world.wanted.ranks:
        for tier, mask, element_bytes in _needs(world, state, found):
            if tier is None and mask.any():
                return None
            if tier is not None:
                num_bytes[tier] += int(mask.sum()) * element_bytes
    return {tier: num_bytes[tier] for tier in Tier}


def _needs(world: World, state: RankState, found: Reach) -> Iterator[tuple[Tier | None, np.ndarray, int]]:
    """Which elements of what a rank needs come from which tier (None: nowhere), and how large each is."""
    none = _masks(world.model)
    live, near = found.live.get(state.device, none), found.near.get(state.device.node, none)
    owned = _masks(world.model)
    for span in state.owns:
        owned[span.fqn, Kind.MASTER][span.first : span.last] = True
    needs = [(span, kind) for span in state.owns for kind in OWNED_KINDS]
    needs += [(span, Kind.WEIGHT) for span in state.keeps]
    for span, kind in needs:
        source = Kind.MASTER if kind is Kind.WEIGHT else kind
        left = np.ones(span.numel, dtype=bool)
        tiers: list[tuple[Tier | None, np.ndarray, int]] = [(Tier.OWN, live[span.fqn, kind], 4)]
        if kind is Kind.WEIGHT:
            in_place_bytes = 4 if world.precision == "fp32" else 2
            tiers = [(Tier.OWN, live[span.fqn, kind], in_place_bytes), (Tier.OWN, owned[span.fqn, source], 4)]
        tiers += [
            (Tier.NODE, near[span.fqn, source], 4),
            (Tier.PEER, found.peers[span.fqn, source], 4),
            (Tier.STORE, found.store[span.fqn, source], 4),
        ]
        for tier, mask, element_bytes in tiers:
            taken = left & mask[span.first : span.last]
            yield tier, taken, element_bytes
            left &= ~taken
        yield None, left, 4


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
    end = transfer.offset + transfer.num_bytes
    shard = content[transfer.offset - transfer.before_bytes : end + transfer.after_bytes]
    assert transfer.checksum == checksum(shard), "what a transfer lies in is a whole shard, and can be verified"
    return np.frombuffer(content[transfer.offset : end], dtype="<f4")


def _carry_out(world: World, plan: RecoveryPlan) -> dict[int, Arrays]:
    """Every rank's memory afterwards; NaN where nothing was brought. Nothing is written twice."""
    truth, found = layouts.arrays(world.model, plan.step), reach(world, plan.step)
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
        if transfer.tier is not Tier.OWN:
            assert transfer.num_bytes == key.numel * 4
            place[:] = _bytes_of(world, transfer, plan.step)
        elif (key.kind, transfer.source_kind) == (Kind.WEIGHT, Kind.MASTER):
            place[:] = mine[key.fqn, Kind.MASTER][key.first : key.last]
        else:
            assert transfer.source_kind is key.kind
            live = found.live[world.wanted.ranks[transfer.rank].device]
            assert live[key.fqn, key.kind][key.first : key.last].all()
            place[:] = truth[key.fqn, key.kind][key.first : key.last]
    return memory


def nearest(world: World, step: int, transfers: Iterable[Transfer]) -> dict[Tier, int] | None:
    """Bytes by tier, where what these transfers bring would come from the nearest source but own memory; None where it
    would not come at all."""
    found, num_bytes = reach(world, step), Counter({tier: 0 for tier in (Tier.NODE, Tier.PEER, Tier.STORE)})
    for transfer in transfers:
        key = transfer.source_key
        node = world.wanted.ranks[transfer.rank].device.node
        left = np.ones(key.numel, dtype=bool)
        near = found.near.get(node, _masks(world.model))
        for tier, masks in ((Tier.NODE, near), (Tier.PEER, found.peers), (Tier.STORE, found.store)):
            taken = left & masks[key.fqn, key.kind][key.first : key.last]
            num_bytes[tier] += int(taken.sum()) * 4
            left &= ~taken
        if left.any():
            return None
    return dict(num_bytes)


def check_state(world: World, plan: RecoveryPlan, held: World | None = None) -> None:
    """Every rank gets what it needs, all of it, nothing else, with the right values. `held` is the world that the bytes
    are taken of, where it is another one."""
    truth, memory = layouts.arrays(world.model, plan.step), _carry_out(held or world, plan)
    for state in world.wanted.ranks:
        needed = _masks(world.model)
        for key in (*layouts.owned_keys(state), *(span.key(Kind.WEIGHT) for span in state.keeps)):
            needed[key.fqn, key.kind][key.first : key.last] = True
        for address, mask in needed.items():
            np.testing.assert_array_equal(memory[state.rank][address][mask], truth[address][mask])
            assert np.isnan(memory[state.rank][address][~mask]).all(), "more was brought than is needed"


def check_zones(world: World, plan: RecoveryPlan) -> None:
    """What another node sends crosses zones only where nobody in the reader's zone has it: element by element."""
    found = reach(world, plan.step)
    for transfer in plan.transfers:
        if transfer.tier is Tier.PEER:
            key = transfer.source_key
            here = world.wanted.ranks[transfer.rank].device.node
            is_near = _alike(world, str(transfer.node), here)
            for node, masks in found.near.items():
                has = masks[key.fqn, key.kind][key.first : key.last]
                assert is_near or not (_alike(world, node, here) and has.any()), (transfer, node, world.zones)


def _alike(world: World, one: str, other: str) -> bool:
    """Nodes of one zone; those of which no zone is known are in one, too."""
    return world.zones.get(one, "unknown") == world.zones.get(other, "unknown")


def check_load(world: World, plan: RecoveryPlan) -> None:
    """No transfer could be sent by another node as near that even then would have less to send than this one has. And
    no node sends much more than it must, if parts could be cut at any element: of each set of nodes, what only these
    have as near, divided by their number."""
    load: Counter[str] = Counter()
    only: Counter[frozenset[str]] = Counter()
    found = reach(world, plan.step)
    sent = [transfer for transfer in plan.transfers if transfer.tier is Tier.PEER]
    for transfer in sent:
        load[str(transfer.node)] += transfer.num_bytes
    for transfer in sent:
        holders = _holders(world, found, transfer)
        only.update(holders)
        for other in frozenset.intersection(*holders) - {transfer.node}:
            assert load[other] + transfer.num_bytes >= load[str(transfer.node)], (transfer, load)
    nodes = sorted({node for holders in only for node in holders})
    sets = [frozenset(some) for size in range(1, len(nodes) + 1) for some in itertools.combinations(nodes, size)]
    least = max((sum(n for holders, n in only.items() if holders <= some) / len(some) for some in sets), default=0.0)
    largest = max((transfer.num_bytes for transfer in sent), default=0)
    assert max(load.values(), default=0) <= 1.2 * least + largest, (load, least, largest)


def _holders(world: World, found: Reach, transfer: Transfer) -> dict[frozenset[str], int]:
    """How many of the bytes each set of nodes has, where those in the reader's zone count alone if there are any."""
    here = world.wanted.ranks[transfer.rank].device.node
    key = transfer.key
    has: defaultdict[bytes, int] = defaultdict(int)
    names = sorted(found.near)
    rows = np.array([found.near[node][key.fqn, transfer.source_kind][key.first : key.last] for node in names])
    for column in rows.T:
        has[column.tobytes()] += 4
    sets: Counter[frozenset[str]] = Counter()
    for column, num_bytes in has.items():
        some = [name for name, held in zip(names, np.frombuffer(column, dtype=bool), strict=True) if held]
        sets[frozenset(name for name in some if _alike(world, name, here)) or frozenset(some)] += num_bytes
    return sets
