"""Files of ids: those of every kind are read, and those that are something else are refused before training."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_ground import job, write_megatron

from shoal_planner.data_spec import DataSpec
from shoal_planner.errors import InvalidField
from shoal_recovery.store import open_store
from shoal_workers.data import training_samples
from shoal_workers.errors import DataError

# By the codes of Megatron's index, which has two more for numbers that are no ids.
KINDS = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
TEXTS = [chr(97 + number % 26) * (20 + number) for number in range(40)]


def as_kind(folder: Path, code: int, kind: type[np.number]) -> tuple[DataSpec, np.ndarray]:
    """Ids below 128 as ids of that kind, and which they are."""
    data = write_megatron(folder, TEXTS)
    found = np.fromfile(folder / "a.bin", dtype=np.uint16)
    found = (found % 128).astype(kind)
    found.tofile(folder / "a.bin")
    index = bytearray((folder / "a.idx").read_bytes())
    index[17] = code
    (count,) = struct.unpack_from("<Q", index, 18)
    at = 34 + 4 * count
    starts = np.frombuffer(bytes(index), np.int64, count, at) // 2 * found.itemsize
    index[at : at + 8 * count] = starts.tobytes()
    (folder / "a.idx").write_bytes(index)
    return data, found


@pytest.mark.parametrize(("code", "kind"), KINDS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_megatron_files_of_every_kind_of_ids_are_read(tmp_path: Path, code: int, kind: type[np.number]) -> None:
    data, ids = as_kind(tmp_path / "data", code, kind)
    samples = training_samples(job(data, vocab=128, batch=1))
    rows = samples.read(range((len(ids) - 1) // 16)).tolist()
    assert sorted(map(tuple, rows)) == sorted(tuple(ids[at : at + 17].tolist()) for at in range(0, len(ids) - 16, 16))


@pytest.mark.parametrize("code", [2, 3])
@pytest.mark.parametrize("vocab", [128, 40_000])
def test_no_negative_id_is_taken_for_one_that_is_not_to_be_learnt(tmp_path: Path, code: int, vocab: int) -> None:
    data, ids = as_kind(tmp_path / "data", code, KINDS[code])
    ids[55] = -1
    ids.tofile(tmp_path / "data" / "a.bin")
    with pytest.raises(DataError, match=f"token 55: -1 is not below model.vocab {vocab}"):
        training_samples(job(data, vocab=vocab)).read(range(4000))


def of_numpy(ids: np.ndarray) -> bytes:
    written = io.BytesIO()
    np.save(written, ids)
    return written.getvalue()


def of_llm_c(magic: int, version: int) -> Callable[[np.ndarray], bytes]:
    return lambda ids: np.array([magic, version, len(ids)] + [0] * 253, dtype=np.int32).tobytes() + ids.tobytes()


CHANCE = np.random.default_rng(0)
GPT2, LLAMA3 = CHANCE.integers(0, 50_257, 5000), CHANCE.integers(0, 128_256, 5000)


@pytest.mark.parametrize(
    ("ids", "kind", "token_type", "written", "problem"),
    [
        (GPT2, np.uint32, "uint16", np.ndarray.tobytes, "looks like uint32: say token_type: uint32"),
        (LLAMA3, np.uint32, "uint16", np.ndarray.tobytes, "looks like uint32: say token_type: uint32"),
        (GPT2, np.int64, "uint16", np.ndarray.tobytes, "looks like int64: write its ids as uint16 or uint32"),
        (LLAMA3, np.int64, "uint32", np.ndarray.tobytes, "looks like int64: write its ids as uint16 or uint32"),
        (GPT2, np.uint16, "uint16", of_numpy, "is a NumPy file, whose header would be read as ids"),
        (LLAMA3, np.uint32, "uint32", of_numpy, "is a NumPy file, whose header would be read as ids"),
        (GPT2, np.uint16, "uint16", of_llm_c(20240520, 1), "has a header of llm.c, .* say token_type: uint16"),
        (LLAMA3, np.uint32, "uint16", of_llm_c(20240801, 7), "has a header of llm.c, .* say token_type: uint32"),
    ],
)
def test_what_is_no_file_of_such_ids_alone_is_refused_before_training(
    tmp_path: Path, ids: np.ndarray, kind: Any, token_type: Any, written: Callable[[np.ndarray], bytes], problem: str
) -> None:
    good, path = tmp_path / "a.bin", tmp_path / "b.bin"
    ids.astype(token_type).tofile(good)
    data = DataSpec(uri=tmp_path.as_uri(), format="tokens", token_type=token_type)
    spec = job(data, vocab=128_256 if ids is LLAMA3 else 50_304)
    assert training_samples(spec).read([0]).shape == (1, 17)
    path.write_bytes(written(ids.astype(kind)))
    with pytest.raises(
        InvalidField, match=f"data.uri = .*: is no file of {token_type}: {re.escape(str(path))} {problem}"
    ):
        training_samples(spec)


def test_an_index_of_megatron_is_no_file_of_ids(tmp_path: Path) -> None:
    write_megatron(tmp_path / "data", TEXTS)
    data = DataSpec(uri=(tmp_path / "data" / "a.idx").as_uri(), format="tokens")
    with pytest.raises(InvalidField, match=r"a\.idx is an index of Megatron: say format: megatron"):
        training_samples(job(data))


def test_what_is_far_is_looked_at(s3_uri: str, s3_environment: dict[str, str]) -> None:
    open_store(s3_uri).put("ids/a.bin", GPT2.astype(np.uint32).tobytes())
    data = DataSpec(uri=f"{s3_uri}/ids", format="tokens")
    with pytest.raises(InvalidField, match=r"s3://.*/ids/a\.bin looks like uint32"):
        training_samples(job(data, vocab=50_304))


@pytest.mark.parametrize(
    ("ids", "vocab"),
    [
        (np.zeros(600), 512),  # filled up with the first id
        (np.tile([0, 7], 300), 512),
        (np.concatenate([np.tile([7, 0], 250), [7, 1] * 6, [7, 0] * 50]), 512),  # nearly
        (np.arange(600) % 4, 4),  # of a small vocabulary, as of characters
        (np.tile([40_000, 1], 300), 50_304),
    ],
)
def test_ids_that_are_often_zero_are_read(tmp_path: Path, ids: np.ndarray, vocab: int) -> None:
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    data = DataSpec(uri=(tmp_path / "a.bin").as_uri(), format="tokens")
    samples = training_samples(job(data, vocab=vocab, batch=1))
    rows = samples.read(range((len(ids) - 1) // 16)).tolist()
    assert sorted(map(tuple, rows)) == sorted(tuple(ids[at : at + 17].tolist()) for at in range(0, len(ids) - 16, 16))


def test_a_few_ids_are_not_judged(tmp_path: Path) -> None:
    np.array([5, 0] * 20, dtype=np.uint16).tofile(tmp_path / "a.bin")
    samples = training_samples(job(DataSpec(uri=(tmp_path / "a.bin").as_uri(), format="tokens"), batch=1))
    assert samples.read([0]).tolist() == [[5, 0] * 8 + [5]]
