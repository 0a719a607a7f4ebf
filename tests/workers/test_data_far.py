"""Data in an object store: read by range, in pieces that the node keeps on its disk within a budget."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from data_ground import WRITERS, documents, job
from servers import new_place

from shoal_planner.data_spec import DataSpec
from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError
from shoal_recovery.store import open_store
from shoal_workers.data import training_samples
from shoal_workers.data_cache import DataCache
from shoal_workers.data_files import FarFile, find


def put(folder: Path, data: DataSpec) -> DataSpec:
    """The same data, at a place of its own with a real server."""
    uri = new_place()
    store = open_store(uri)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(path.relative_to(folder).as_posix(), path.read_bytes())
    below = urlsplit(str(data.uri)).path.removeprefix(str(folder))
    return replace(data, uri=uri + below)


@pytest.mark.parametrize("server", ["s3_environment", "rclone_environment"])
@pytest.mark.parametrize("name", ["text", "jsonl", "parquet", "arrow", "uint16", "megatron"])
def test_what_is_far_gives_the_same_samples(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, server: str
) -> None:
    request.getfixturevalue(server)
    near = WRITERS[name](tmp_path / name, documents())
    far = put(tmp_path / name, near)
    wanted = training_samples(job(near)).read(range(200))
    cache = DataCache(tmp_path / "cache", 2**30)
    assert torch.equal(training_samples(job(far), cache).read(range(200)), wanted)
    assert torch.equal(training_samples(job(far)).read(range(200)), wanted), "without a cache"


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    reads: list[str] = []
    whole = type(open_store("s3://some/place")).read

    def read(self: object, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        reads.append(name)
        return whole(self, name, offset, num_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(type(open_store("s3://some/place")), "read", read)
    return lambda: len(reads)


def test_a_node_fetches_a_piece_once(tmp_path: Path, s3_uri: str, count_reads: Callable[[], int]) -> None:
    open_store(s3_uri).put("big.bin", os.urandom(20 * 2**20))
    cache = DataCache(tmp_path / "cache", 2**30)
    (file,) = find("data.uri", f"{s3_uri}/big.bin", cache)
    assert isinstance(file, FarFile)
    across = file.read(8 * 2**20 - 5, 10)
    assert count_reads() == 2
    (again,) = find("data.uri", f"{s3_uri}/big.bin", cache)  # as another process has it
    assert again.read(8 * 2**20 - 5, 10) == across
    assert count_reads() == 2
    assert again.read(20 * 2**20 - 3, 3) and count_reads() == 3
    piece = next(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    piece.write_bytes(b"torn")
    (third,) = find("data.uri", f"{s3_uri}/big.bin", cache)
    assert third.read(8 * 2**20 - 5, 10) == across


def test_the_cache_keeps_to_its_budget_and_drops_what_was_used_least(tmp_path: Path) -> None:
    cache = DataCache(tmp_path / "cache", 1000)
    for number in range(9):
        cache.keep("a", number, bytes([number]) * 100)
        os.utime(next(tmp_path.rglob(f"{number}")), ns=(number, number))
    assert cache.part("a", 0, 100, 10, 5) == bytes(5)  # used just now
    cache.keep("a", 9, bytes(100))
    assert cache.part("a", 1, 100, 0, 1) is not None
    cache.keep("b", 0, bytes(100))
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert held <= 1000
    assert cache.part("a", 0, 100, 0, 1) is not None
    assert cache.part("a", 2, 100, 0, 1) is None
    cache.keep("c", 0, bytes(2000))
    assert cache.part("c", 0, 2000, 0, 1) is None, "it alone is more than all may be"


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    cache = DataCache(tmp_path / "cache", 1000)
    cache.keep("a", 0, b"x")
    assert cache.part("a", 0, 1, 0, 1) is None
    spec = job(WRITERS["jsonl"](tmp_path / "data", documents()))
    assert torch.equal(training_samples(spec, cache).read(range(50)), training_samples(spec).read(range(50)))


def test_places_that_are_not_there_are_named(s3_uri: str, s3_environment: dict[str, str]) -> None:
    with pytest.raises(InvalidField, match="does not exist: there is no object of that name"):
        training_samples(job(DataSpec(uri=f"{s3_uri}/nothing", format="jsonl")))
    with pytest.raises(StoreError, match="has no bucket 'elsewhere'"):
        training_samples(job(DataSpec(uri="s3://elsewhere/x", format="jsonl")))


def test_a_folder_is_not_taken_for_one_with_a_longer_name(s3_uri: str) -> None:
    store = open_store(s3_uri)
    store.put("train/a.jsonl", json.dumps({"text": "x"}).encode())
    store.put("training/b.jsonl", b"?")
    assert [file.relative for file in find("data.uri", f"{s3_uri}/train")] == ["a.jsonl"]
