"""Small data of every format, for tests: the same documents each time, and a tokenizer made for them."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal_planner.data_spec import DataSpec
from shoal_planner.job import JobSpec, ModelSpec, TrainSpec
from shoal_workers.data import training_samples
from shoal_workers.data_marks import DataMarks

BATCH = 10
STEPS = 60
_WORDS = ("the", "shoal", "swims", "before", "morning", "comes,", "and", "no", "net", "holds", "it.", "Größe", "\n")


def documents(count: int = 400, seed: int = 0) -> list[str]:
    """Of very different lengths, no two alike."""
    chance = random.Random(seed)
    return [
        f"{number} " + " ".join(chance.choice(_WORDS) for _ in range(int(chance.paretovariate(1.2) * 8) % 300))
        for number in range(count)
    ]


def job(data: DataSpec, *, vocab: int = 512, batch: int = 10, seq_len: int = 16, **train: object) -> JobSpec:
    return JobSpec(
        name="data",
        model=ModelSpec(layers=2, hidden=16, heads=2, ffn=32, vocab=vocab),
        data=data,
        train=TrainSpec(global_batch=batch, seq_len=seq_len, steps=100, seed=5, **train),  # type: ignore[arg-type]
    )


def write_tokenizer(folder: Path, template: str | None = None) -> Path:
    """A Hugging Face folder with a BPE over bytes."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(documents(), trainer)
    folder.mkdir(parents=True)
    inner.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"eos_token": {"content": "<|endoftext|>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_text(folder: Path, texts: Sequence[str]) -> DataSpec:
    (folder / "more").mkdir(parents=True)
    for index, text in enumerate(("\n".join(texts[:100]), "\n".join(texts[100:]))):
        (folder / ("a.txt", "more/b.txt")[index]).write_text(text, encoding="utf-8")
    return DataSpec(uri=folder.as_uri())


def write_jsonl(folder: Path, texts: Sequence[str]) -> DataSpec:
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": text}, ensure_ascii=index % 2 == 0) for index, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("\n".join(lines[:250]) + "\n\n", encoding="utf-8")
    (folder / "b.jsonl").write_text("\n".join(lines[250:]), encoding="utf-8")  # its last line has no end
    return DataSpec(uri=folder.as_uri(), format="jsonl")


def chats(texts: Sequence[str]) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f"What of {text[:20]}?"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": text[::-1]},
        ]
        for text in texts
    ]


def write_chats(folder: Path, texts: Sequence[str]) -> DataSpec:
    folder.mkdir(parents=True)
    lines = [json.dumps({"messages": messages}) for messages in chats(texts)]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return DataSpec(uri=folder.as_uri(), format="jsonl", template="chatml")


def write_parquet(folder: Path, texts: Sequence[str]) -> DataSpec:
    folder.mkdir(parents=True)
    for name, part in (("a", texts[:300]), ("b", texts[300:])):
        table = pa.table({"number": list(range(len(part))), "text": list(part)})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=90)
    return DataSpec(uri=folder.as_uri(), format="parquet")


def write_arrow(folder: Path, texts: Sequence[str]) -> DataSpec:
    """As `datasets` saves one to disk."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (texts[:150], texts[150:]), strict=True):
        table = pa.table({"text": list(part), "number": list(range(len(part)))})
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return DataSpec(uri=folder.as_uri(), format="arrow")


def ids(texts: Sequence[str]) -> list[int]:
    return [byte for text in texts for byte in (*text.encode(), 300)]


def write_tokens(folder: Path, texts: Sequence[str]) -> DataSpec:
    folder.mkdir(parents=True)
    found = np.array(ids(texts), dtype=np.uint16)
    found[:1000].tofile(folder / "a.bin")
    found[1000:].tofile(folder / "b.bin")
    return DataSpec(uri=folder.as_uri(), format="tokens")


def write_wide_tokens(folder: Path, texts: Sequence[str]) -> DataSpec:
    folder.mkdir(parents=True)
    np.array(ids(texts), dtype=np.uint32).tofile(folder / "a.bin")
    return DataSpec(uri=(folder / "a.bin").as_uri(), format="tokens", token_type="uint32")


def write_megatron(folder: Path, texts: Sequence[str]) -> DataSpec:
    folder.mkdir(parents=True)
    np.array(ids(texts), dtype=np.uint16).tofile(folder / "a.bin")
    write_index(folder / "a.idx", [len(text.encode()) + 1 for text in texts])
    return DataSpec(uri=(folder / "a").as_uri(), format="megatron")


def write_index(path: Path, lengths: Sequence[int]) -> None:
    """Of a file of uint16 with documents of so many tokens."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(lengths) + 1)
    parts = (np.array(lengths, np.int32), starts.astype(np.int64), np.arange(len(lengths) + 1, dtype=np.int64))
    path.write_bytes(head + b"".join(part.tobytes() for part in parts))


WRITERS: dict[str, Callable[[Path, Sequence[str]], DataSpec]] = {
    "text": write_text,
    "jsonl": write_jsonl,
    "chats": write_chats,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "uint16": write_tokens,
    "uint32": write_wide_tokens,
    "megatron": write_megatron,
}


def steps(first: int, last: int, num_ranks: int) -> Iterator[tuple[int, Sequence[range]]]:
    """The numbers that each rank reads of each step, unevenly shared out."""
    borders = [0, *(round(BATCH * (rank + 1) / num_ranks) for rank in range(num_ranks))]
    for step in range(first, last + 1):
        start = (step - 1) * BATCH
        yield step, [range(start + low, start + high) for low, high in itertools.pairwise(borders)]


def undone(step: int) -> Callable[[int], int]:
    """The first number of each slot that is behind this step."""
    return lambda slot: step * BATCH + slot


def read(spec: JobSpec, first: int, last: int, num_ranks: int, marks: DataMarks) -> list[torch.Tensor]:
    """By fresh processes, as a new epoch begins: each knows what the supervisor knows, and tells what it finds out."""
    ranks = [training_samples(spec) for _ in range(num_ranks)]
    for samples in ranks:
        samples.learn(marks.at(first - 1))
    found = []
    for step, parts in steps(first, last, num_ranks):
        found.append(torch.cat([samples.read(part) for samples, part in zip(ranks, parts, strict=True)]))
        for samples in ranks:
            marks.hear(step, samples.marks(undone(step)))
    return found
