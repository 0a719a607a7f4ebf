"""What a rank asks of its agent before it steps: slots for the state that it vouches for, with who is sent copies of
which part, and slots for what it mirrors. Pure.

Owns how the parts of a snapshot are named on the way: an order of the supervisor speaks of spans, an agent of the rows
of a layout and of bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shoal_planner.job import JobSpec
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, RankState, ShardKey, Span, common
from shoal_workers import messages as m
from shoal_workers.rows import Row, key_rows, spans_from_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """`keys` are the layout of `opened`."""

    opened: m.OpenSlots
    keys: tuple[ShardKey, ...]


def slots_of(order: m.Assign, state: RankState, job: JobSpec, left: Sequence[str] = ()) -> tuple[Slots, ...]:
    """Mirrors first: nothing of them is sent, so they are sealed soonest. `left` are snapshots that the process has
    written and never writes again."""
    mirrors = spans_from_rows(order.mirrors)
    parts = [None if len(row) == 3 else spans_from_rows(row[3]) for row in order.backups]
    vouched = _cut(state.vouches, [spans for spans in parts if spans is not None])
    keys = _keys(vouched)
    backups = [_addressed(row, spans, keys) for row, spans in zip(order.backups, parts, strict=True)]

    def slots(keys: tuple[ShardKey, ...], backups: list[Row], *, mirror: bool) -> Slots:
        return Slots(opened=_opened(order, job, keys, backups, left, mirror=mirror), keys=keys)

    own = slots(keys, backups, mirror=False)
    return (slots(_keys(mirrors), [], mirror=True), own) if mirrors else (own,)


def _opened(
    order: m.Assign, job: JobSpec, keys: tuple[ShardKey, ...], backups: list[Row], left: Iterable[str], *, mirror: bool
) -> m.OpenSlots:
    return m.OpenSlots(
        job=order.job,
        epoch=order.epoch,
        rank=order.rank,
        layout=key_rows(keys),
        backups=backups,
        upload_uri=None if mirror else job.checkpoint.uri,
        upload_every=job.checkpoint.every_steps,
        last_step=job.train.steps,
        left=list(left),
        mirror=mirror,
    )


def _keys(spans: Iterable[Span]) -> tuple[ShardKey, ...]:
    spans = tuple(spans)
    return tuple(span.key(kind) for kind in OWNED_KINDS for span in spans)


def _cut(spans: Iterable[Span], parts: Iterable[tuple[Span, ...]]) -> tuple[Span, ...]:
    """At the borders of these parts: each is then made of whole shards, which have sums of their own."""
    borders: defaultdict[str, set[int]] = defaultdict(set)
    for span in (span for part in parts for span in part):
        borders[span.fqn] |= {span.first, span.last}
    return tuple(
        Span(fqn=span.fqn, first=first, last=last)
        for span in spans
        for first, last in pairwise(
            sorted({span.first, span.last, *(at for at in borders[span.fqn] if span.first < at < span.last)})
        )
    )


def _addressed(row: Row, spans: tuple[Span, ...] | None, keys: Sequence[ShardKey]) -> Row:
    if spans is None:
        return row
    wanted = [bool(common((Span(fqn=key.fqn, first=key.first, last=key.last),), spans)) for key in keys]
    return [*row[:3], [list(run) for run in _runs(wanted)]]


def _runs(wanted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Half-open intervals of the places that are true."""
    edges = [at for at in range(len(wanted) + 1) if (at > 0 and wanted[at - 1]) != (at < len(wanted) and wanted[at])]
    return zip(edges[::2], edges[1::2], strict=True)


# --- on the agent's side ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What one backup gets of each snapshot: `name` says which part of which it is, `rows` are those of the layout, and
    `ranges` where their bytes lie in the slot (None: they are all of it)."""

    address: tuple[str, int]
    name: str
    layout: list[Row]
    rows: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[int, int], ...] | None

    def checksums(self, of_all: list[str]) -> list[str]:
        return [checksum for first, last in self.rows for checksum in of_all[first:last]]

    def bytes_of(self, slot: memoryview) -> list[memoryview]:
        return [slot] if self.ranges is None else [slot[first:last] for first, last in self.ranges]


def sendings(opened: m.OpenSlots, name: str) -> tuple[Sending, ...]:
    """A part of a snapshot has a name of its own: what has one name is the same bytes everywhere."""
    offsets = list(accumulate(((last - first) * ELEMENT_BYTES for _, _, first, last in opened.layout), initial=0))
    found = []
    for number, (_, host, port, *some) in enumerate(opened.backups):
        rows = tuple((first, last) for first, last in some[0]) if some else ((0, len(opened.layout)),)
        part = rows != ((0, len(opened.layout)),)
        found.append(
            Sending(
                address=(host, port),
                name=f"{name}-part{number}" if part else name,
                layout=[row for first, last in rows for row in opened.layout[first:last]],
                rows=rows,
                ranges=tuple((offsets[first], offsets[last]) for first, last in rows) if part else None,
            )
        )
    return tuple(found)
