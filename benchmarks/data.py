"""How fast documents become samples, beside a plain loop that does no more than it must: read, parse, tokenise.

The plain loop is `json.loads` (or pyarrow) and batches of documents for the tokenizer, put into one array; of a chat it
renders the template once, and does not know which part is an answer. Ours packs, shuffles, masks and can go on from
anywhere besides. Both alternate in one run over the same files, as many tokens as
these have; each opens them and the tokenizer anew every time, as whoever begins has to. The tokenizer's own threads are
off for both, but ours reads ahead in two threads beside the one that asks, as in training: so `ratio.FORMAT`, ours
over plain in tokens per second, is of ours on two cores and the plain loop on the one that it can use.
`one_core_ratio.FORMAT` is the same where both may use one core alone: what ours costs more, or less, in all.

`waited.FORMAT` is the part of its time that a step waits for data where an accelerator computes as long as the plain
loop takes for the documents of a step; half, if nothing were read ahead. All are medians of `ROUNDS`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.reporting import answer
from shoal_planner.data_spec import DataSpec
from shoal_planner.job import JobSpec, ModelSpec, TrainSpec
from shoal_workers.chat import CHATML
from shoal_workers.data import training_samples
from shoal_workers.data_files import find
from shoal_workers.template_environment import compiled

ROUNDS = 3
WAITING_STEPS = 60
BATCH = 32
SEQ_LEN = 512
NUM_BYTES = 24 * 2**20
_DOCUMENTS_AT_ONCE = 64


def _texts() -> list[str]:
    """Of the standard library's source, in documents of a few hundred to some thousand characters."""
    chance, found, total = random.Random(0), [], 0
    for file in find("data.uri", "stdlib:"):
        text, first = file.read(0, file.num_bytes).decode("utf-8", "replace"), 0
        while first < len(text) and total < NUM_BYTES:
            size = int(200 + chance.paretovariate(1.3) * 400) % 20_000
            found.append(text[first : first + size])
            total += len(found[-1])
            first += size
    return found


def _tokenizer(folder: Path, texts: list[str]) -> Path:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False)
    inner.train_from_iterator(texts[::20], trainer)
    path = folder / "tokenizer.json"
    inner.save(str(path))
    return path


def _num_tokens(texts: list[str], tokenizer_path: Path) -> int:
    """Of all of them, told by every tenth."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    return sum(len(one.ids) for one in tokenizer.encode_batch(texts[::10])) * 10


def _json_documents(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)["text"]


def _parquet_documents(path: Path) -> Iterator[str]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_DOCUMENTS_AT_ONCE, columns=["text"], use_threads=False):
            yield from batch.column(0).to_pylist()


def _arrow_documents(path: Path) -> Iterator[str]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            yield from batch.column("text").to_pylist()


def _chat_documents(path: Path) -> Iterator[str]:
    template = compiled(CHATML)
    with path.open("rb") as file:
        for line in file:
            yield template.render(messages=json.loads(line)["messages"])


def _text_documents(path: Path) -> Iterator[str]:
    yield from path.read_text(encoding="utf-8").split("\n\n")


def _plain(documents: Callable[[Path], Iterator[str]], path: Path, tokenizer_path: Path) -> float:
    """Tokens per second."""
    began_s, arrays, waiting = time.perf_counter(), [], []
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    for document in documents(path):
        waiting.append(document)
        if len(waiting) == _DOCUMENTS_AT_ONCE:
            arrays += [np.array(one.ids, dtype=np.uint32) for one in tokenizer.encode_batch_fast(waiting)]
            waiting.clear()
    arrays += [np.array(one.ids, dtype=np.uint32) for one in tokenizer.encode_batch_fast(waiting)]
    return len(np.concatenate(arrays)) / (time.perf_counter() - began_s)


def _ours(job: JobSpec, num_tokens: int) -> float:
    """The same, in steps, as long as it takes for as many tokens; opening the files counts."""
    began_s, samples = time.perf_counter(), training_samples(job)
    steps = num_tokens // (BATCH * SEQ_LEN)
    for step in range(steps):
        samples.read(range(step * BATCH, (step + 1) * BATCH))
    return steps * BATCH * SEQ_LEN / (time.perf_counter() - began_s)


def _pairs(
    job: JobSpec, num_tokens: int, documents: Callable[[Path], Iterator[str]], path: Path, tokenizer_path: Path
) -> list[tuple[float, float]]:
    return [(_ours(job, num_tokens), _plain(documents, path, tokenizer_path)) for _ in range(ROUNDS)]


def _waited(job: JobSpec, compute_s: float) -> float:
    """Of the time of steps that compute for so long elsewhere, from the second one on."""
    samples, waited_s = training_samples(job), 0.0
    samples.read(range(BATCH))
    began_s = time.perf_counter()
    for step in range(1, WAITING_STEPS + 1):
        time.sleep(compute_s)
        asked_s = time.perf_counter()
        samples.read(range(step * BATCH, (step + 1) * BATCH))
        waited_s += time.perf_counter() - asked_s
    return waited_s / (time.perf_counter() - began_s)


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    _allow({max(allowed)})
    try:
        yield
    finally:
        _allow(allowed)


def _allow(cores: set[int]) -> None:
    """To every thread that there is; new ones have what who began them has."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _job(data: DataSpec) -> JobSpec:
    model = ModelSpec(layers=1, hidden=16, heads=2, ffn=16, vocab=8192)
    return JobSpec(name="data", model=model, data=data, train=TrainSpec(global_batch=BATCH, seq_len=SEQ_LEN, steps=1))


def _write(folder: Path, texts: list[str]) -> dict[str, tuple[Path, Callable[[Path], Iterator[str]]]]:
    table = pa.table({"text": texts})
    _write_chats(folder / "chats.jsonl", texts)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    (folder / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    pq.write_table(table, folder / "a.parquet", row_group_size=1000)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return {
        "jsonl": (folder / "a.jsonl", _json_documents),
        "text": (folder / "a.txt", _text_documents),
        "parquet": (folder / "a.parquet", _parquet_documents),
        "arrow": (folder / "a.arrow", _arrow_documents),
        "chat": (folder / "chats.jsonl", _chat_documents),
    }


def _write_chats(path: Path, texts: list[str]) -> None:
    """Of one to four turns each; a question is shorter than its answer."""
    chance, waiting = random.Random(1), iter(texts)
    with path.open("w", encoding="utf-8") as file:
        while turns := list(itertools.islice(waiting, chance.randint(1, 4))):
            pairs = [((said[: len(said) // 4], "user"), (said[len(said) // 4 :], "assistant")) for said in turns]
            messages = [{"role": role, "content": text} for pair in pairs for text, role in pair]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results: dict[str, float | None] = {}
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, texts = Path(name), _texts()
        tokenizer_path = _tokenizer(folder, texts)
        num_tokens = _num_tokens(texts, tokenizer_path)
        for form, (path, documents) in _write(folder, texts).items():
            how: dict[str, Any] = {"format": form} if form != "chat" else {"format": "jsonl", "template": "chatml"}
            data = DataSpec(uri=path.as_uri(), tokenizer=str(tokenizer_path), **how)
            job = _job(data)
            pairs = _pairs(job, num_tokens, documents, path, tokenizer_path)
            with _one_core():
                alone = _pairs(job, num_tokens, documents, path, tokenizer_path)
            compute_s = BATCH * SEQ_LEN / statistics.median(plain for _, plain in pairs)
            waited = [_waited(job, compute_s) for _ in range(ROUNDS)]
            runs[form] = {"all_cores": pairs, "one_core": alone, "waited": waited}
            results[f"tokens_per_s.{form}"] = statistics.median(ours for ours, _ in pairs)
            results[f"plain_tokens_per_s.{form}"] = statistics.median(plain for _, plain in pairs)
            results[f"ratio.{form}"] = statistics.median(ours / plain for ours, plain in pairs)
            results[f"one_core_ratio.{form}"] = statistics.median(ours / plain for ours, plain in alone)
            results[f"waited.{form}"] = statistics.median(waited)
    answer("data", results, runs)


if __name__ == "__main__":
    main()
