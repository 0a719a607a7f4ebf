"""Sources that did not give what they were said to hold: which these are, what is left without them, and how the record
of a recovery tells of it. Pure; nothing in here moves a byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shoal_recovery.intervals import intersect
from shoal_recovery.journal import SourceFailed
from shoal_recovery.state import ELEMENT_BYTES, Inventory, Manifest, Piece, ShardKey, StoredPiece, Tier, Transfer

_MOST_TOLD = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The agent of `node` (None: the store) did not give elements `key` of `step`, which were to lie in `name`, or not
    as they were sealed. `silent`: it did not answer at all, so nothing else can be had there either."""

    node: str | None
    name: str
    step: int
    key: ShardKey
    problem: str
    silent: bool = False

    def spoils(self, name: str, key: ShardKey) -> bool:
        return self.name == name and self.concerns(key)

    def concerns(self, key: ShardKey) -> bool:
        mine, other = (self.key.first, self.key.last), (key.first, key.last)
        return (self.key.fqn, self.key.kind) == (key.fqn, key.kind) and intersect(mine, other) is not None


def fault_of(transfer: Transfer, step: int, problem: str, *, silent: bool = False) -> Fault:
    assert transfer.tier is not Tier.OWN and transfer.name is not None, transfer
    key = transfer.source_key
    return Fault(node=transfer.node, name=transfer.name, step=step, key=key, problem=problem, silent=silent)


def without(
    faults: Sequence[Fault], inventory: Inventory, manifests: tuple[Manifest, ...]
) -> tuple[Inventory, tuple[Manifest, ...]]:
    """What is left if nothing of that is used. Where a part of a shard is spoilt, all of it is left out: what is wrong
    with the rest is not known."""
    by_place: defaultdict[tuple[str | None, int], list[Fault]] = defaultdict(list)
    for fault in faults:
        by_place[fault.node, fault.step].append(fault)
    silent = {fault.node for fault in faults if fault.silent and fault.node is not None}
    snapshots = tuple(
        replace(snapshot, pieces=tuple(piece for piece in snapshot.pieces if not _spoilt(piece, snapshot.name, bad)))
        if (bad := by_place.get((snapshot.node, snapshot.step)))
        else snapshot
        for snapshot in inventory.snapshots
        if snapshot.node not in silent
    )
    left = tuple(
        replace(manifest, pieces=tuple(piece for piece in manifest.pieces if not _spoilt(piece, piece.object, bad)))
        if (bad := by_place.get((None, manifest.step)))
        else manifest
        for manifest in manifests
    )
    return replace(inventory, snapshots=snapshots), left


def _spoilt(piece: Piece | StoredPiece, name: str, faults: Iterable[Fault]) -> bool:
    return any(fault.spoils(name, piece.key) for fault in faults)


def disputed(inventory: Inventory, manifests: Iterable[Manifest]) -> tuple[Fault, ...]:
    """Shards of which two sources state different checksums, though they must be the same bytes: at least one of them
    is wrong. Those that most agree on are believed; where as many say this as that, nobody is. Mirrors are no copies of
    the same bytes, and have no say."""
    said: defaultdict[tuple[int, ShardKey], list[tuple[str | None, str, str]]] = defaultdict(list)
    for snapshot in inventory.snapshots:
        for piece in () if snapshot.mirror else snapshot.pieces:
            said[snapshot.step, piece.key].append((snapshot.node, snapshot.name, piece.checksum))
    for manifest in manifests:
        for stored in manifest.pieces:
            said[manifest.step, stored.key].append((None, stored.object, stored.checksum))
    return tuple(
        Fault(node=node, name=name, step=step, key=key, problem="its checksum is not the one that others have")
        for (step, key), sources in said.items()
        if len({checksum for _, _, checksum in sources}) > 1
        for node, name, checksum in sources
        if checksum != _believed([checksum for _, _, checksum in sources])
    )


def _believed(checksums: Iterable[str]) -> str | None:
    counts = Counter(checksums).most_common(2)
    return counts[0][0] if counts[0][1] > counts[1][1] else None


def told(faults: Iterable[Fault], step: int, transfers: Sequence[Transfer]) -> tuple[SourceFailed, ...]:
    """One entry per source and object, for the record of a recovery that went on from `step` by these transfers, in
    which none of the faults is left."""
    grouped: defaultdict[tuple[str | None, str, int], dict[ShardKey, Fault]] = defaultdict(dict)
    for fault in faults:
        grouped[fault.node, fault.name, fault.step].setdefault(fault.key, fault)
    found = []
    for (node, name, of_step), by_key in grouped.items():
        instead = {_instead(fault, step, transfers) for fault in by_key.values()}
        found.append(
            SourceFailed(
                source=_source(node),
                object=name,
                step=of_step,
                num_bytes=sum(key.numel * ELEMENT_BYTES for key in by_key),
                problem=next(iter(by_key.values())).problem,
                instead=tuple(sorted(set().union(*instead))) or ("nothing: it was not needed",),
            )
        )
    return tuple(found[:_MOST_TOLD])


def _instead(fault: Fault, step: int, transfers: Iterable[Transfer]) -> frozenset[str]:
    if fault.step != step:
        return frozenset({f"step {step}"} if fault.step > step else ())
    return frozenset(
        _source(transfer.node)
        for transfer in transfers
        if transfer.tier is not Tier.OWN and fault.concerns(transfer.source_key)
    )


def _source(node: str | None) -> str:
    return "object store" if node is None else f"agent of {node}"
