"""The order of samples is a permutation per pass that only the seed decides; bad places are named."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.errors import InvalidField
from shoal_planner.job import DataSpec
from shoal_workers.data import Permutation, open_samples


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64))
def test_permutation_is_a_bijection(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(map(permutation, range(size))) == list(range(size))


def test_permutation_mixes_and_seeds_differ() -> None:
    one, other = ([Permutation(1000, seed)(number) for number in range(1000)] for seed in (1, 2))
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 20
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(one)) < 20, "neighbours do not stay neighbours"


def test_every_pass_takes_every_sequence_once_in_another_order(tmp_path: Path) -> None:
    text = bytes(range(1, 201))
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
