"""Layouts, snapshots and transfers as compact rows of plain JSON values, both ways.

A big model has thousands of them and a recovery waits for them to be read, so they are neither objects with names nor
checked field by field. What a row is part of stands in `messages.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal_recovery.state import Kind, Piece, ShardKey, Snapshot, Span, StoredPiece, Tier, Transfer

Row = list[Any]


def key_rows(keys: Iterable[ShardKey]) -> list[Row]:
    return [[key.fqn, key.kind.value, key.first, key.last] for key in keys]


def keys_from_rows(rows: Iterable[Row]) -> tuple[ShardKey, ...]:
    return tuple(ShardKey(fqn=fqn, kind=Kind(kind), first=first, last=last) for fqn, kind, first, last in rows)


def span_rows(spans: Iterable[Span]) -> list[Row]:
    return [[span.fqn, span.first, span.last] for span in spans]


def spans_from_rows(rows: Iterable[Row]) -> tuple[Span, ...]:
    return tuple(Span(fqn=fqn, first=first, last=last) for fqn, first, last in rows)


def piece_rows(pieces: Iterable[Piece]) -> list[Row]:
    return [
        [
            piece.key.fqn,
            piece.key.kind.value,
            piece.key.first,
            piece.key.last,
            piece.offset,
            piece.num_bytes,
            piece.checksum,
        ]
        for piece in pieces
    ]


def pieces_from_rows(rows: Iterable[Row]) -> tuple[Piece, ...]:
    return tuple(
        Piece(
            key=ShardKey(fqn=fqn, kind=Kind(kind), first=first, last=last),
            offset=offset,
            num_bytes=num_bytes,
            checksum=checksum,
        )
        for fqn, kind, first, last, offset, num_bytes, checksum in rows
    )


def stored_rows(pieces: Iterable[StoredPiece]) -> list[Row]:
    return [
        [p.key.fqn, p.key.kind.value, p.key.first, p.key.last, p.object, p.offset, p.num_bytes, p.checksum]
        for p in pieces
    ]


def stored_from_rows(rows: Iterable[Row]) -> tuple[StoredPiece, ...]:
    return tuple(
        StoredPiece(
            key=ShardKey(fqn=fqn, kind=Kind(kind), first=first, last=last),
            object=name,
            offset=offset,
            num_bytes=num_bytes,
            checksum=checksum,
        )
        for fqn, kind, first, last, name, offset, num_bytes, checksum in rows
    )


def snapshot_rows(snapshots: Iterable[Snapshot]) -> list[Row]:
    return [[snapshot.node, snapshot.name, snapshot.step, piece_rows(snapshot.pieces)] for snapshot in snapshots]


def snapshots_from_rows(rows: Iterable[Row]) -> tuple[Snapshot, ...]:
    return tuple(
        Snapshot(node=node, name=name, step=step, pieces=pieces_from_rows(pieces)) for node, name, step, pieces in rows
    )


def transfer_rows(transfers: Iterable[Transfer]) -> list[Row]:
    """All but the rank, which is the receiver of the message."""
    return [
        [
            *(t.key.fqn, t.key.kind.value, t.key.first, t.key.last, t.source_kind.value),
            *(t.tier.value, t.num_bytes, t.node, t.name, t.offset, t.checksum, t.before_bytes, t.after_bytes),
        ]
        for t in transfers
    ]


def transfers_from_rows(rank: int, rows: Iterable[Row]) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            rank=rank,
            key=ShardKey(fqn=fqn, kind=Kind(kind), first=first, last=last),
            source_kind=Kind(source),
            tier=Tier(tier),
            num_bytes=num_bytes,
            node=node,
            name=name,
            offset=offset,
            checksum=checksum,
            before_bytes=before,
            after_bytes=after,
        )
        for fqn, kind, first, last, source, tier, num_bytes, node, name, offset, checksum, before, after in rows
    )
