"""Whatever data is made of, the order of samples is one: for any number of ranks, after a resume, and when the plan
changes in the middle of a pass over the data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_ground import BATCH, STEPS, WRITERS, documents, job, read, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.data_spec import DataSpec
from shoal_planner.job import JobSpec
from shoal_workers.data import evaluation_samples, training_samples
from shoal_workers.data_cache import DataCache
from shoal_workers.data_marks import DataMarks
from shoal_workers.streams import BlockOrder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small")


@pytest.fixture(params=[(name, ids) for name in WRITERS for ids in ("bytes", "tokenizer")], ids="-".join)
def spec(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Path) -> JobSpec:
    name, ids = request.param
    data = WRITERS[name](tmp_path / name, documents())
    return job(data if ids == "bytes" else replace(data, tokenizer=str(tokenizer)), batch=BATCH)


def test_one_order_for_any_ranks_after_resumes_and_changes_of_plan(spec: JobSpec) -> None:
    whole = torch.stack(read(spec, 1, STEPS, 1, DataMarks()))
    assert whole.shape == (STEPS, BATCH, 17)
    for num_ranks in (2, 5):
        assert torch.equal(torch.stack(read(spec, 1, STEPS, num_ranks, DataMarks())), whole)
    marks = DataMarks()
    parts = [*read(spec, 1, 13, 5, marks), *read(spec, 14, 30, 2, marks), *read(spec, 31, 47, 5, marks)]
    parts += read(spec, 48, STEPS, 1, marks)
    assert torch.equal(torch.stack(parts), whole)
    redone = read(spec, 41, 47, 2, marks)
    assert torch.equal(torch.stack(redone), whole[40:47]), "steps that are done again"
    assert torch.equal(torch.stack(read(spec, 50, 55, 2, DataMarks())), whole[49:55]), "without any mark"


def test_another_seed_is_another_order(spec: JobSpec) -> None:
    other = replace(spec, train=replace(spec.train, seed=6))
    assert not torch.equal(training_samples(spec).read(range(40)), training_samples(other).read(range(40)))


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow"])
def test_each_pass_reads_each_document_once(tmp_path: Path, name: str) -> None:
    texts = documents()
    data = WRITERS[name](tmp_path / name, texts)
    samples = training_samples(job(data, batch=1, seq_len=8))
    tokens: list[int] = []
    wanted = Counter(text.encode() for text in texts)
    seen: Counter[bytes] = Counter()
    rows = samples.read(range(sum(map(len, texts)) // 8))
    for row in rows:
        tokens += [token if token >= 0 else ~token for token in row.tolist()[:-1]]
    for document in bytes(tokens).split(b"\x00"):
        seen[document] += document in wanted
    # All but those at the borders of blocks, of which ends are dropped, and what the second pass has begun with.
    assert sum(min(seen[text], 1) for text in wanted) > 0.9 * len(wanted)
    assert max(seen.values()) <= 2


def test_a_far_jump_uses_what_the_node_noted(tmp_path: Path) -> None:
    spec = job(WRITERS["jsonl"](tmp_path / "data", documents()), batch=BATCH)
    cache = DataCache(tmp_path / "cache", 2**20)
    samples = training_samples(spec, cache)
    wanted = samples.read(range(3000))[2990:]
    again = training_samples(spec, cache)
    read: list[int] = []
    blocks = again._ahead._blocks  # type: ignore[attr-defined]
    chunk = blocks.read
    blocks.read = lambda block, place: read.append(block) or chunk(block, place)
    assert torch.equal(again.read(range(2990, 3000)), wanted)
    assert len(read) <= 2 * BATCH, "whole blocks are passed over"


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow", "chats"])
def test_what_is_held_out_is_never_trained_on(tmp_path: Path, name: str) -> None:
    spec = job(WRITERS[name](tmp_path / name, documents(800)), batch=4, seq_len=160, eval_every=5, eval_batches=2)
    held_out = evaluation_samples(spec)
    assert held_out is not None
    held = held_out.read(range(8))
    assert torch.equal(held, torch.cat([evaluation_samples(spec).read([number]) for number in range(8)]))  # type: ignore[union-attr]
    trained = {tuple(row) for row in training_samples(spec).read(range(2000)).tolist()}
    assert not trained & {tuple(row) for row in held.tolist()}
    assert len({tuple(row) for row in held.tolist()}) == 8


def test_documents_of_their_own_to_evaluate_on(tmp_path: Path) -> None:
    data = WRITERS["jsonl"](tmp_path / "train", documents())
    held = WRITERS["jsonl"](tmp_path / "eval", documents(50, seed=9))
    spec = job(replace(data, eval_uri=held.uri), batch=4, eval_every=5, eval_batches=2)
    held_out = evaluation_samples(spec)
    assert held_out is not None
    assert held_out.read(range(8)).shape == (8, 17)
    plain = job(data, batch=4)
    assert torch.equal(training_samples(spec).read(range(30)), training_samples(plain).read(range(30)))


@given(
    num_blocks=st.integers(2, 400),
    batch=st.integers(1, 64),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_streams_share_out_each_pass(num_blocks: int, batch: int, seed: int, data: st.DataObject) -> None:
    held_out = data.draw(st.integers(0, num_blocks // 2))
    order = BlockOrder(num_blocks=num_blocks, global_batch=batch, seed=seed, held_out=held_out)
    held = BlockOrder(num_blocks=num_blocks, global_batch=batch, seed=seed, held_out=held_out, evaluation=True)
    turns = [order.block(place % order.num_streams, place // order.num_streams) for place in range(2 * order.num_read)]
    first, second = turns[: order.num_read], turns[order.num_read :]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == order.num_read == num_blocks - held_out
    if held_out:
        out = {held.block(place % held.num_streams, place // held.num_streams) for place in range(held_out)}
        assert out.isdisjoint(first)
        assert len(out) == held_out


def test_data_of_a_single_document_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n')
    samples = training_samples(job(DataSpec(uri=(tmp_path / "a.jsonl").as_uri(), format="jsonl"), batch=2))
    rows = samples.read(range(2))
    assert rows[0].tolist() == [~ord("s"), *b"hort", 0, *[~0] * 11], "its begin and what fills it up are no targets"
    assert torch.equal(rows[0], rows[1])
