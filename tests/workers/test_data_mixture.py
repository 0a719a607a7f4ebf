"""A mixture keeps its weights, reads each source in its own order, and is the same for any ranks and plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_ground import BATCH, STEPS, WRITERS, documents, job, read
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.data_spec import DataSpec, SourceSpec
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_workers.data import evaluation_samples, training_samples
from shoal_workers.data_marks import DataMarks
from shoal_workers.mixture import Round


@given(
    weights=st.lists(st.floats(0.02, 50.0), min_size=1, max_size=6),
    batch=st.integers(1, 1024) | st.sampled_from([10_007, 10_009, 20_014, 65_536]),
    seed=st.integers(0, 2**63),
    first=st.integers(0, 10**9),
)
def test_weights_hold_within_one_percent_from_anywhere(weights: list[float], batch: int, seed: int, first: int) -> None:
    turns = Round(weights, batch, seed)
    for source, weight in enumerate(weights):
        share = (turns.before(first + 10_000, source) - turns.before(first, source)) / 10_000
        assert abs(share - weight / sum(weights)) < 0.01 * max(weight / sum(weights), 0.05)


@given(
    weights=st.lists(st.floats(0.02, 50.0), min_size=1, max_size=4),
    batch=st.integers(1, 40) | st.just(10_007),
    seed=st.integers(0, 2**63),
)
def test_how_often_a_source_came_is_computed_as_it_is_counted(weights: list[float], batch: int, seed: int) -> None:
    turns = Round(weights, batch, seed)
    every: Counter[int] = Counter()
    by_slot: Counter[tuple[int, int]] = Counter()
    for number in range(600):
        source = turns.source(number)
        assert turns.before(number, source) == every[source]
        assert turns.before_in_slot(number, source) == by_slot[source, number % batch]
        every[source] += 1
        by_slot[source, number % batch] += 1


def test_every_slot_meets_every_source() -> None:
    turns = Round([0.7, 0.25, 0.05], 512, 3)
    for slot in range(0, 512, 37):
        found = Counter(turns.source(slot + 512 * step) for step in range(2000))
        assert [found[source] / 2000 for source in range(3)] == pytest.approx([0.7, 0.25, 0.05], abs=0.01)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    sources = []
    for index, (name, weight) in enumerate((("jsonl", 3.0), ("uint16", 2.0), ("chats", 1.0), ("text", 0.5))):
        data = WRITERS[name](tmp_path / name, documents(seed=index))
        (source,) = data.sources
        sources.append(replace(source, weight=weight))
    return job(DataSpec(mix=tuple(sources)), batch=BATCH)


def test_one_order_for_any_ranks_after_resumes_and_changes_of_plan(spec: JobSpec) -> None:
    whole = torch.stack(read(spec, 1, STEPS, 1, DataMarks()))
    assert torch.equal(torch.stack(read(spec, 1, STEPS, 5, DataMarks())), whole)
    marks = DataMarks()
    parts = [*read(spec, 1, 22, 5, marks), *read(spec, 23, 40, 2, marks), *read(spec, 41, STEPS, 3, marks)]
    assert torch.equal(torch.stack(parts), whole)
    assert len(marks.at(40)[0]) == 6, "with the number of the source in front"


def test_sources_have_their_shares_and_their_own_order(spec: JobSpec) -> None:
    turns = Round([3.0, 2.0, 1.0, 0.5], BATCH, spec.train.seed)
    rows = training_samples(replace(spec, train=replace(spec.train, seq_len=64))).read(range(1000))
    of_tokens = [index for index in range(1000) if turns.source(index) == 1]
    assert len(of_tokens) == pytest.approx(1000 * 2.0 / 6.5, abs=3)
    assert len({tuple(rows[index].tolist()) for index in of_tokens}) == len(of_tokens), "none twice in a pass"


def test_some_of_every_source_is_held_out(spec: JobSpec) -> None:
    evaluating = replace(spec, train=replace(spec.train, eval_every=5, eval_batches=3))
    held_out = evaluation_samples(evaluating)
    assert held_out is not None
    assert held_out.read(range(30)).shape == (30, 17)


def test_a_mixture_is_written_and_read() -> None:
    mix = (SourceSpec(uri="s3://b/a.jsonl", format="jsonl", weight=2.0), SourceSpec(uri="stdlib:"))
    spec = job(DataSpec(mix=mix))
    assert parse_job(job_to_mapping(spec)) == spec


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data.uri = None: is required, unless there is a mix"),
        ({"uri": "stdlib:", "mix": [{"uri": "stdlib:"}]}, "data.uri = 'stdlib:': cannot stand beside a mix"),
        ({"mix": [{"uri": "stdlib:", "weight": 0}]}, "data.mix[0].weight = 0.0: must be more than zero"),
        ({"mix": [{"uri": "stdlib:", "weight": -1}]}, "data.mix[0].weight = -1.0: must be more than zero"),
        ({"mix": [{"uri": "stdlib:"}, {"weight": 1}]}, "data.mix[1].uri = None: is required"),
        ({"mix": [{"uri": "stdlib:"}], "format": "jsonl"}, "data.format = 'jsonl': of no use beside a mix"),
        ({"uri": "file:///a", "format": "csv"}, "data.format = 'csv': must be one of text, jsonl, parquet"),
        ({"uri": "file:///a", "field": "text"}, "data.field = 'text': is of no use with format 'text'"),
        ({"uri": "file:///a", "template": "chatml"}, "data.template = 'chatml': is of no use with format 'text'"),
        ({"uri": "file:///a", "token_type": "uint32"}, "data.token_type = 'uint32': is of no use but with"),
        ({"uri": "file:///a.parquet"}, "data.uri = 'file:///a.parquet': is no text: say format: parquet"),
        (
            {"uri": "file:///a", "eval_uri": "ftp://a"},
            "data.eval_uri = 'ftp://a': must be an absolute path, or begin with",
        ),
        ({"uri": "stdlib:", "format": "jsonl"}, "data.uri = 'stdlib:': is text, not jsonl"),
        ({"uri": "file:///a", "end_token": "</s>"}, "data.end_token = '</s>': needs a tokenizer"),
        (
            {"mix": [{"uri": "file:///a", "format": "jsonl", "template": "tokenizer"}]},
            "data.mix[0].template = 'tokenizer': needs a tokenizer that has one",
        ),
    ],
)
def test_fields_that_cannot_be_used_are_named(data: dict[str, object], message: str) -> None:
    document = job_to_mapping(job(DataSpec(uri="stdlib:")))
    with pytest.raises(InvalidField) as caught:
        parse_job(document | {"data": data})
    assert message in str(caught.value)


def test_data_of_ids_needs_no_room_for_bytes() -> None:
    assert job(DataSpec(uri="file:///a.bin", format="tokens"), vocab=50).model.vocab == 50
    with pytest.raises(InvalidField, match="must be at least 256"):
        job(DataSpec(uri="file:///a.txt"), vocab=50)


def test_a_source_that_would_never_be_read_is_refused() -> None:
    uris = ("file:///a", "file:///b")
    with pytest.raises(InvalidField, match=r"mix\[1\].weight = 0.3: must be at least 0.0002 of all weights"):
        DataSpec(mix=tuple(SourceSpec(uri=uri, weight=weight) for uri, weight in zip(uris, (8e3, 0.3), strict=True)))
    least = DataSpec(
        mix=tuple(SourceSpec(uri=uri, weight=weight) for uri, weight in zip(uris, (4999.0, 1.0), strict=True))
    )
    turns = Round([source.weight for source in least.mix], 8, 5)
    assert turns.before(10_007, 1) >= 1
