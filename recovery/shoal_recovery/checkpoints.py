"""Whole states in an object store: which objects there are, when a step counts as stored, what is kept.

    JOB/shards/STEP/EPOCH-SHARD     one rank's shards, as a safetensors file (SHARD is any name)
    JOB/manifests/STEP.json         written last, once: it exists, so the step is complete

Numbers are padded with zeros, so that names sort by step. An epoch never touches the objects of another one: a writer
that comes late cannot spoil what its successors stored. Only one process per job may retire and clean up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_recovery.claims import MARK
from shoal_recovery.crc import checksum
from shoal_recovery.errors import ManifestUnreadable, StoredPieceCorrupt, StoreError, StoreUnreachable
from shoal_recovery.manifest import VERSION, manifest_from_json, manifest_to_json, model_from_json
from shoal_recovery.state import OWNED_KINDS, Manifest, Piece, StoredPiece, Transfer
from shoal_recovery.store import Data, Reader, Store

_STEP_DIGITS = 9


def shard_name(job: str, step: int, epoch: int, shard: str) -> str:
    return f"{_shards(job, step)}{epoch:06d}-{shard}"


def manifest_name(job: str, step: int) -> str:
    return f"{job}/manifests/{step:0{_STEP_DIGITS}d}.json"


def shard_header(pieces: Iterable[Piece]) -> bytes:
    """What stands before the bytes of these pieces in an object, so that it is a safetensors file: its tensors are the
    pieces, flat, and their names say which part of what they are."""
    tensors = {
        f"{piece.key.fqn}/{piece.key.kind.value}/{piece.key.first}-{piece.key.last}": {
            "dtype": "F32",
            "shape": [piece.key.numel],
            "data_offsets": [piece.offset, piece.offset + piece.num_bytes],
        }
        for piece in pieces
    }
    text = json.dumps(tensors, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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


def take_back(store: Store, job: str, step: int, epoch: int) -> None:
    """Deletes the manifest of this step if it is this epoch's. Whoever may have the job by now has other epochs, and
    what is theirs stays. Raises StoreError."""
    name = manifest_name(job, step)
    for entry in store.entries(name):
        if entry.name == name and load_manifest(store, job, step).epoch == epoch:
            store.delete_listed(entry)


def remove_unreadable(store: Store, job: str, step: int) -> None:
    """Deletes the manifest of this step if it cannot be read: it is of no use, and in the way of one that is. Raises
    StoreError."""
    name = manifest_name(job, step)
    for entry in store.entries(name):
        if entry.name == name:
            try:
                load_manifest(store, job, step)
            except ManifestUnreadable:
                store.delete_listed(entry)


def list_manifests(store: Store, job: str) -> tuple[int, ...]:
    """The stored steps, newest first. Raises StoreError."""
    prefix = f"{job}/manifests/"
    stems = (name.removeprefix(prefix).removesuffix(".json") for name in store.list(prefix))
    return tuple(sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True))


def load_manifest(store: Store, job: str, step: int) -> Manifest:
    """Raises StoreError; ManifestUnreadable where it cannot be read, whoever waits, or is another one's."""
    name = manifest_name(job, step)
    try:
        manifest = manifest_from_json(store.read(name))
    except InvalidField as error:
        told = error.value if error.field == "version" else None
        if isinstance(told, int) and told > VERSION:  # that of a newer Shoal, which can read it
            raise StoreError(store.uri, f"{name} is of another version: {error}") from error
        raise ManifestUnreadable(store.uri, f"{name} is not a manifest: {error}") from error
    if (manifest.job, manifest.step) != (job, step):
        raise ManifestUnreadable(store.uri, f"{name} is the manifest of step {manifest.step} of {manifest.job}")
    return manifest


def load_model(store: Store, job: str, step: int) -> ModelSpec:
    """What the manifest says of the model. Raises StoreError, also where it says nothing."""
    name = manifest_name(job, step)
    try:
        model = model_from_json(store.read(name))
    except InvalidField as error:
        raise StoreError(store.uri, f"{name} is not a manifest: {error}") from error
    if model is None:
        raise StoreError(store.uri, f"{name} was written by a version that did not describe the model")
    return model


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


def remove_orphans(store: Store, job: str, *, over: bool = False) -> tuple[str, ...]:
    """Deletes objects that no manifest names and none will, and answers which; unfinished puts of such, and claims of
    old steps, too. Those of steps newer than the newest manifest may be on their way, and are left alone until the job
    is over; those of a step whose manifest cannot be read, as long as that is there."""
    steps = list_manifests(store, job)
    if not steps and not over:
        return ()
    named, known, not_known = set[str](), list[int](), list[str]()
    for step in steps:
        try:
            named |= {piece.object for piece in load_manifest(store, job, step).pieces}
            known.append(step)
        except ManifestUnreadable:
            not_known.append(_shards(job, step))
    if not known and not over:
        return ()
    newest = _shards(job, known[0]) if known else ""
    prefix = f"{job}/shards/"

    def left(names: tuple[str, ...]) -> tuple[str, ...]:
        # Names sort by step.
        unnamed = (name for name in names if name not in named and not name.startswith(tuple(not_known)))
        return tuple(name for name in unnamed if over or name[: len(newest)] <= newest)

    orphans = left(store.list(prefix))
    for name in orphans:
        store.delete(name)
    for name in left(store.unfinished(prefix)):
        store.abandon(name)
    for name in store.list(f"{job}/manifests/"):
        if MARK in name and (over or name < manifest_name(job, known[0])):
            store.delete(name)
    return orphans


def side_by_side(transfers: Iterable[Transfer], most_bytes: int) -> Iterator[tuple[Transfer, ...]]:
    """Transfers of tier store in runs of about so many bytes, whose pieces lie in one object without a gap."""
    run: list[Transfer] = []
    end = total = 0
    for transfer in sorted(transfers, key=lambda one: (one.name or "", one.offset)):
        first = transfer.offset - transfer.before_bytes
        goes_on = run and (transfer.name, first) == (run[0].name, end) and total + transfer.shard_bytes <= most_bytes
        if run and not goes_on:
            yield tuple(run)
            run, total = [], 0
        run.append(transfer)
        end, total = first + transfer.shard_bytes, total + transfer.shard_bytes
    if run:
        yield tuple(run)


def read_transfers(
    store: Reader, run: Sequence[tuple[Transfer, memoryview]]
) -> Iterator[tuple[Transfer, StoreError | None]]:
    """Fills the place of each transfer of tier store, whose pieces lie side by side in one object, with one read, and
    says whether it is what was stored: so whole pieces leave the store, and no other byte. What is wrong with one does
    not concern the others. Raises StoreUnreachable."""
    parts = [_around(transfer, place) for transfer, place in run]
    first = run[0][0].offset - run[0][0].before_bytes
    together = len(run) > 1 and not _problem(store, run[0][0], first, [part for piece in parts for part in piece])
    for (transfer, _), piece in zip(run, parts, strict=True):
        problem = None
        if not together:  # cut short, say: some of the pieces may still be there
            problem = _problem(store, transfer, transfer.offset - transfer.before_bytes, piece)
        yield transfer, problem or _spoilt(store, transfer, checksum(*piece))


def _around(transfer: Transfer, place: memoryview) -> tuple[memoryview, ...]:
    """The whole piece that `transfer` is in, its own part of it in `place`."""
    before, after = bytearray(transfer.before_bytes), bytearray(transfer.after_bytes)
    return (memoryview(before), place, memoryview(after))


def _problem(store: Reader, transfer: Transfer, offset: int, places: Sequence[memoryview]) -> StoreError | None:
    try:
        store.read_into(str(transfer.name), offset, places)
    except StoreUnreachable:
        raise
    except StoreError as error:
        return error
    return None


def _spoilt(store: Reader, transfer: Transfer, found: str) -> StoredPieceCorrupt | None:
    if found == transfer.checksum:
        return None
    key = transfer.source_key
    shard = f"{key.fqn} {key.kind} [{key.first}, {key.last})"
    stored = f"but that was stored with {transfer.checksum}"
    return StoredPieceCorrupt(store.uri, f"{shard} in {transfer.name} is in a piece with checksum {found}, {stored}")


def _shards(job: str, step: int) -> str:
    return f"{job}/shards/{step:0{_STEP_DIGITS}d}/"
