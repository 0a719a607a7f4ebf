"""Where documents begin, in whatever format they stand, of data that is seen document by document: the samples of
before, and borders that are those of the documents."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_ground import BATCH, WRITERS, documents, job, read, write_tokenizer
from data_ground import ids as ids_of_texts
from tokenizers import Tokenizer
from torch import Tensor

from shoal_planner.data_spec import DataSpec, SourceSpec
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_workers.borders import BEGINS
from shoal_workers.data import samples_of, training_samples
from shoal_workers.data_marks import DataMarks
from shoal_workers.errors import DataError
from shoal_workers.samples import batch, ids_of
from shoal_workers.tokenizing import end_token_of

SEQ_LEN = 64
NUM = 400
END = 300  # of `data_ground.ids`
FIRST_OF_SECOND = ids_of_texts(documents())[1000]  # of two files, in the middle of a document
OF_IDS = ("uint16", "uint32", "megatron")
KINDS = [
    (name, ids)
    for name in WRITERS
    for ids in ("bytes", "tokenizer")
    if (name, ids) not in (("uint16", "bytes"), ("uint32", "bytes"))  # which are refused
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small")


@pytest.fixture(params=KINDS, ids="-".join)
def spec(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Path) -> JobSpec:
    name, ids = request.param
    data = WRITERS[name](tmp_path / name, documents())
    if ids == "tokenizer":
        data = replace(data, tokenizer=str(tokenizer))
        if name in OF_IDS:
            end = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).id_to_token(END)
            data = replace(data, end_token=end)
    return job(replace(data, attention="document"), batch=BATCH, seq_len=SEQ_LEN)


def across(spec: JobSpec) -> JobSpec:
    return replace(spec, data=replace(spec.data, attention="sequence"))


def begins_of(rows: Tensor) -> Tensor:
    return rows <= ~BEGINS


def test_samples_are_those_of_before_and_only_first_tokens_are_others(spec: JobSpec) -> None:
    rows, before = (training_samples(one).read(range(NUM)) for one in (spec, across(spec)))
    assert torch.equal(ids_of(rows), ids_of(before))
    assert begins_of(rows).any()
    assert not (rows[begins_of(rows)] >= 0).any()
    rest = ~begins_of(rows)
    assert torch.equal(rows[rest], before[rest]), "what is learnt of a document does not change"


def test_borders_are_where_documents_begin(spec: JobSpec) -> None:
    """Behind each end token, and nowhere else but where a file begins."""
    rows = training_samples(spec).read(range(NUM))
    ids, begins = ids_of(rows), begins_of(rows)
    if spec.data.format == "text" and spec.data.tokenizer == "bytes":
        num_bytes = sum(len(text.encode()) for text in documents()) + len(documents()) - 2  # with line ends between
        whole = training_samples(spec).read(range((num_bytes - 1) // SEQ_LEN))
        assert int(begins_of(whole)[:, :-1].sum()) == 2, "of two files"
        return
    behind = torch.zeros_like(begins)
    behind[:, 1:] = ids[:, :-1] == (END if spec.data.format in ("tokens", "megatron") else end_token_of(spec))
    assert behind.sum() > (0 if spec.data.format == "text" else 20)
    assert not (behind & ~begins).any()
    others = ids[:, 1:][(begins & ~behind)[:, 1:]].tolist()
    assert set(others) <= ({FIRST_OF_SECOND} if spec.data.format == "tokens" else set())


def test_order_and_resume_are_those_of_before(spec: JobSpec) -> None:
    whole = torch.stack(read(spec, 1, 20, 1, DataMarks()))
    marks = DataMarks()
    parts = [*read(spec, 1, 7, 5, marks), *read(spec, 8, 13, 2, marks), *read(spec, 14, 20, 5, marks)]
    assert torch.equal(torch.stack(parts), whole)


def test_a_chat_is_a_document(tmp_path: Path) -> None:
    data = replace(WRITERS["chats"](tmp_path / "chats", documents()), attention="document")
    found = batch(training_samples(job(data, batch=4, seq_len=256)), range(40), torch.device("cpu"))
    assert found.borders is not None
    texts = [
        bytes(piece.tolist()).decode(errors="replace")
        for piece in found.tokens_BS.flatten().split(found.borders.lengths)
    ]
    first = "<|im_start|>user\nWhat of "
    begun = [text for text in texts if text[: len(first)] == first[: len(text)]]
    assert len(begun) > 20
    assert len(texts) - len(begun) <= 40, "the other pieces are what a sequence begins with in the middle of a chat"
    assert all(text.count("What of") <= 1 for text in texts)
    assert (found.tokens_BS < 256).all() and (found.tokens_BS >= 0).all()


def test_documents_of_several_sequences_and_of_none_are_found_in_an_index(tmp_path: Path) -> None:
    """As of sentences: the index says which of them are documents."""
    lengths = np.random.default_rng(1).integers(1, 9, 3000).astype(np.int32)
    firsts = np.unique(np.random.default_rng(2).integers(1, 3000, 700))
    numbers = np.concatenate(([0], firsts[:300], firsts[299:300], firsts[300:], [3000]))  # one has no sequence
    write_index(tmp_path, lengths, numbers)
    data = DataSpec(uri=(tmp_path / "a").as_uri(), format="megatron", attention="document")
    num_sequences = (int(lengths.sum()) - 1) // 32
    rows = training_samples(job(data, vocab=2**15, batch=1, seq_len=32)).read(range(num_sequences))
    found = ids_of(rows[:, :-1])[begins_of(rows[:, :-1])]  # each token says where it stands
    begins = np.concatenate(([0], np.cumsum(lengths)))[np.concatenate(([0], firsts))]
    assert sorted(found.tolist()) == [place for place in begins.tolist() if place < 32 * num_sequences]


def write_index(folder: Path, lengths: np.ndarray, documents_: np.ndarray) -> None:
    """Tokens count from zero, so each says where it stands."""
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 4
    np.arange(int(lengths.sum()), dtype=np.int32).tofile(folder / "a.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(lengths), len(documents_))
    parts = (lengths.tobytes(), starts.astype(np.int64).tobytes(), documents_.astype(np.int64).tobytes())
    (folder / "a.idx").write_bytes(head + b"".join(parts))


@pytest.mark.parametrize(
    ("documents_", "problem"),
    [
        ([0], r"a.idx in its head: 1 entries tell of no documents"),
        ([0, 90, 40, 200], r"a.idx documents 0 to 2: \[0, 90, 40\] is no order of sequences below 100"),
        ([0, 500, 900], r"a.idx documents 0 to 1: \[0, 500\] is no order of sequences below 100"),
    ],
)
def test_an_index_that_tells_of_no_documents_is_named(tmp_path: Path, documents_: list[int], problem: str) -> None:
    write_index(tmp_path, np.full(100, 40, np.int32), np.array(documents_))
    data = DataSpec(uri=(tmp_path / "a").as_uri(), format="megatron")
    training_samples(job(data, vocab=4096)).read(range(100))
    with pytest.raises(DataError, match=problem):
        training_samples(job(replace(data, attention="document"), vocab=4096)).read(range(100))


def test_an_index_is_among_the_files_that_a_job_keeps_to(tmp_path: Path) -> None:
    write_index(tmp_path, np.full(100, 40, np.int32), np.arange(101))
    data = DataSpec(uri=(tmp_path / "a").as_uri(), format="megatron")
    (before,), (row,) = (samples_of(job(one)).files for one in (data, replace(data, attention="document")))
    assert (before[1], row[1]) == (1, 2)


def test_a_mixture_has_the_borders_of_each(tmp_path: Path) -> None:
    sources = []
    for index, name in enumerate(("jsonl", "megatron")):
        (source,) = WRITERS[name](tmp_path / name, documents(seed=index)).sources
        sources.append(replace(source, weight=1.0))
    rows = training_samples(job(DataSpec(mix=tuple(sources), attention="document"), batch=BATCH)).read(range(100))
    ids = ids_of(rows)
    behind = (ids[:, :-1] == 0) | (ids[:, :-1] == END)
    assert torch.equal(begins_of(rows)[:, 1:], behind)
    assert {0, END} <= set(ids.flatten().tolist())


def test_what_goes_before_it_is_the_default_and_not_written_into_jobs() -> None:
    """So programs of a version that does not know the field read such jobs, and jobs of before are read as ever."""
    spec = job(DataSpec(uri="stdlib:"))
    assert spec.data.attention == "sequence"
    mapping = job_to_mapping(spec)
    assert "attention" not in mapping["data"]  # type: ignore[operator]
    assert parse_job(mapping) == spec
    apart = replace(spec, data=replace(spec.data, attention="document"))
    assert parse_job(job_to_mapping(apart)) == apart != spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": {"uri": "stdlib:", "attention": "block"}},
            "data.attention = 'block': must be one of sequence, document",
        ),
        (
            {"data": {"uri": "file:///a", "format": "tokens", "attention": "document"}},
            "data.tokenizer = 'bytes': must be that of the ids: with attention 'document' its end token tells where",
        ),
        (
            {"data": {"mix": [{"uri": "file:///a", "format": "tokens"}], "attention": "document"}},
            "data.tokenizer = 'bytes': must be that of the ids",
        ),
        (
            {"data": {"mix": [{"uri": "file:///a", "attention": "document"}]}},
            "data.mix[0].attention = 'document': is not a known field",
        ),
        (
            {"data": {"uri": "stdlib:", "attention": "document"}, "model": {"entrypoint": "models:build"}},
            "data.attention = 'document': is not for modules of your own",
        ),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_job(job_to_mapping(job(DataSpec(uri="stdlib:"))) | change)
    assert message in str(caught.value)


def test_half_of_a_mixture_by_document_is_no_mixture(tmp_path: Path) -> None:
    """The borders of a batch are those of all its rows, whatever their source."""
    (tmp_path / "a.txt").write_text("x" * 5000)
    (jsonl,) = WRITERS["jsonl"](tmp_path / "jsonl", documents()).sources
    text = SourceSpec(uri=(tmp_path / "a.txt").as_uri())
    samples = training_samples(job(DataSpec(mix=(jsonl, text), attention="document"), batch=BATCH))
    found = batch(samples, range(20), torch.device("cpu"))
    assert found.borders is not None
    assert sum(found.borders.lengths) == 20 * 16
