"""Documents are tokenised ahead of who packs them, and nobody can tell: not by samples, not by errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data_ground import documents, job, write_jsonl, write_tokenizer

from shoal_planner.data_spec import DataSpec
from shoal_planner.job import job_to_mapping
from shoal_workers import ahead as ahead_module
from shoal_workers.ahead import Ahead, Made
from shoal_workers.data import training_samples
from shoal_workers.data_files import find
from shoal_workers.documents import Encoder
from shoal_workers.errors import DataError
from shoal_workers.lines import JsonLines
from shoal_workers.tokenizing import open_tokenizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "a.jsonl"
    found.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(2000)))
    return found


def opened(path: Path, tokenizer: str = "bytes") -> Ahead:
    blocks = JsonLines(find("data.uri", path.as_uri()), 2**20, "text")
    return Ahead(blocks, Encoder(open_tokenizer(tokenizer, None, 512), None))


def tokens(made: Made) -> list[list[int]]:
    return [document.tokens.tolist() for document in made.documents]


def finished(ahead: Ahead, stream: int) -> Made | None:
    return ahead._wanted[stream][1].result(timeout=300)


def test_what_was_read_ahead_is_what_is_there(path: Path, tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    ahead, plain = opened(path, tokenizer), opened(path, tokenizer)
    first = plain.take(0, (0, 0))
    assert first.end is not None
    more = [plain.take(0, (0, first.end)), plain.make((0, first.end), 5 * first.num_tokens)]
    assert more[1].num_tokens >= 5 * first.num_tokens > more[0].num_tokens
    ahead.want(0, (0, 0), 1)
    ahead.want(1, (0, first.end), 5 * first.num_tokens)
    assert finished(ahead, 0)
    assert finished(ahead, 1)
    path.write_bytes(b"")  # what comes from now on was read before
    assert tokens(ahead.take(0, (0, 0))) == tokens(first)
    assert tokens(ahead.take(1, (0, first.end))) == tokens(more[1])
    with pytest.raises(DataError, match=str(path)):
        ahead.take(0, (0, first.end))


def test_what_was_wanted_of_another_place_is_not_taken(path: Path) -> None:
    ahead = opened(path)
    first = ahead.make((0, 0), 0)
    assert first.end is not None
    ahead.want(0, (0, 0), 1)
    finished(ahead, 0)
    assert tokens(ahead.take(0, (0, first.end))) == tokens(ahead.make((0, first.end), 0)) != tokens(first)
    ahead.want(0, (0, 0), 1)
    ahead.want(0, (0, first.end), 1)
    assert tokens(ahead.take(0, (0, first.end))) == tokens(ahead.make((0, first.end), 0))
    ahead.want(0, (0, 0), 1)
    ahead.clear()
    assert tokens(ahead.take(0, (0, 0))) == tokens(first)


def test_no_more_is_held_than_there_is_room_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, first = opened(path), opened(path).make((0, 0), 0)
    monkeypatch.setattr(ahead_module, "_MOST_TOKENS", first.num_tokens)
    ahead.want(0, (0, 0), 1)
    assert finished(ahead, 0) is not None
    ahead.want(1, (0, 0), 1)
    assert finished(ahead, 1) is None
    assert tokens(ahead.take(1, (0, 0))) == tokens(ahead.take(0, (0, 0))) == tokens(first)
    ahead.want(1, (0, 0), 1)
    assert finished(ahead, 1) is not None, "what was taken makes room"


def test_a_broken_line_is_no_trouble_before_its_sample(tmp_path: Path) -> None:
    texts = documents(600)
    lines = [json.dumps({"text": text}) for text in texts]
    path, whole = tmp_path / "a.jsonl", tmp_path / "whole.jsonl"
    whole.write_text("\n".join(lines))
    lines[300] = "?" * len(lines[300])
    path.write_text("\n".join(lines))
    last = whole.stat().st_size // 16
    wanted = training_samples(job(DataSpec(uri=whole.as_uri(), format="jsonl"), batch=1)).read(range(last))
    samples = training_samples(job(DataSpec(uri=path.as_uri(), format="jsonl"), batch=1))
    number = 0
    with pytest.raises(DataError, match=f"{path} line 301: '\\?"):
        for number in range(last):
            assert torch.equal(samples.read([number])[0], wanted[number])
    assert number > 0
    alone = training_samples(job(DataSpec(uri=path.as_uri(), format="jsonl"), batch=1))
    with pytest.raises(DataError, match="line 301"):
        alone.read([number])
    path.write_bytes(whole.read_bytes())  # of the same size
    assert torch.equal(samples.read(range(number, last)), wanted[number:]), "and none once it is mended"


_FORKS = """
import json, os, sys
from shoal_planner.job import parse_job
from shoal_workers.data import training_samples
spec = parse_job(json.loads(sys.argv[1]))
samples = training_samples(spec)
samples.read(range(300))  # its end is where more has just been wanted
child = os.fork()
rest = samples.read(range(300, 600)).tolist()
if child == 0:
    os._exit(0 if rest == training_samples(spec).read(range(600)).tolist()[300:] else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_processes_fork_and_end_whatever_is_wanted(tmp_path: Path) -> None:
    spec = job(write_jsonl(tmp_path / "data", documents(4000)), batch=10)
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, json.dumps(job_to_mapping(spec))],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
