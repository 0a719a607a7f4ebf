"""What cannot be read is named: the file, the line, row or token, and what stands there."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_ground import WRITERS, chats, documents, job, write_arrow, write_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal_planner.data_spec import DataSpec
from shoal_planner.errors import InvalidField
from shoal_workers.data import training_samples
from shoal_workers.errors import DataError


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "cut', r"line 118: '{\"text\": \"cut' is no JSON \("),
        ("[1, 2]", r"line 118: '\[1, 2\]' is no JSON object"),
        ('{"txt": "x"}', r"""line 118: '{"txt": "x"}' has no field 'text'"""),
        ('{"text": 5}', r"line 118: 5 is no text"),
        ('{"text": [null]}', r"line 118: \[None\] is no text$"),
        ('{"text": [{"role": "user"}]}', r"line 118: .* is no text; for chats say data.template"),
        ('{"messages": []}', r"line 118: .* has no field 'text': it has \['messages'\]; for chats say data.template"),
        ("\x00\x01" * 60, r"line 118: '\\x00.*\.\.\. is no JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    lines = [json.dumps({"text": text}) for text in documents(300)]
    lines[117] = line
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    samples = training_samples(job(DataSpec(uri=path.as_uri(), format="jsonl")))
    for _ in range(2):  # it stays so: nothing is passed over in a second attempt
        with pytest.raises(DataError, match=f"{path} {problem}") as caught:
            samples.read(range(4000))
        assert caught.value.file == str(path)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "is no list of messages"),
        ({}, "is no list of messages"),
        ("[", "is no list of messages"),
        ([{"role": "user"}], "has a message 0 whose content is no text: None"),
        (["hello"], "has as message 0 no mapping of role and content"),
    ],
)
def test_a_broken_chat_is_named(tmp_path: Path, messages: object, problem: str) -> None:
    every: list[object] = [*chats(documents(20)), messages]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"messages": one}) for one in every))
    samples = training_samples(job(DataSpec(uri=path.as_uri(), format="jsonl", template="chatml"), batch=1))
    with pytest.raises(DataError, match=f"line 21: .* {problem}"):
        samples.read(range(2000))


def test_a_row_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [*[None] * 50, b"x", *[None] * 50]}), path)
    with pytest.raises(DataError, match=f"{path} row 51: b'x' is no text"):
        training_samples(job(DataSpec(uri=path.as_uri(), format="parquet"))).read(range(2000))


@pytest.mark.parametrize("name", ["uint16", "uint32", "megatron"])
def test_a_wrong_id_is_named(tmp_path: Path, name: str) -> None:
    data = WRITERS[name](tmp_path / name, documents(30))
    path = tmp_path / name / "a.bin"
    found = np.fromfile(path, dtype=np.uint32 if name == "uint32" else np.uint16)
    found[123] = 65_000
    found.tofile(path)
    with pytest.raises(DataError, match=f"{path} token 123: 65000 is not below model.vocab 512"):
        training_samples(job(data)).read(range(4000))


Spoil = Callable[[Path], None]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def cut_off(path: Path) -> None:
    os.truncate(path, 900)


@pytest.mark.parametrize(
    ("name", "file", "spoil", "problem"),
    [
        ("parquet", "b.parquet", cut, "b.parquet is no whole Parquet file"),
        (
            "arrow",
            "data-00000-of-00002.arrow",
            lambda path: os.truncate(path, 900),
            "is no whole Arrow stream: at byte",
        ),
        ("arrow", "data-00001-of-00002.arrow", Path.unlink, "data-00001-of-00002.arrow is not there, or empty"),
        ("arrow", "state.json", lambda path: path.write_text("{}"), "state.json does not name its files"),
        ("uint16", "b.bin", cut, "is no file of uint16: .*b.bin has"),
        ("megatron", "a.bin", cut, "a.bin has .* bytes, and its index tells of"),
        ("megatron", "a.idx", cut, "a.idx is cut short"),
        ("megatron", "a.idx", lambda path: path.write_bytes(b"x" * 100), "a.idx is no index of version 1"),
        ("megatron", "a.idx", lambda path: path.write_bytes(b"x"), "a.idx has 1 bytes, which is no whole head"),
        ("megatron", "a.idx", Path.unlink, "does not exist"),
    ],
)
def test_a_file_that_is_not_whole_is_named_before_training(
    tmp_path: Path, name: str, file: str, spoil: Spoil, problem: str
) -> None:
    data = WRITERS[name](tmp_path / name, documents())
    spoil(tmp_path / name / file)
    with pytest.raises(InvalidField, match=problem):
        training_samples(job(data))


@pytest.mark.parametrize("name", ["text", "uint16", "jsonl"])
def test_a_file_that_is_cut_short_meanwhile_is_named(tmp_path: Path, name: str) -> None:
    samples = training_samples(job(WRITERS[name](tmp_path / name, documents())))
    file = next(path for path in sorted((tmp_path / name).rglob("*")) if path.is_file())
    os.truncate(file, 100)
    with pytest.raises(DataError, match=f"{file} at byte .* it was cut short"):
        samples.read(range(5000))


def test_columns_and_datasets_that_are_not_there_are_named(tmp_path: Path) -> None:
    for name in ("parquet", "arrow"):
        data = WRITERS[name](tmp_path / name, documents())
        with pytest.raises(InvalidField, match=r"has no column 'content': .* has .*text"):
            training_samples(job(replace(data, field="content")))
    pq.write_table(pa.table({"conversations": [[{"from": "human"}]]}), tmp_path / "chats.parquet")
    with pytest.raises(InvalidField, match=r"has no column 'text': .* has conversations; for chats say data.template"):
        training_samples(job(DataSpec(uri=(tmp_path / "chats.parquet").as_uri(), format="parquet")))
    write_arrow(tmp_path / "both" / "train", documents())
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InvalidField, match=r"has several datasets: name one of them, as in file:.*/both/train"):
        training_samples(job(DataSpec(uri=(tmp_path / "both").as_uri(), format="arrow")))


def test_tokenizers_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    data = WRITERS["jsonl"](tmp_path / "data", documents())
    folder = write_tokenizer(tmp_path / "small")
    with pytest.raises(InvalidField, match=r"model.vocab = 300: is too small for .*small, whose largest id is 399"):
        training_samples(job(replace(data, tokenizer=str(folder)), vocab=300))
    with pytest.raises(InvalidField, match=r"data.end_token = '<none>': is no token of"):
        training_samples(job(replace(data, tokenizer=str(folder), end_token="<none>")))
    with pytest.raises(InvalidField, match=r"data.tokenizer = .*nowhere': cannot be read"):
        training_samples(job(replace(data, tokenizer=str(tmp_path / "nowhere"))))
    slow = tmp_path / "slow"
    slow.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (slow / name).write_text("{}")
    with pytest.raises(
        InvalidField, match=r"vocab.json and merges.txt stand there, but no tokenizer.json.*save_pretrained"
    ):
        training_samples(job(replace(data, tokenizer=str(slow))))
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(InvalidField, match=r"wrong.json is no tokenizers file"):
        training_samples(job(replace(data, tokenizer=str(tmp_path / "wrong.json"))))
    with pytest.raises(InvalidField, match=r"data.template = 'tokenizer': cannot be had"):
        chat = WRITERS["chats"](tmp_path / "chats", documents())
        training_samples(job(replace(chat, template="tokenizer", tokenizer=str(folder))))


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow", "uint16", "megatron"])
def test_places_without_data_are_named(tmp_path: Path, name: str) -> None:
    data = WRITERS[name](tmp_path / name, documents())
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidField, match=r"data.uri = 'file:.*/empty': ") as caught:
        training_samples(job(replace(data, uri=(tmp_path / "empty").as_uri())))
    assert caught.value.field == "data.uri"


def test_trouble_of_the_node_is_none_of_the_data(tmp_path: Path) -> None:
    """A process that may open no more files reads none, and the next one may."""
    for name in ("parquet", "arrow", "jsonl"):
        samples = training_samples(job(WRITERS[name](tmp_path / name, documents())))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = [os.open("/dev/null", os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                samples.read(range(100))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            os.close(held[0])
        assert samples.read(range(100)).shape == (100, 17)


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tokenizer = write_tokenizer(tmp_path / "small")
    path.write_text('{"text": "cut \\ud83d here"}\n' * 2)
    data = DataSpec(uri=path.as_uri(), format="jsonl", tokenizer=str(tokenizer))
    found = training_samples(job(data, batch=1)).read([0])
    path.write_text('{"text": "cut \\ufffd here"}\n' * 2)
    assert torch.equal(training_samples(job(data, batch=1)).read([0]), found)


def test_text_that_a_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"known": 0, "<|endoftext|>": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "known"}\n' * 5 + '{"text": "strange"}\n' + '{"text": "known"}\n' * 20)
    data = DataSpec(uri=path.as_uri(), format="jsonl", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"line 6: 'strange' cannot be tokenised: .*UNK"):
        training_samples(job(data, batch=1, seq_len=4)).read(range(40))


def test_a_negative_id_is_named_as_it_stands(tmp_path: Path) -> None:
    data = WRITERS["megatron"](tmp_path / "data", documents(30))
    wide = np.fromfile(tmp_path / "data" / "a.bin", dtype=np.uint16).astype(np.int32)
    wide[55] = -1
    wide.tofile(tmp_path / "data" / "a.bin")
    index = bytearray((tmp_path / "data" / "a.idx").read_bytes())
    index[17] = 4  # int32
    (count,) = struct.unpack_from("<Q", index, 18)
    starts = np.frombuffer(bytes(index), np.int64, count, 34 + 4 * count) * 2
    index[34 + 4 * count : 34 + 12 * count] = starts.tobytes()
    (tmp_path / "data" / "a.idx").write_bytes(index)
    with pytest.raises(DataError, match="token 55: -1 is not below"):
        training_samples(job(data)).read(range(4000))
