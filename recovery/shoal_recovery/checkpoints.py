"""Whole states in an object store: which objects there are, when a step counts as stored, what is kept.

    JOB/shards/STEP/EPOCH-SHARD     the bytes of one rank's shards (SHARD is any name)
    JOB/manifests/STEP.json         written last, once: it exists, so the step is complete

Numbers are padded with zeros, so that names sort by step. An epoch never touches the objects of another one: a writer
that comes late cannot spoil what its successors stored. Only one process per job may retire and clean up.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_recovery.errors import StoredPieceCorrupt, StoreError
from shoal_recovery.manifest import manifest_from_json, manifest_to_json
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, Manifest, Piece, StoredPiece, Tier, Transfer
from shoal_recovery.store import Data, Store

_STEP_DIGITS = 12


def checksum(data: Data) -> str:
    return f"crc32:{zlib.crc32(data):08x}"


def shard_name(job: str, step: int, epoch: int, shard: str) -> str:
    return f"{_shards(job, step)}{epoch:06d}-{shard}"


def manifest_name(job: str, step: int) -> str:
    return f"{job}/manifests/{step:0{_STEP_DIGITS}d}.json"


def put_shard(
    store: Store, *, job: str, step: int, epoch: int, shard: str, data: Data, pieces: Iterable[Piece]
) -> tuple[StoredPiece, ...]:
    """Stores `data` as one object and says what of a manifest lies in it. `pieces` are those of a snapshot of `step`,
    with offsets within `data`; weights are left out, they follow from master. Raises StoreError."""
    name = shard_name(job, step, epoch, shard)
    store.put(name, data)
    return tuple(
        StoredPiece(key=piece.key, object=name, offset=piece.offset, num_bytes=piece.num_bytes, checksum=piece.checksum)
        for piece in pieces
        if piece.key.kind in OWNED_KINDS
    )


def commit(store: Store, manifest: Manifest, model: ModelSpec) -> str:
    """Makes the step count: from now on it can be restored. The name of the manifest.

    Raises InvalidField if the manifest is not a whole step of `model`, StoreError if one of its objects is not in the
    store, StoreConflict if another manifest of this step is.
    """
    text = manifest_to_json(manifest, model)
    prefix = _shards(manifest.job, manifest.step)
    objects = {piece.object for piece in manifest.pieces}
    for name in sorted(objects):
        if not name.startswith(prefix):
            raise InvalidField("object", name, f"must begin with {prefix}, as objects of this step do")
    missing = objects.difference(store.list(prefix))
    if missing:
        raise StoreError(store.uri, f"step {manifest.step} is not whole: {min(missing)} is not there")
    name = manifest_name(manifest.job, manifest.step)
    store.put_new(name, text.encode("ascii"))
    return name


def list_manifests(store: Store, job: str) -> tuple[int, ...]:
    """The stored steps, newest first. Raises StoreError."""
    prefix = f"{job}/manifests/"
    stems = (name.removeprefix(prefix).removesuffix(".json") for name in store.list(prefix))
    return tuple(sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True))


def load_manifest(store: Store, job: str, step: int) -> Manifest:
    """Raises StoreError, also for a manifest that cannot be read or is another one's."""
    name = manifest_name(job, step)
    try:
        manifest = manifest_from_json(store.read(name))
    except InvalidField as error:
        raise StoreError(store.uri, f"{name} is not a manifest: {error}") from error
    if (manifest.job, manifest.step) != (job, step):
        raise StoreError(store.uri, f"{name} is the manifest of step {manifest.step} of {manifest.job}")
    return manifest


def retire(store: Store, job: str, keep: int) -> tuple[int, ...]:
    """Deletes all but the newest `keep` stored steps; which ones. A manifest goes before its objects, so what is listed
    is whole at any moment; what a crash in between leaves, `remove_orphans` finds."""
    if keep < 1:
        raise InvalidField("keep", keep, "must be at least 1")
    retired = list_manifests(store, job)[keep:]
    for step in reversed(retired):
        store.delete(manifest_name(job, step))
        for name in store.list(_shards(job, step)):
            store.delete(name)
    return retired


def remove_orphans(store: Store, job: str) -> tuple[str, ...]:
    """Deletes objects that no manifest names and none will; which ones. Those of steps newer than the newest manifest
    are left alone: they may belong to an upload under way."""
    steps = list_manifests(store, job)
    if not steps:
        return ()
    named = {piece.object for step in steps for piece in load_manifest(store, job, step).pieces}
    newest = _shards(job, steps[0])
    prefix = f"{job}/shards/"
    orphans = tuple(
        name
        for name in store.list(prefix)
        if name not in named and name[: len(newest)] <= newest  # names sort by step
    )
    for name in orphans:
        store.delete(name)
    return orphans


def read_piece(store: Store, piece: StoredPiece, first: int, last: int) -> bytes:
    """Elements [first, last) of the piece, which must lie in it; no other byte leaves the store. The checksum is
    verified when that is the whole piece. Raises StoreError, StoredPieceCorrupt."""
    key = piece.key
    if not key.first <= first < last <= key.last:
        raise InvalidField("interval", (first, last), f"must lie in [{key.first}, {key.last}), not be empty")
    data = store.read(piece.object, piece.offset + (first - key.first) * ELEMENT_BYTES, (last - first) * ELEMENT_BYTES)
    if (first, last) == (key.first, key.last) and checksum(data) != piece.checksum:
        raise StoredPieceCorrupt(
            store.uri,
            f"{key.fqn} {key.kind} [{first}, {last}) in {piece.object} has checksum {checksum(data)}, "
            f"and not {piece.checksum} as its manifest says",
        )
    return data


class PieceReader:
    """Reads the pieces of one manifest and counts what it takes from the store. Any thread may call."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._pieces: defaultdict[str, list[StoredPiece]] = defaultdict(list)
        for piece in sorted(manifest.pieces, key=lambda piece: piece.offset):
            self._pieces[piece.object].append(piece)
        self._lock = threading.Lock()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What this reader has taken from the store so far."""
        return self._num_bytes

    def read_piece(self, piece: StoredPiece, first: int, last: int) -> bytes:
        data = read_piece(self._store, piece, first, last)
        with self._lock:
            self._num_bytes += len(data)
        return data

    def read_transfer(self, transfer: Transfer) -> bytes:
        """The bytes of a transfer of tier store. Raises what `read_piece` raises, and InvalidField if the manifest does
        not have them."""
        assert transfer.tier is Tier.STORE, transfer
        pieces = self._pieces.get(transfer.name or "", [])
        index = bisect_right(pieces, transfer.offset, key=lambda piece: piece.offset) - 1
        if index < 0 or (pieces[index].key.fqn, pieces[index].key.kind) != (transfer.key.fqn, transfer.source_kind):
            raise InvalidField("transfer", transfer, "is not of the manifest that is being read")
        return self.read_piece(pieces[index], transfer.key.first, transfer.key.last)


def _shards(job: str, step: int) -> str:
    return f"{job}/shards/{step:0{_STEP_DIGITS}d}/"
