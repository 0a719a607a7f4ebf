"""Data in an object store: read by range, in pieces that the node keeps on its disk within a budget."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from breakable_wire import BreakableWire
from data_ground import WRITERS, documents, job
from servers import RunningServer, new_place

from shoal_planner.data_spec import DataSpec
from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError, StoreUnreachable
from shoal_recovery.store import Entry, open_store
from shoal_workers.data import training_samples
from shoal_workers.data_cache import DataCache
from shoal_workers.data_files import find
from shoal_workers.errors import DataError
from shoal_workers.far_files import FarFile


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
    whole = type(open_store("s3://some/place")).read_listed

    def read(self: object, entry: Entry, offset: int, num_bytes: int) -> bytes:
        reads.append(entry.name)
        return whole(self, entry, offset, num_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(type(open_store("s3://some/place")), "read_listed", read)
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


def test_what_tools_leave_beside_data_is_passed_over(tmp_path: Path, s3_uri: str) -> None:
    import boto3

    lines = "\n".join(json.dumps({"text": text}) for text in documents()).encode()
    client, (bucket, _, prefix) = boto3.session.Session().client("s3"), s3_uri.removeprefix("s3://").partition("/")
    for name, content in {
        "train/": b"",
        "train/part 1.jsonl": lines,
        "train/größe+50%#2.jsonl": lines,
        "train/.gitattributes": b"*.jsonl filter=lfs",
        "train/.cache/huggingface/a.jsonl": b"no json",
        "train/README.md": b"# About",
        "train/empty.jsonl": b"",
    }.items():
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=content)
        near = tmp_path / name
        near.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            near.write_bytes(content)
    far = DataSpec(uri=f"{s3_uri}/train", format="jsonl")
    samples = training_samples(job(far)).read(range(4000))
    assert torch.equal(
        training_samples(job(replace(far, uri=(tmp_path / "train").as_uri()))).read(range(4000)), samples
    )
    (named,) = find("data.uri", f"{s3_uri}/train/größe+50%#2.jsonl")
    assert named.read(0, 20) == lines[:20]
    (hidden,) = find("data.uri", f"{s3_uri}/train/.gitattributes")
    assert hidden.read(0, 3) == b"*.j", "it was asked for by name"
    (tmp_path / "train" / "part 1.jsonl").unlink()
    (tmp_path / "train" / "größe+50%#2.jsonl").unlink()
    (tmp_path / "train" / "LICENSE").write_bytes(b"free")
    with pytest.raises(InvalidField, match=r"has no file that ends in \.jsonl or \.ndjson or \.json"):
        training_samples(job(replace(far, uri=(tmp_path / "train").as_uri())))


@pytest.mark.parametrize("server", ["s3_environment", "rclone_environment"])
@pytest.mark.parametrize("change", ["replaced", "shorter", "removed"])
def test_an_object_that_is_not_what_it_was_is_named(
    request: pytest.FixtureRequest, tmp_path: Path, change: str, server: str
) -> None:
    request.getfixturevalue(server)
    uri = new_place()
    store = open_store(uri)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents(seed=3)).encode()
    for name in ("0.jsonl", "a.jsonl"):  # the first was looked at before, and so the node has it
        store.put(f"data/{name}", lines)
    cache = DataCache(tmp_path / "cache", 2**30)
    samples = training_samples(job(DataSpec(uri=f"{uri}/data", format="jsonl")), cache)
    match change:
        case "replaced":
            store.put("data/a.jsonl", lines.replace(b"e", b"a"))
        case "shorter":
            store.put("data/a.jsonl", lines[: len(lines) // 2])
        case _:
            store.delete("data/a.jsonl")
    with pytest.raises(DataError, match=f"{uri}/data/a.jsonl at byte 0: .* were when training began"):
        samples.read(range(100))


def test_a_connection_that_breaks_is_no_trouble(
    tmp_path: Path, seaweedfs: RunningServer, monkeypatch: pytest.MonkeyPatch, s3_uri: str
) -> None:
    open_store(s3_uri).put("a.jsonl", json.dumps({"text": "x" * 1000}).encode())
    wire = BreakableWire(seaweedfs.endpoint)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", wire.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        (file,) = find("data.uri", f"{s3_uri}/a.jsonl")
        wire.cut()
        refused = threading.Event()

        def mend(event: str, **_: object) -> None:
            refused.set()
            wire.mend()

        monkeypatch.setattr("shoal_workers.far_files.log.info", mend)
        assert file.read(0, 9) == b'{"text": '
        assert refused.is_set(), "it was asked for again"
        wire.cut()
        monkeypatch.setattr("shoal_workers.far_files.log.info", lambda event, **_: None)
        with pytest.raises(StoreUnreachable):
            find("data.uri", f"{s3_uri}/a.jsonl")
    finally:
        wire.close()
