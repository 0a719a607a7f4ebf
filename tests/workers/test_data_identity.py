"""Data that changed since training began is refused by the first file that differs, before anybody trains on it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from data_ground import documents, job, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from servers import new_place

from shoal_planner.data_spec import DataSpec, SourceSpec
from shoal_recovery.store import open_store
from shoal_workers.data import samples_of
from shoal_workers.data_identity import difference, identity
from shoal_workers.data_marks import DataMarks
from shoal_workers.errors import DataDiffers, DataError
from shoal_workers.file_ranges import NearFile
from shoal_workers.rows import Row


def rows(spec: DataSpec) -> list[Row]:
    samples_of.cache_clear()
    return samples_of(job(spec)).files


def test_a_folder_that_changed_is_told_by_its_first_file(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data", documents())
    began = rows(data)
    assert difference(began, rows(data)) is None
    assert difference([], began) is None, "nothing was told by manifests of before"
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "data" / "README.md").write_text("no data")
    assert difference(began, rows(data)) is None
    (tmp_path / "data" / "aa.jsonl").write_text('{"text": "new"}')
    found = difference(began, rows(data))
    assert isinstance(found, DataDiffers)
    size = sum(path.stat().st_size for path in (tmp_path / "copy").iterdir())
    assert str(found) == (
        f"{data.uri} aa.jsonl: 3 files of {size + 15} bytes are there now, "
        f"and training began with 2 of {size}: this one is new"
    )
    (tmp_path / "data" / "aa.jsonl").unlink()
    (tmp_path / "data" / "b.jsonl").write_text('{"text": "x"}')
    assert "b.jsonl: 2 files of" in str(difference(began, rows(data)))
    assert str(difference(began, rows(data))).endswith("this one has other content")
    (tmp_path / "data" / "a.jsonl").unlink()
    assert str(difference(began, rows(data))).endswith(
        f"a.jsonl: 1 files of 13 bytes are there now, and training began with 2 of {size}: this one is missing"
    )


def test_the_same_bytes_at_another_time_do_not_differ_and_other_sources_do(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data", documents())
    began = rows(data)
    for path in (tmp_path / "data").iterdir():
        path.write_bytes(path.read_bytes())
    assert difference(began, rows(data)) is None
    more = write_jsonl(tmp_path / "more", documents(50, 3))
    one, two = (SourceSpec(uri=str(each.uri), format="jsonl") for each in (data, more))
    assert len(rows(DataSpec(mix=(one, two)))) == 2
    evaluating = job(dataclasses.replace(data, eval_uri=more.uri), eval_every=2, eval_batches=1)
    assert samples_of(evaluating).files == [*rows(data), *rows(more)]
    assert "are not the data of" in str(difference(rows(DataSpec(mix=(one, two))), rows(DataSpec(mix=(two, one)))))


def test_an_object_of_the_same_size_differs_by_its_version(s3_environment: dict[str, str]) -> None:
    uri = new_place()
    open_store(uri).put("a.jsonl", b'{"text": "one of them"}\n' * 50)
    began = rows(DataSpec(uri=uri, format="jsonl"))
    open_store(uri).put("a.jsonl", b'{"text": "another one"}\n' * 50)
    found = difference(began, rows(DataSpec(uri=uri, format="jsonl")))
    assert isinstance(found, DataError)
    assert not isinstance(found, DataDiffers), "every node sees it so"
    assert str(found).endswith(
        "a.jsonl: 1 files of 1200 bytes are there now, and training began with 1 of 1200: this one has other content"
    )


@given(count=st.integers(1, 300), at=st.integers(0, 299), change=st.sampled_from(["size", "new", "missing"]))
def test_any_change_of_one_file_is_found_at_or_before_it(count: int, at: int, change: str) -> None:
    files = [NearFile(path=Path(f"/{n}"), relative=f"{n:04}", num_bytes=n + 1, version="") for n in range(count)]
    began, at = identity("file:///", files), min(at, count - 1)
    assert len(str(began)) < 4000
    match change:
        case "size":
            files[at] = dataclasses.replace(files[at], num_bytes=7000)
        case "new":
            files.insert(at, dataclasses.replace(files[at], relative=f"{at - 1:04}x"))
        case _:
            del files[at]
    found = difference([began], [identity("file:///", files)])
    assert found is not None
    if count < 60 and files:
        assert found.place == (f"{at - 1:04}x" if change == "new" else f"{at:04}")


def test_what_the_first_rank_told_counts(tmp_path: Path) -> None:
    one, two = (rows(write_jsonl(tmp_path / name, documents(count))) for name, count in (("a", 300), ("b", 301)))
    marks = DataMarks()
    assert marks.hear_files([]) is None
    assert marks.known_files(one) == one, "as it stood in the manifest"
    assert marks.hear_files(one) is None
    assert isinstance(marks.hear_files(two), DataDiffers)
    assert marks.known_files(two) == one


@pytest.fixture(autouse=True)
def _forget() -> None:
    samples_of.cache_clear()
