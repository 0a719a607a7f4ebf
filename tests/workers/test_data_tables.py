"""Parquet and Arrow files of any shape: large units, rows that are no text, more streams than memory has room for."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_ground import documents, job, write_arrow, write_parquet

from shoal_planner.data_spec import DataSpec
from shoal_planner.errors import InvalidField
from shoal_workers import held_rows, tables
from shoal_workers.data import training_samples
from shoal_workers.data_cache import DataCache
from shoal_workers.data_files import find
from shoal_workers.errors import DataError


def write_stream(path: Path, table: pa.Table, rows: int = 10**9, **options: object) -> DataSpec:
    with pa.OSFile(str(path), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table.combine_chunks(), max_chunksize=rows)
    return DataSpec(uri=path.as_uri(), format="arrow")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_more_streams_than_there_is_room_for_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, on_disk: bool
) -> None:
    data = (write_parquet if form == "parquet" else write_arrow)(tmp_path / "data", documents())
    spec = job(data, batch=8, seq_len=64)
    wanted = training_samples(spec).read(range(600))
    room = held_rows._Room(10_000)
    monkeypatch.setattr(held_rows, "_ROOM", room)
    monkeypatch.setattr(held_rows, "CHUNK_BYTES", 500)
    cache = DataCache(tmp_path / "cache", 2**24) if on_disk else None
    assert torch.equal(training_samples(spec, cache).read(range(600)), wanted)
    assert room._num_bytes == sum(len(content) for content, _ in room._held.values()) <= 10_000
    for path in (tmp_path / "cache").rglob("0"):
        path.write_bytes(b"spoilt")
    assert torch.equal(training_samples(spec, cache).read(range(600)), wanted)


def test_large_units_have_larger_blocks(tmp_path: Path) -> None:
    table = pa.table({"text": documents(4000)})
    pq.write_table(table, tmp_path / "one.parquet", row_group_size=4000)
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=100)
    for name, sizes, most in (("one", (1000, 16_000), 80), ("many", (1000, 16_000), 10_000)):
        (file,) = find("data.uri", (tmp_path / f"{name}.parquet").as_uri())
        blocks = tables.parquet_blocks("data.uri", name, [file], "text", sizes, None)
        assert len(blocks) <= most
        values = [raw.content for block in range(len(blocks)) for raw in blocks.read(block, 0).documents]
        assert set(values) <= set(table["text"].to_pylist())


@pytest.mark.parametrize("options", [{}, {"compression": "lz4"}])
def test_a_large_batch_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    table = pa.table({"other": list(range(3000)), "text": documents(3000)})
    spec = job(write_stream(tmp_path / "a.arrow", table, **options), batch=8)
    wanted = training_samples(spec).read(range(800))
    monkeypatch.setattr(tables, "_COPIED_BYTES", 5000)
    assert torch.equal(training_samples(spec, DataCache(tmp_path / "cache", 2**24)).read(range(800)), wanted)
    assert not list((tmp_path / "cache").glob("tmp*")), "its copy is gone"


def test_dictionaries_are_read_and_those_that_change_are_refused(tmp_path: Path) -> None:
    texts = documents(50) * 4
    plain = write_stream(tmp_path / "plain.arrow", pa.table({"text": texts}), 60)
    coded = write_stream(tmp_path / "coded.arrow", pa.table({"text": pa.array(texts).dictionary_encode()}), 60)
    assert sorted(map(tuple, training_samples(job(coded)).read(range(30)).tolist()))
    assert training_samples(job(coded)).read([0]).shape == training_samples(job(plain)).read([0]).shape
    batches = [pa.record_batch({"text": pa.array(part).dictionary_encode()}) for part in (texts[:50], ["other"] * 50)]
    with (
        pa.OSFile(str(tmp_path / "changing.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, batches[0].schema) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
    with pytest.raises(InvalidField, match=r"changing.arrow .* it replaces a dictionary between batches"):
        training_samples(job(DataSpec(uri=(tmp_path / "changing.arrow").as_uri(), format="arrow")))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_row_that_calls_itself_text_and_is_none_is_named(tmp_path: Path, form: str) -> None:
    rows = [text.encode() for text in documents(200)]
    rows[77] = b"no \xff text"
    table = pa.table({"text": pa.array(rows, pa.binary()).view(pa.string())})
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        write_stream(path, table)
    spec = job(DataSpec(uri=path.as_uri(), format=form))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"a.{form} row 78: b'no \\xff text' cannot be read: .*utf-8"):
        training_samples(spec).read(range(4000))


def test_a_column_with_a_dot_in_its_name_has_blocks(tmp_path: Path) -> None:
    texts = documents(2000)
    for name in ("text", "a.b"):
        pq.write_table(pa.table({name: texts}), tmp_path / f"{name}.parquet", row_group_size=500)
    found = [
        training_samples(
            job(DataSpec(uri=(tmp_path / f"{name}.parquet").as_uri(), format="parquet", field=name), batch=2)
        )
        for name in ("text", "a.b")
    ]
    assert found[0]._order.num_blocks == found[1]._order.num_blocks > 8  # type: ignore[attr-defined]
    assert torch.equal(found[0].read(range(50)), found[1].read(range(50)))


def one_group(path: Path) -> list[str]:
    texts = documents(4000)
    pq.write_table(
        pa.table({"text": texts}),
        path,
        compression="none",
        use_dictionary=False,
        data_page_size=4096,
        write_batch_size=16,
    )
    return texts


def blocks_of(path: Path, num_streams: int) -> tables.RowBlocks:
    files = find("data.uri", path.as_uri())
    return tables.parquet_blocks("data.uri", path.as_uri(), files, "text", (1000, 16_000), None, num_streams)


def values_of(blocks: tables.RowBlocks, block: int) -> list[object]:
    found: list[object] = []
    place: int | None = 0
    while place is not None:
        chunk = blocks.read(block, place)
        found += [raw.content for raw in chunk.documents]
        place = chunk.end
    return found


@pytest.mark.parametrize("num_streams", [1, 2000])
def test_a_row_group_is_taken_out_once_for_as_many_blocks_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_streams: int
) -> None:
    texts = one_group(tmp_path / "a.parquet")
    blocks = blocks_of(tmp_path / "a.parquet", num_streams)
    asked: list[tuple[int, int]] = []
    arrays = tables._Parquet.arrays

    def counted(self: object, unit: tables.Unit, first: int, last: int) -> object:
        asked.append((first, last))
        return arrays(self, unit, first, last)  # type: ignore[arg-type]

    monkeypatch.setattr(tables._Parquet, "arrays", counted)
    order = random.Random(1).sample(range(len(blocks)), len(blocks))
    found = {block: values_of(blocks, block) for block in order}
    assert [value for block in range(len(blocks)) for value in found[block]] == texts
    assert sum(last - first for first, last in asked) == len(texts)
    assert len(blocks) > 20
    assert asked == [(0, 4000)] if num_streams == 1 else len(asked) > 10


def test_what_is_spoilt_is_no_trouble_of_the_rows_before_it(tmp_path: Path) -> None:
    texts = one_group(tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    at = len(content) * 3 // 4
    content[at : at + 20_000] = b"\xff" * 20_000
    (tmp_path / "a.parquet").write_bytes(content)
    blocks = blocks_of(tmp_path / "a.parquet", 1)
    assert [value for block in range(10) for value in values_of(blocks, block)] == texts[: 4000 * 10 // len(blocks)]
    with pytest.raises(DataError, match=r"a\.parquet rows 1 to 4000: .* cannot be read"):
        values_of(blocks, len(blocks) - 1)
