"""What would be trained on as if it were something else, or would not be read at all, is refused and named."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_ground import WRITERS, documents, job, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.data_spec import DataSpec
from shoal_planner.errors import InvalidField
from shoal_recovery.store import open_store
from shoal_workers.data import training_samples
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import NearFile
from shoal_workers.plain_text import check_text

TEXT = "\n".join(documents(200))


@pytest.mark.parametrize(
    ("name", "form", "problem"),
    [
        ("a.jsonl.gz", "text", "is compressed, or an archive"),
        ("a.jsonl.gz", "jsonl", "is compressed, or an archive"),
        ("a.JSONL.ZST", "jsonl", "is compressed, or an archive"),
        ("train.bin.xz", "tokens", "is compressed, or an archive"),
        ("train.bin", "text", "is no text: say format: tokens, or megatron"),
        ("a.npy", "text", "is no text: convert it"),
    ],
)
@pytest.mark.parametrize("place", ["file:///data", "s3://bucket/data"])
def test_names_of_what_cannot_be_read_are_refused_at_submission(place: str, name: str, form: Any, problem: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(f"uri = '{place}/{name}': {problem}")):
        DataSpec(uri=f"{place}/{name}", format=form)


def refused(data: DataSpec) -> str:
    with pytest.raises(InvalidField) as caught:
        training_samples(job(data))
    assert caught.value.field == "data.uri"
    return str(caught.value)


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("b.txt", gzip.compress(TEXT.encode()), "is gzip: decompress it"),
        ("b.jsonl.gz", b"x", "b.jsonl.gz is compressed, or an archive"),
        ("b", b"\x28\xb5\x2f\xfd" + b"x" * 100, "is zstd: decompress it"),
        ("b.parquet", b"PAR1" * 100, "b.parquet is no text: say format: parquet"),
        ("b.table", b"PAR1" * 100, "is Parquet: say format: parquet"),
        ("b.txt", TEXT.encode("utf-16"), "is UTF-16: convert it"),
        ("b.txt", b"fine so far\0but", r"b.txt byte 11: b'\x00but' is no text: it begins with a NUL byte"),
        ("b.txt", "Gr\xf6\xdfe".encode("latin-1"), r"b.txt byte 2: b'\xf6\xdfe' is no UTF-8 (invalid"),
    ],
)
def test_what_is_no_text_is_refused_before_the_first_step(
    tmp_path: Path, name: str, content: bytes, problem: str, with_tokenizer: bool
) -> None:
    data = DataSpec(uri=(tmp_path / "data").as_uri())
    if with_tokenizer:
        data = replace(data, tokenizer=str(write_tokenizer(tmp_path / "small")))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text(TEXT)
    assert training_samples(job(data)).read([0]).shape == (1, 17)
    (tmp_path / "data" / name).write_bytes(content)
    assert problem in refused(data)


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize(
    ("wrong", "problem"), [(b"\0", "is no text"), (b"\xe4", "is no UTF-8"), (b"\x80", "is no UTF-8")]
)
def test_what_is_no_text_further_behind_is_named_when_it_is_read(
    tmp_path: Path, with_tokenizer: bool, wrong: bytes, problem: str
) -> None:
    path = tmp_path / "a.txt"
    data = DataSpec(uri=path.as_uri())
    if with_tokenizer:
        data = replace(data, tokenizer=str(write_tokenizer(tmp_path / "small")))
    before = ("Größe€\n" * 3000).encode()
    path.write_bytes(before + b"ab" + wrong + b"cd\n" + before)
    with pytest.raises(DataError, match=rf"{path} byte {len(before) + 2}: .* {problem}"):
        training_samples(job(data)).read(range(4000))


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), low=st.integers(0, 60))
def test_ranges_may_cut_characters(text: str, low: int) -> None:
    content = text.encode()
    for high in range(low, len(content) + 1):
        file = NearFile(path=Path("f"), relative="f", num_bytes=len(content), version="")
        check_text(file, low, content[low:high])


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow", "uint16", "megatron"])
def test_nothing_in_a_folder_is_passed_over(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    data = replace(WRITERS[name](folder, documents()), uri=folder.as_uri())
    for companion in ("README.md", "LICENSE", "dataset_info.json", "_SUCCESS", ".hidden.gz", "prepare.py"):
        (folder / companion).write_text("{}")
    assert training_samples(job(data)).read([0]).shape == (1, 17)
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert "has what would not be read" in refused(data)
    assert "z.jsonl.gz: the first is compressed" in refused(data)
    (folder / "z.jsonl.gz").rename(folder / "notes.txt")
    assert "notes.txt: the first is nothing of this format" in refused(data)


def test_a_folder_without_files_of_the_format_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("odd")
    for form, ending in (("tokens", ".bin"), ("jsonl", ".jsonl or .ndjson or .json"), ("parquet", ".parquet")):
        found = refused(DataSpec(uri=tmp_path.as_uri(), format=form))  # type: ignore[arg-type]
        assert f"has no file that ends in {ending}: there is {tmp_path}/input.txt" in found
    (tmp_path / "input.txt").rename(tmp_path / "a.jsonl.gz")
    assert "a.jsonl.gz, and the first is compressed" in refused(DataSpec(uri=tmp_path.as_uri(), format="jsonl"))


def test_a_file_that_is_named_itself_may_have_any_name(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in documents(100)]
    (tmp_path / "some lines").write_text("\n".join(lines))
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "ids.u16")
    pq.write_table(pa.table({"text": documents(100)}), tmp_path / "table")
    for name, form in (("some lines", "jsonl"), ("ids.u16", "tokens"), ("table", "parquet")):
        data = DataSpec(uri=(tmp_path / name).as_uri(), format=form)  # type: ignore[arg-type]
        assert training_samples(job(data)).read([0]).shape == (1, 17)


LINES = [json.dumps({"text": text}) for text in documents(100)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (gzip.compress("\n".join(LINES).encode()), "is no text: .*b.jsonl is gzip: decompress it"),
        ("\n".join(LINES).encode("utf-16"), "is no text: .*b.jsonl is UTF-16: convert it to UTF-8"),
        ("\n".join(LINES).encode("utf-16-le"), r"b.jsonl byte 1: .* is no text: it begins with a NUL byte"),
        (b'{"text": "Gr\xf6\xdfe"}\n' * 9, r"b.jsonl byte 12: .* is no UTF-8"),
    ],
)
def test_lines_that_are_no_text_are_refused_before_the_first_step(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    (tmp_path / "b.jsonl").write_bytes(content)
    assert re.search(problem, refused(DataSpec(uri=tmp_path.as_uri(), format="jsonl")))


OF_AN_ARRAY = r"is no JSON object, but of an array: write each object on a line of its own, as jq -c '\.\[\]' does"


@pytest.mark.parametrize("before", ["", "\ufeff", " \n\n\t"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps([{"text": "x"}] * 900), rf"line 1: '.*\[\{{.*\.\.\. {OF_AN_ARRAY}"),
        (json.dumps([{"text": "x"}], indent=1), rf"line 1: '.*\[' {OF_AN_ARRAY}"),
        (json.dumps({"text": "x"}, indent=1), r"line 1: '.*\{' is no JSON \("),
        ('{"content": "x", "id": 1}\n', r"line 1: .* has no field 'text': it has \['content', 'id'\]"),
    ],
)
def test_what_is_no_line_of_its_own_is_named_before_the_first_step(
    tmp_path: Path, before: str, content: str, problem: str
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    (tmp_path / "b.json").write_text(before + content, encoding="utf-8")
    problem = problem.replace("line 1", f"line {1 + before.count(chr(10))}")
    with pytest.raises(DataError, match=rf"b\.json {problem}"):
        training_samples(job(DataSpec(uri=tmp_path.as_uri(), format="jsonl")))


@pytest.mark.parametrize("before", ["\ufeff", "\n \n"])
def test_lines_may_begin_with_a_mark_or_blank_ones(tmp_path: Path, before: str) -> None:
    found = []
    for name, content in (("a", LINES), ("b", [before + LINES[0], *LINES[1:]])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(content), encoding="utf-8")
        samples = training_samples(job(DataSpec(uri=path.as_uri(), format="jsonl"), batch=1, seq_len=8))
        found.append({tuple(row) for row in samples.read(range(len(LINES))).tolist()})
    assert len(found[0] & found[1]) > 0.8 * len(found[0])


def test_a_long_first_line_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": 1, "content": "x" * 200_000}) + "\n")
    with pytest.raises(DataError, match=r"line 1: .* has no field 'text': it has \['id', 'content'\]"):
        training_samples(job(DataSpec(uri=path.as_uri(), format="jsonl")))


def test_lines_that_are_far_are_looked_at(s3_uri: str, s3_environment: dict[str, str]) -> None:
    open_store(s3_uri).put("data/a.json", json.dumps([{"text": "x"}] * 900).encode())
    with pytest.raises(DataError, match=f"{s3_uri}/data/a.json line 1: .* {OF_AN_ARRAY}"):
        training_samples(job(DataSpec(uri=f"{s3_uri}/data", format="jsonl")))
