"""Who can supply which elements of one step: an index over what survivors hold and the store has.

Owns the lookup (sorted borders and bisection, so that thousands of shards cost no more than sorting them). Which of
several suppliers is taken is decided in `restore`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal_planner.cluster import DeviceRef
from shoal_recovery.intervals import Interval, merge
from shoal_recovery.state import OWNED_KINDS, Inventory, Kind, Manifest, Piece, StoredPiece

Address = tuple[str, Kind]  # parameter name and kind


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Source:
    """Elements [first, last) that lie at `offset` of `name`, with the agent of `node` or (None) in the store."""

    node: str | None
    name: str
    first: int
    last: int
    offset: int
    checksum: str


Segment = tuple[int, int, tuple[Source, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Neighbouring segments without gaps between them, each with every source that has all of it (perhaps none)."""

    segments: tuple[Segment, ...] = ()

    def cut(self, first: int, last: int) -> Iterator[Segment]:
        """[first, last) in pieces, each with its sources; in order."""
        reached = first
        start = max(0, bisect_right(self.segments, first, key=lambda segment: segment[0]) - 1)
        for index in range(start, len(self.segments)):
            begin, end, sources = self.segments[index]
            if begin >= last:
                break
            if end <= reached:
                continue
            if reached < begin:
                yield reached, begin, ()
                reached = begin
            yield reached, min(end, last), sources
            reached = min(end, last)
        if reached < last:
            yield reached, last, ()


NOTHING = Coverage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """All sources of one step. `live` intervals are usable only by a rank on that same device."""

    live: Mapping[DeviceRef, Mapping[Address, tuple[Interval, ...]]]
    agents: Mapping[Address, Coverage]
    store: Mapping[Address, Coverage]

    def live_intervals(self, device: DeviceRef, address: Address) -> tuple[Interval, ...]:
        return self.live.get(device, {}).get(address, ())


def holdings(step: int, inventory: Inventory, manifests: Iterable[Manifest]) -> Holdings:
    """Weights in snapshots and objects are left out: a weight is restored from live memory or from its master."""
    agents: defaultdict[Address, list[Source]] = defaultdict(list)
    for snapshot in inventory.snapshots:
        if snapshot.step == step:
            for piece in snapshot.pieces:
                _add(agents, piece, snapshot.node, snapshot.name)
    store: defaultdict[Address, list[Source]] = defaultdict(list)
    for manifest in manifests:
        if manifest.step == step:
            for stored in manifest.pieces:
                _add(store, stored, None, stored.object)
    return Holdings(
        live=_live(step, inventory),
        agents={address: coverage(sources) for address, sources in agents.items()},
        store={address: coverage(sources) for address, sources in store.items()},
    )


def _add(found: defaultdict[Address, list[Source]], piece: Piece | StoredPiece, node: str | None, name: str) -> None:
    key = piece.key
    if key.kind in OWNED_KINDS:
        found[key.fqn, key.kind].append(
            Source(
                node=node,
                name=name,
                first=key.first,
                last=key.last,
                offset=piece.offset,
                checksum=piece.checksum,
            )
        )


def _live(step: int, inventory: Inventory) -> dict[DeviceRef, dict[Address, tuple[Interval, ...]]]:
    found: defaultdict[DeviceRef, defaultdict[Address, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for live in inventory.live:
        if live.step == step:
            for key in live.keys:
                found[live.device][key.fqn, key.kind].append((key.first, key.last))
    return {
        device: {address: merge(intervals) for address, intervals in by_address.items()}
        for device, by_address in found.items()
    }


def coverage(sources: Sequence[Source]) -> Coverage:
    """Sweeps over the borders; costs the number of segments times the number of copies that overlap there."""
    pending = sorted(sources, key=lambda source: source.first, reverse=True)
    borders = sorted({border for source in sources for border in (source.first, source.last)})
    segments: list[Segment] = []
    present: list[Source] = []
    for begin, end in itertools.pairwise(borders):
        present = [source for source in present if source.last > begin]
        while pending and pending[-1].first == begin:
            present.append(pending.pop())
        segments.append((begin, end, tuple(present)))
    return Coverage(segments=tuple(segments))
