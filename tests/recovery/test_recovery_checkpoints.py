"""Stored steps: whole or not there, never overwritten, retired in the right order, read byte by byte as needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.checkpoints import (
    checksum,
    commit,
    list_manifests,
    load_manifest,
    manifest_name,
    put_shard,
    read_transfers,
    remove_orphans,
    remove_unreadable,
    retire,
    shard_name,
)
from shoal_recovery.errors import ManifestUnreadable, StoreConflict, StoredPieceCorrupt, StoreError
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import (
    ELEMENT_BYTES,
    OWNED_KINDS,
    Inventory,
    Kind,
    Manifest,
    Piece,
    ShardMap,
    StoredPiece,
    Tier,
    Transfer,
)
from shoal_recovery.store import Data, Reader, Store, open_store
from shoal_recovery.store_directory import DirectoryStore

MODEL = ModelSpec(layers=4, hidden=16, heads=4, ffn=12, vocab=20)
JOB = "job_1"


def _sharding(*nodes: str) -> ShardMap:
    """One pipeline of equal stages, one per node."""
    layers = MODEL.layers // len(nodes)
    stages = tuple(
        Stage(layers=((index * layers, index * layers + layers),), replicas=(Replica(node=node, devices=(0,)),))
        for index, node in enumerate(nodes)
    )
    return shard_map(Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=stages),)), MODEL)


def _upload(store: Store, step: int, epoch: int = 1, nodes: tuple[str, ...] = ("a", "b")) -> Manifest:
    pieces: list[Any] = []
    for state in _sharding(*nodes).ranks:
        held = layouts.shard(state, layouts.arrays(MODEL, step))
        weight = Piece(key=state.holds[0].key(Kind.WEIGHT), offset=0, num_bytes=4, checksum="")
        pieces += put_shard(
            store,
            job=JOB,
            step=step,
            epoch=epoch,
            shard=f"r{state.rank}",
            data=held.content,
            pieces=(weight, *held.pieces),
        )
    return Manifest(version=1, job=JOB, step=step, epoch=epoch, next_sample=step * 8, pieces=tuple(pieces))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def test_a_committed_step_is_listed_and_read_back(store: Store) -> None:
    manifests = {step: _upload(store, step) for step in (2, 10)}
    for manifest in manifests.values():
        assert commit(store, manifest, MODEL) == manifest_name(JOB, manifest.step)
    assert list_manifests(store, JOB) == (10, 2)
    assert list_manifests(store, "job_2") == ()
    assert {step: load_manifest(store, JOB, step) for step in (2, 10)} == manifests


def test_a_step_counts_only_once_committed_and_is_committed_once(store: Store) -> None:
    manifest = _upload(store, 5)
    assert list_manifests(store, JOB) == ()
    commit(store, manifest, MODEL)
    late = _upload(store, 5, epoch=2)
    with pytest.raises(StoreConflict):
        commit(store, late, MODEL)
    assert load_manifest(store, JOB, 5) == manifest
    assert {piece.object for piece in late.pieces}.isdisjoint(piece.object for piece in manifest.pieces)


def test_a_step_that_is_not_whole_cannot_be_committed(store: Store) -> None:
    manifest = _upload(store, 5)
    with pytest.raises(InvalidField, match="must cover all of"):
        commit(store, replace(manifest, pieces=manifest.pieces[1:]), MODEL)
    store.delete(shard_name(JOB, 5, 1, "r1"))
    with pytest.raises(StoreError, match="step 5 is not whole: job_1/shards/000000005/000001-r1 is not there"):
        commit(store, manifest, MODEL)
    elsewhere = tuple(replace(piece, object="elsewhere") for piece in manifest.pieces)
    with pytest.raises(InvalidField, match="must begin with job_1/shards/000000005/"):
        commit(store, replace(manifest, pieces=elsewhere), MODEL)
    assert list_manifests(store, JOB) == ()


def test_a_manifest_that_is_none_is_an_error_of_the_store(store: Store) -> None:
    store.put(manifest_name(JOB, 3), b"{")
    with pytest.raises(StoreError, match=r"000000003\.json is not a manifest"):
        load_manifest(store, JOB, 3)
    commit(store, _upload(store, 4), MODEL)
    store.put(manifest_name(JOB, 6), store.read(manifest_name(JOB, 4)))
    with pytest.raises(StoreError, match=r"000000006\.json is the manifest of step 4 of job_1"):
        load_manifest(store, JOB, 6)


class _Recording(DirectoryStore):
    """A folder that writes down what is deleted, and whose wire is cut after so many deletions."""

    def __init__(self, folder: Path, deletions: int = 10**9) -> None:
        super().__init__(folder)
        self.deleted: list[str] = []
        self._deletions = deletions

    def delete(self, name: str) -> None:
        if len(self.deleted) == self._deletions:
            raise StoreError(self.uri, "cut")
        self.deleted.append(name)
        super().delete(name)


def test_retention_deletes_a_manifest_before_its_objects(tmp_path: Path) -> None:
    store = _Recording(tmp_path)
    for step in (1, 2, 3, 4):
        commit(store, _upload(store, step), MODEL)
    assert retire(store, JOB, keep=2) == (2, 1)
    assert list_manifests(store, JOB) == (4, 3)
    assert store.deleted == [
        name
        for step in (1, 2)
        for name in (manifest_name(JOB, step), shard_name(JOB, step, 1, "r0"), shard_name(JOB, step, 1, "r1"))
    ]
    assert store.list("job_1/shards/00000000") == tuple(
        shard_name(JOB, step, 1, shard) for step in (3, 4) for shard in ("r0", "r1")
    )
    assert retire(store, JOB, keep=2) == ()
    with pytest.raises(InvalidField, match="at least 1"):
        retire(store, JOB, keep=0)


@pytest.mark.parametrize("deletions", range(6))
def test_retention_cut_anywhere_leaves_listed_steps_whole_and_orphans_are_found(tmp_path: Path, deletions: int) -> None:
    store = _Recording(tmp_path, deletions)
    for step in (1, 2, 3):
        commit(store, _upload(store, step), MODEL)
    with pytest.raises(StoreError, match="cut"):
        retire(store, JOB, keep=1)
    after = DirectoryStore(tmp_path)
    for step in list_manifests(after, JOB):
        named = {piece.object for piece in load_manifest(after, JOB, step).pieces}
        assert named <= set(after.list(""))
    remove_orphans(after, JOB)
    retire(after, JOB, keep=1)
    assert after.list("") == (
        manifest_name(JOB, 3),
        shard_name(JOB, 3, 1, "r0"),
        shard_name(JOB, 3, 1, "r1"),
    )


def test_orphans_are_removed_and_uploads_under_way_are_not(store: Store) -> None:
    abandoned, late, under_way = shard_name(JOB, 3, 1, "r0"), shard_name(JOB, 5, 2, "r0"), shard_name(JOB, 7, 2, "r0")
    for name in (abandoned, late, under_way):
        store.put(name, b"x")
    assert remove_orphans(store, JOB) == ()  # no manifest yet: nobody knows what is under way
    commit(store, _upload(store, 5), MODEL)
    assert remove_orphans(store, JOB) == (abandoned, late)
    assert under_way in store.list("")
    assert remove_orphans(store, JOB, over=True) == (under_way,)
    assert load_manifest(store, JOB, 5).pieces[0].object in store.list("")


def test_what_belongs_to_a_manifest_that_cannot_be_read_is_no_orphan_and_it_makes_way_alone(store: Store) -> None:
    commit(store, _upload(store, 3), MODEL)
    commit(store, _upload(store, 5), MODEL)
    store.put(manifest_name(JOB, 3), b"{")
    abandoned = shard_name(JOB, 4, 1, "r0")
    store.put(abandoned, b"x")
    assert remove_orphans(store, JOB) == (abandoned,)
    assert store.list(shard_name(JOB, 3, 1, ""))
    for step in (3, 5):
        remove_unreadable(store, JOB, step)
    assert list_manifests(store, JOB) == (5,)
    store.put(manifest_name(JOB, 7), b"{")
    under_way = shard_name(JOB, 6, 2, "r0")
    store.put(under_way, b"x")
    remove_orphans(store, JOB)
    assert under_way in store.list(""), "behind the newest that can be read"


def test_a_manifest_of_a_later_version_is_neither_read_nor_removed(store: Store) -> None:
    commit(store, _upload(store, 5), MODEL)
    name = manifest_name(JOB, 5)
    body = (
        bytes(store.read(name))
        .replace(b'"version":1,', b'"version":99,"of a later one":[],')
        .rpartition(b',"checksum"')[0]
    )
    store.put(name, body + f',"checksum":"{checksum(body)}"}}\n'.encode())
    with pytest.raises(StoreError, match=r"is of another version: .*only version 1 can be read"):
        remove_unreadable(store, JOB, 5)
    assert list_manifests(store, JOB) == (5,)


def test_a_bit_of_the_version_makes_no_later_one(store: Store) -> None:
    commit(store, _upload(store, 5), MODEL)
    name = manifest_name(JOB, 5)
    store.put(name, bytes(store.read(name)).replace(b'"version":1,', b'"version":9,'))
    with pytest.raises(ManifestUnreadable, match="is not that of the text, which says version 9"):
        load_manifest(store, JOB, 5)
    remove_unreadable(store, JOB, 5)
    assert list_manifests(store, JOB) == ()


@pytest.mark.parametrize("text", [b"{}", b'{"version": null}', b'{"version": "2"}', b'{"version": 0}'])
def test_a_document_without_a_version_of_ours_makes_way(store: Store, text: bytes) -> None:
    store.put(manifest_name(JOB, 5), text)
    with pytest.raises(ManifestUnreadable):
        load_manifest(store, JOB, 5)
    remove_unreadable(store, JOB, 5)
    assert list_manifests(store, JOB) == ()


def test_checksum_is_crc32() -> None:
    assert checksum(b"123456789") == checksum(memoryview(b"123456789")) == "crc32:cbf43926"


def _part(piece: StoredPiece, first: int, last: int) -> Transfer:
    """Elements [first, last) of the piece, for rank 0."""
    key = replace(piece.key, first=first, last=last)
    return Transfer(
        rank=0,
        key=key,
        source_kind=key.kind,
        tier=Tier.STORE,
        num_bytes=key.numel * ELEMENT_BYTES,
        name=piece.object,
        offset=piece.offset + (first - piece.key.first) * ELEMENT_BYTES,
        checksum=piece.checksum,
        before_bytes=(first - piece.key.first) * ELEMENT_BYTES,
        after_bytes=(piece.key.last - last) * ELEMENT_BYTES,
    )


def _read(store: Reader, transfer: Transfer) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    place = bytearray(transfer.num_bytes)
    ((_, problem),) = read_transfers(store, [(transfer, memoryview(place))])
    if problem is not None:
        raise problem
    return np.frombuffer(place, dtype="<f4")


def test_a_part_is_read_with_the_piece_that_it_is_in_and_no_byte_more(store: Store) -> None:
    manifest, truth = _upload(store, 5), layouts.arrays(MODEL, 5)
    metered, expected_bytes = _Metered(store), 0
    for piece in manifest.pieces:
        key, values = piece.key, truth[piece.key.fqn, piece.key.kind]
        for first, last in ((key.first, key.last), (key.first + 1, key.last - 2)):
            data = _read(metered, _part(piece, first, last))
            np.testing.assert_array_equal(data, values[first:last])
            expected_bytes += piece.num_bytes
            assert metered.num_bytes == expected_bytes


def test_flipped_bits_are_found(store: Store) -> None:
    piece = _upload(store, 5).pieces[3]
    content = bytearray(store.read(piece.object))
    content[piece.offset + 9] ^= 1
    store.put(piece.object, content)
    with pytest.raises(StoredPieceCorrupt):  # also where another part is wanted
        _read(store, _part(piece, piece.key.first, piece.key.first + 1))
    with pytest.raises(StoredPieceCorrupt, match="but that was stored with crc32:") as error:
        _read(store, _part(piece, piece.key.first, piece.key.last))
    assert piece.object in str(error.value)


class _Metered:
    """Hands everything on and notes which bytes were asked for."""

    def __init__(self, store: Store) -> None:
        self._store, self.uri, self.num_bytes = store, store.uri, 0

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        data = self._store.read(name, offset, num_bytes)
        self.num_bytes += len(data)
        return data

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        self._store.read_into(name, offset, places)
        self.num_bytes += sum(place.nbytes for place in places)

    def put(self, name: str, data: Data) -> None:
        self._store.put(name, data)

    def put_new(self, name: str, data: Data) -> None:
        self._store.put_new(name, data)

    def list(self, prefix: str) -> tuple[str, ...]:
        return self._store.list(prefix)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def unfinished(self, prefix: str) -> tuple[str, ...]:
        return self._store.unfinished(prefix)

    def abandon(self, name: str) -> None:
        self._store.abandon(name)

    def check_writable(self) -> None:
        self._store.check_writable()


def test_only_the_missing_intervals_are_read_from_a_real_s3_server(s3_uri: str) -> None:
    """Node a survives with its half; all of b's state exists only in the store, cut otherwise than the new plan."""
    store = open_store(s3_uri)
    commit(store, _upload(store, 9, nodes=("a", "b", "c", "d")), MODEL)
    before, truth = _sharding("a", "b"), layouts.arrays(MODEL, 9)
    held = layouts.shard(before.ranks[0], truth)
    inventory = Inventory(live=(layouts.live(before.ranks[0], 9),), snapshots=(layouts.snapshot(held, "a", 9),))
    manifest = load_manifest(store, JOB, list_manifests(store, JOB)[0])
    wanted = _sharding("a")
    plan = plan_restore(wanted, inventory, (manifest,), MODEL, "fp32")
    missing = sum(span.numel for span in before.ranks[1].owns) * 4 * len(OWNED_KINDS)
    metered = _Metered(store)
    for transfer in plan.transfers:
        if transfer.tier is Tier.STORE:
            data = _read(metered, transfer)
            key = transfer.key
            np.testing.assert_array_equal(data, truth[key.fqn, transfer.source_kind][key.first : key.last])
    assert metered.num_bytes == missing == plan.bytes_by_tier()[Tier.STORE]
    assert plan.bytes_by_tier()[Tier.PEER] == plan.bytes_by_tier()[Tier.NODE] == 0
