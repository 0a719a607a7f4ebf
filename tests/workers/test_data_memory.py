"""A file of any size is read with little memory, and opened without being read through."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_ground import documents, job, write_index, write_tokenizer

from shoal_planner.data_spec import DataSpec, Format
from shoal_workers.data import training_samples
from shoal_workers.errors import DataError

_LIMIT_BYTES = 300 * 2**20
_READS = """
import json, pathlib, sys
from shoal_planner.job import parse_job
from shoal_workers.data import training_samples
from shoal_workers.data_cache import DataCache
import jinja2, pyarrow.parquet, tokenizers, torch
def most():
    # Not getrusage: what that says begins with what the parent had when it forked.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
before = most()
spec = parse_job(json.loads(sys.argv[1]))
samples = training_samples(spec, DataCache(pathlib.Path(sys.argv[3]), 16 * 2**30))
opened = most() - before
batch = spec.train.global_batch
for step in range(int(sys.argv[2])):
    samples.read(range(step * batch, (step + 1) * batch))
print(json.dumps({"opened": opened, "read": most() - before}))
"""


def most_bytes(data: DataSpec, steps: int, cache: Path, batch: int = 32) -> dict[str, int]:
    """What a process that only reads takes more than one that has everything imported; the highest it ever was."""
    from shoal_planner.job import job_to_mapping

    spec = json.dumps(job_to_mapping(job(data, vocab=70_000, batch=batch, seq_len=1024)))
    done = subprocess.run(
        [sys.executable, "-c", _READS, spec, str(steps), str(cache)],
        capture_output=True,
        text=True,
        check=True,
        timeout=3000,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def write_lines(path: Path, num_bytes: int) -> None:
    part = "".join(json.dumps({"text": text}) + "\n" for text in documents(2000)).encode()
    with path.open("wb") as file:
        for _ in range(num_bytes // len(part) + 1):
            file.write(part)


def test_a_large_file_is_opened_at_once_and_read_with_little_memory(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 200 * 2**20)
    data = DataSpec(uri=(tmp_path / "a.jsonl").as_uri(), format="jsonl")
    samples = training_samples(job(data))
    with (tmp_path / "a.jsonl").open("r+b") as file:
        file.truncate(0)  # whoever had read all of it would not notice
    with pytest.raises(DataError, match=r"a\.jsonl"):
        samples.read(range(10))
    write_lines(tmp_path / "a.jsonl", 200 * 2**20)
    assert most_bytes(data, 30, tmp_path / "cache")["read"] < 100 * 2**20


def write_groups(path: Path, texts: list[str], num_bytes: int, rows: int) -> None:
    table = pa.table({"text": texts, "other": list(range(len(texts)))})
    with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        for _ in range(num_bytes // table.nbytes + 1):
            writer.write_table(table, row_group_size=rows)


def write_batches(path: Path, texts: list[str], num_bytes: int, rows: int) -> None:
    table = pa.table({"text": texts, "other": list(range(len(texts)))})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        for _ in range(num_bytes // table.nbytes + 1):
            writer.write_table(table.combine_chunks(), max_chunksize=rows)


SHAPES: dict[str, tuple[Format, int, Callable[[Path], None]]] = {
    "parquet, many streams": ("parquet", 512, lambda path: write_groups(path, documents(20_000), 2**30, 10_000)),
    "parquet, one group": ("parquet", 32, lambda path: write_groups(path, documents(500_000), 2**26, 10**7)),
    "parquet, long documents": ("parquet", 32, lambda path: write_groups(path, _long(), 2**28, 20)),
    "arrow, many streams": ("arrow", 512, lambda path: write_batches(path, documents(20_000), 2**30, 10_000)),
    "arrow, one batch": ("arrow", 32, lambda path: write_batches(path, documents(20_000) * 40, 2**26, 10**7)),
    "jsonl, many streams": ("jsonl", 512, lambda path: write_lines(path, 2**30)),
}


def _long() -> list[str]:
    return ["\n".join(documents(10_000, seed)) for seed in range(4)]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_of_files_is_read_with_less_than_300_mb(tmp_path: Path, shape: str) -> None:
    form, batch, write = SHAPES[shape]
    path = tmp_path / f"data.{form}"
    write(path)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    data = DataSpec(uri=path.as_uri(), format=form, tokenizer=tokenizer)
    assert most_bytes(data, 4, tmp_path / "cache", batch)["read"] < _LIMIT_BYTES


def write_ids(path: Path, num_bytes: int) -> None:
    block = np.random.default_rng(1).integers(0, 60_000, 2**22).astype(np.uint16).tobytes()
    with path.open("wb") as file:
        for _ in range(num_bytes // len(block) + 1):
            file.write(block)


def write_collected(path: Path, num_bytes: int) -> None:
    """With documents of 1,024 tokens."""
    write_ids(path, num_bytes)
    write_index(path.with_suffix(".idx"), [1024] * (path.stat().st_size // 2048))


# By format: the file that is written, what a job names, and who writes.
FORMATS: dict[Format, tuple[str, str, Callable[[Path, int], None]]] = {
    "jsonl": ("a.jsonl", "a.jsonl", write_lines),
    "text": ("a.text", "a.text", write_lines),
    "parquet": ("a.parquet", "a.parquet", lambda path, num_bytes: write_groups(path, _pages(), num_bytes, 2500)),
    "arrow": ("a.arrow", "a.arrow", lambda path, num_bytes: write_batches(path, _pages(), num_bytes, 2500)),
    "tokens": ("a.bin", "a.bin", write_ids),
    "megatron": ("a.bin", "a", write_collected),
}


def _pages() -> list[str]:
    return ["\n".join(documents(200, seed)) for seed in range(5000)]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMATS)
def test_five_gigabytes_are_read_with_less_than_300_mb(tmp_path: Path, form: Format) -> None:
    file, named, write = FORMATS[form]
    num_bytes = 5 * 10**9
    write(tmp_path / file, num_bytes)
    assert (tmp_path / file).stat().st_size >= num_bytes
    has_ids = form in ("tokens", "megatron")
    tokenizer = "bytes" if has_ids else str(write_tokenizer(tmp_path / "tokenizer"))
    data = DataSpec(uri=(tmp_path / named).as_uri(), format=form, tokenizer=tokenizer)
    took = most_bytes(data, 300, tmp_path / "cache")
    assert took["read"] < _LIMIT_BYTES
