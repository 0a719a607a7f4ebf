"""The order of samples is a permutation per pass that only the seed decides; bad places are named."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runs import job
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.errors import InvalidField
from shoal_planner.job import DataSpec, JobSpec
from shoal_workers.data import evaluation_samples, open_samples, training_samples
from shoal_workers.permutation import Permutation

COUNTING = "".join(f"{number:02}" for number in range(100)).encode()  # no ten bytes of it stand there twice


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64))
def test_permutation_is_a_bijection(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(map(permutation, range(size))) == list(range(size))


def test_permutation_mixes_and_seeds_differ() -> None:
    one, other = ([Permutation(1000, seed)(number) for number in range(1000)] for seed in (1, 2))
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 20
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(one)) < 20, "neighbours do not stay neighbours"


def test_every_pass_takes_every_sequence_once_in_another_order(tmp_path: Path) -> None:
    text = COUNTING
    path = tmp_path / "text"
    path.write_bytes(text)
    samples = open_samples(DataSpec(uri=path.as_uri()), 9, seed=3)
    assert samples.num_sequences == 22
    passes = [[bytes(row.tolist()) for row in samples.read(range(turn * 22, (turn + 1) * 22))] for turn in range(3)]
    expected = Counter(text[place * 9 : place * 9 + 10] for place in range(22))
    assert all(Counter(rows) == expected for rows in passes)
    assert passes[0] != passes[1] != passes[2]


def test_sample_is_the_same_alone_and_in_company(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"world, " * 50)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c").write_bytes(b"hello " * 3)
    (tmp_path / "empty").touch()
    samples = open_samples(DataSpec(uri=tmp_path.as_uri()), 16, seed=0)
    together = samples.read([5, 0, 3])
    assert together.shape == (3, 17)
    assert together.dtype == torch.int64
    assert torch.equal(together, torch.cat([samples.read([number]) for number in (5, 0, 3)]))


def test_folder_is_one_text_in_the_order_of_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"BBBB")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z").write_bytes(b"AAAA")
    (tmp_path / "whole").mkdir()
    folder = open_samples(DataSpec(uri=(tmp_path).as_uri()), 3, seed=0)
    (tmp_path / "whole" / "all").write_bytes(b"AAAABBBB")
    whole = open_samples(DataSpec(uri=(tmp_path / "whole").as_uri()), 3, seed=0)
    assert folder.digest == whole.digest
    assert torch.equal(folder.read([0, 1]), whole.read([0, 1]))


def test_standard_library_is_enough_to_train_on() -> None:
    samples = open_samples(DataSpec(uri="stdlib:"), 128, seed=0)
    assert samples.num_sequences > 20_000
    rows = samples.read(range(64))
    assert 0 <= int(rows.min()) <= int(rows.max()) < 256
    again = open_samples(DataSpec(uri="stdlib:"), 128, seed=0)
    assert again.digest == samples.digest
    assert torch.equal(again.read(range(64)), rows)


def evaluating(uri: str, *, batches: int, eval_uri: str | None = None) -> JobSpec:
    spec = job()
    train = replace(spec.train, global_batch=2, seq_len=9, eval_every=1, eval_batches=batches, seed=3)
    return replace(spec, data=DataSpec(uri=uri, eval_uri=eval_uri), train=train)


def test_what_is_held_out_is_always_the_same_and_never_trained_on(tmp_path: Path) -> None:
    text = COUNTING
    path = tmp_path / "text"
    path.write_bytes(text)
    spec = evaluating(path.as_uri(), batches=3)
    held_out = evaluation_samples(spec)
    assert held_out is not None
    held = Counter(bytes(row.tolist()) for row in held_out.read(range(6)))
    whole = Counter(text[place * 9 : place * 9 + 10] for place in range(22))
    samples = training_samples(spec)
    passes = [Counter(bytes(row.tolist()) for row in samples.read(range(turn * 16, turn * 16 + 16))) for turn in (0, 1)]
    assert passes == [whole - held] * 2
    assert len(held) == 6
    assert any(a != b + 1 for a, b in itertools.pairwise(sorted(text.find(row) // 9 for row in held))), (
        "not one piece of text"
    )


def test_a_text_of_its_own_to_evaluate_on_leaves_training_as_it_is(tmp_path: Path) -> None:
    for name, size in (("train", 200), ("eval", 55)):
        (tmp_path / name).write_bytes(COUNTING[:size])
    spec = evaluating((tmp_path / "train").as_uri(), batches=3, eval_uri=(tmp_path / "eval").as_uri())
    held_out = evaluation_samples(spec)
    assert held_out is not None
    found = [COUNTING.find(bytes(row.tolist())) for row in held_out.read(range(6))]
    assert sorted(found) == [0, 9, 18, 27, 36, 45]
    plain = open_samples(spec.data, 9, seed=3)
    assert torch.equal(training_samples(spec).read(range(30)), plain.read(range(30)))
    more = replace(spec, train=replace(spec.train, eval_batches=4))
    with pytest.raises(InvalidField, match="has too little text for 8 sequences of 9 tokens") as caught:
        evaluation_samples(more)
    assert caught.value.field == "data.eval_uri"
    with pytest.raises(InvalidField, match="has too little text for 23 sequences of 9 tokens") as caught:
        training_samples(evaluating((tmp_path / "train").as_uri(), batches=11))
    assert caught.value.field == "data.uri"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [("missing", None, "does not exist"), ("empty", b"", "too little text"), ("short", b"x" * 16, "too little text")],
)
def test_unusable_data_is_named(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidField, match=problem) as caught:
        open_samples(DataSpec(uri=path.as_uri()), 16, seed=0)
    assert caught.value.field == "data.uri"
    assert caught.value.value == path.as_uri()


def test_place_on_another_host_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"file:///absolute/path"):
        open_samples(DataSpec(uri="file://elsewhere/text"), 16, seed=0)


def test_text_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InvalidField, match="cannot be read"):
        open_samples(DataSpec(uri="file:///" + "x" * 300), 16, seed=0)
