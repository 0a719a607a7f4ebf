"""Documents that are null, and chats without messages, are passed over as empty lines are, and that is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
import torch
from data_ground import BATCH, STEPS, chats, documents, job, read

from shoal_planner.data_spec import DataSpec
from shoal_workers.data import training_samples
from shoal_workers.data_marks import DataMarks
from shoal_workers.documents import Encoder, Raw
from shoal_workers.errors import DataError
from shoal_workers.tokenizing import ByteTokenizer


def with_empty(values: Sequence[Any], empty: Sequence[Any], every: int = 7) -> list[Any]:
    """One of the empty ones in turn before each so many, and many at the beginning and the end."""
    found = [empty[index % len(empty)] for index in range(40)]
    for index, value in enumerate(values):
        if index % every == 0:
            found.append(empty[index // every % len(empty)])
        found.append(value)
    return found + list(empty)


def write_lines(path: Path, lines: Sequence[str]) -> str:
    path.write_text("\n".join(lines))
    return path.as_uri()


def write_parquet(path: Path, column: str, values: Sequence[Any]) -> str:
    pq.write_table(pa.table({column: values}), path, row_group_size=50)
    return path.as_uri()


def write_arrow(path: Path, column: str, values: Sequence[Any]) -> str:
    table = pa.table({column: values})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    return path.as_uri()


def as_lines(column: str, values: Sequence[Any]) -> list[str]:
    return [json.dumps({column: value}) for value in values]


TEXTS, CHATS = documents(300), chats(documents(150))
DATA: dict[str, Callable[[Path], DataSpec]] = {
    "jsonl": lambda path: DataSpec(
        uri=write_lines(path, with_empty(as_lines("text", TEXTS), ['{"text": null}', "null"])), format="jsonl"
    ),
    "chats": lambda path: DataSpec(
        uri=write_lines(path, with_empty(as_lines("messages", CHATS), as_lines("messages", [None, [], "[]"]))),
        format="jsonl",
        template="chatml",
    ),
    "parquet": lambda path: DataSpec(uri=write_parquet(path, "text", with_empty(TEXTS, [None])), format="parquet"),
    "parquet-chats": lambda path: DataSpec(
        uri=write_parquet(path, "messages", with_empty(CHATS, [None, []])), format="parquet", template="chatml"
    ),
    "arrow": lambda path: DataSpec(uri=write_arrow(path, "text", with_empty(TEXTS, [None])), format="arrow"),
    "arrow-chats": lambda path: DataSpec(
        uri=write_arrow(path, "messages", with_empty([json.dumps(chat) for chat in CHATS], [None, "", " [] "])),
        format="arrow",
        template="chatml",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_one_order_for_any_ranks_after_resumes_and_changes_of_plan(tmp_path: Path, name: str) -> None:
    spec = job(DATA[name](tmp_path / "data"), batch=BATCH)
    whole = torch.stack(read(spec, 1, STEPS, 1, DataMarks()))
    for num_ranks in (2, 5):
        assert torch.equal(torch.stack(read(spec, 1, STEPS, num_ranks, DataMarks())), whole)
    marks = DataMarks()
    parts = [*read(spec, 1, 13, 5, marks), *read(spec, 14, 30, 2, marks), *read(spec, 31, STEPS, 5, marks)]
    assert torch.equal(torch.stack(parts), whole)
    assert torch.equal(torch.stack(read(spec, 50, 55, 2, DataMarks())), whole[49:55]), "without any mark"


@pytest.mark.parametrize("empty", ['{"text": null}', "null"])
def test_they_give_what_empty_lines_do(tmp_path: Path, empty: str) -> None:
    found = []
    for index, line in enumerate((empty, " " * len(empty))):
        uri = write_lines(tmp_path / f"{index}.jsonl", with_empty(as_lines("text", TEXTS), [line]))
        found.append(training_samples(job(DataSpec(uri=uri, format="jsonl"))).read(range(3000)))
    assert torch.equal(*found)


def raw(content: object, place: int = 0) -> Raw:
    return Raw(content, place, "a.jsonl", f"line {place + 1}")


def test_an_empty_text_is_a_document() -> None:
    encoder = Encoder(ByteTokenizer(), None)
    found = encoder.encode([raw("a"), raw(None, 1), raw("", 2), raw(None, 3)])
    assert [(one.place, one.ids.tolist()) for one in found] == [(0, [97, 0]), (2, [0])]
    assert encoder.encode([raw(None)]) == []


def test_they_are_counted_and_told_at_first_and_when_they_are_ten_times_as_many() -> None:
    encoder = Encoder(ByteTokenizer(), None)
    with structlog.testing.capture_logs() as logs:
        encoder.encode([raw("a")])
        assert not logs
        for place in range(120):
            encoder.encode([raw(None, place), raw("a", place)])
    assert [(said["log_level"], said["num_documents"]) for said in logs] == [
        ("warning", 1),
        ("warning", 10),
        ("warning", 100),
    ]
    assert {said["file"] for said in logs} == {"a.jsonl"}


def test_nothing_is_read_to_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = write_lines(tmp_path / "a.jsonl", [*as_lines("text", TEXTS[:9]), "null", *as_lines("text", TEXTS[:9])])
    monkeypatch.setattr("shoal_workers.lines._Line.__str__", lambda self: pytest.fail("lines are counted"))
    with structlog.testing.capture_logs() as logs:
        training_samples(job(DataSpec(uri=uri, format="jsonl"), batch=1)).read(range(3000))
    assert logs[0]["num_documents"] == 1


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow"])
def test_data_of_nothing_else_is_named(tmp_path: Path, name: str) -> None:
    values = [None] * 500
    path = tmp_path / "data"
    match name:
        case "jsonl":
            uri = write_lines(path, as_lines("text", values))
        case "parquet":
            uri = write_parquet(path, "text", pa.array(values, pa.string()))
        case _:
            uri = write_arrow(path, "text", pa.array(values, pa.string()))
    with pytest.raises(DataError, match="all documents together have nothing to learn from"):
        training_samples(job(DataSpec(uri=uri, format=name))).read([0])  # type: ignore[arg-type]


def test_the_field_is_looked_for_in_the_first_line_that_is_there(tmp_path: Path) -> None:
    uri = write_lines(tmp_path / "a.jsonl", ["null", '{"text": null}', "", '{"content": "x"}'])
    with pytest.raises(DataError, match=r"line 4: .* has no field 'text'"):
        training_samples(job(DataSpec(uri=uri, format="jsonl")))
