"""What a node notes of blocks: how many samples each gives, and that nothing spoilt is believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from data_ground import chats, documents, job, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.data_spec import DataSpec
from shoal_workers.block_counts import Counts
from shoal_workers.data import training_samples
from shoal_workers.data_cache import DataCache
from shoal_workers.errors import DataError

RECORD = 16


def test_what_was_noted_is_known_to_another_process(tmp_path: Path) -> None:
    counts = Counts(tmp_path / "notes")
    for block in range(100):
        counts.put(block, 3 * block)
    again = Counts(tmp_path / "notes")
    assert [again.get(block) for block in range(101)] == [*range(0, 300, 3), None]


@given(
    cuts=st.lists(st.integers(0, 99 * RECORD), max_size=3),
    zeros=st.lists(st.integers(0, 99 * RECORD), max_size=3),
    size=st.integers(1, 40),
)
def test_what_a_full_disk_or_lost_power_spoilt_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], zeros: list[int], size: int
) -> None:
    path = tmp_path_factory.mktemp("notes") / "notes"
    counts = Counts(path)
    for block in range(100):
        counts.put(block, 3 * block + 1)
    content = bytearray(path.read_bytes())
    for at in zeros:
        content[at : at + size] = bytes(len(content[at : at + size]))
    for at in sorted(cuts, reverse=True):
        del content[at : at + size]
    path.write_bytes(content)
    again = Counts(path)
    found = {block: again.get(block) for block in range(100) if again.get(block) is not None}
    assert all(count == 3 * block + 1 for block, count in found.items())
    spoilt = len(cuts) + len(zeros)
    assert len(found) >= 100 - spoilt * (2 + size // RECORD), "those behind are found again"


def test_data_without_anything_to_learn_is_refused_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 3)
    spec = job(DataSpec(uri=path.as_uri(), format="jsonl", template="chatml"), seq_len=512, batch=2)
    cache = DataCache(tmp_path / "cache", 2**20)
    for samples in (training_samples(spec, cache), training_samples(spec, cache), training_samples(spec)):
        for _ in range(2):
            with pytest.raises(DataError, match="all documents together have nothing to learn from"):
                samples.read([0])


def test_counts_of_another_template_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats(documents(60))))
    write_tokenizer(tmp_path / "tokenizer", template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    data = DataSpec(uri=path.as_uri(), format="jsonl", template="tokenizer", tokenizer=str(tmp_path / "tokenizer"))
    cache = DataCache(tmp_path / "cache", 2**20)
    training_samples(job(data), cache).read(range(1000))
    long = "{% for m in messages %}{{ bos_token }}{% for n in range(9) %}{{ m['content'] }}{% endfor %}{% endfor %}"
    for bos in ("<|im_start|>", "<|im_start|> and more"):
        config = {"eos_token": "<|endoftext|>", "chat_template": long, "bos_token": bos}
        (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
        spec = job(replace(data))
        wanted = training_samples(spec).read(range(3000))[2990:]
        assert (training_samples(spec, cache).read(range(2990, 3000)) == wanted).all()
        training_samples(spec, cache).read(range(3000))
