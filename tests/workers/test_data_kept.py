"""A long document is tokenised once on a node, however often somebody comes by it; and samples are the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from data_ground import documents, job, write_tokenizer

from shoal_planner.data_spec import DataSpec
from shoal_planner.job import JobSpec
from shoal_workers import kept_ids
from shoal_workers.data import training_samples
from shoal_workers.data_cache import DataCache
from shoal_workers.tokenizing import FileTokenizer, Ids

LONG = 20_000


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of long texts that a tokenizer was given."""
    monkeypatch.setattr(kept_ids, "LONG_CHARS", LONG)
    found: list[int] = []
    encode = FileTokenizer.encode

    def counted(self: FileTokenizer, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Ids]:
        found.extend(len(text) for text in texts if len(text) >= LONG)
        return encode(self, texts, before)

    monkeypatch.setattr(FileTokenizer, "encode", counted)
    return found


def spec(folder: Path) -> JobSpec:
    """Of two long documents among short ones."""
    texts = documents(300)
    texts[40] = "\n".join(documents(600, 1))
    texts[200] = "Größe " + "\n".join(documents(500, 2))
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer = str(write_tokenizer(folder / "tokenizer"))
    return job(DataSpec(uri=path.as_uri(), format="jsonl", tokenizer=tokenizer), batch=2)


def test_a_long_document_is_tokenised_once(tmp_path: Path, encoded: list[int]) -> None:
    wanted_job, cache = spec(tmp_path), DataCache(tmp_path / "cache", 2**28)
    wanted = training_samples(wanted_job).read(range(1500))
    assert len(encoded) == len(set(encoded)) == 2
    for _ in range(2):  # the second time as a new rank reads them, after a change of plan
        assert torch.equal(training_samples(wanted_job, cache).read(range(1500)), wanted)
        assert len(encoded) == 4
    for path in (tmp_path / "cache").rglob("0"):
        path.write_bytes(path.read_bytes()[:-3] + b"???")
    assert torch.equal(training_samples(wanted_job, cache).read(range(1500)), wanted)
    assert len(encoded) == 6, "what the disk has spoilt is made again"


def test_a_full_disk_is_no_error(tmp_path: Path, encoded: list[int]) -> None:
    wanted_job = spec(tmp_path)
    wanted = training_samples(wanted_job).read(range(400))
    (tmp_path / "no folder").write_text("")
    for cache in (DataCache(tmp_path / "no folder", 2**28), DataCache(tmp_path / "cache", 1000)):
        assert torch.equal(training_samples(wanted_job, cache).read(range(400)), wanted)
    assert len(encoded) == 3
