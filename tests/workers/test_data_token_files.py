"""Files of ids: those of every kind are read, and those that are something else are refused before training."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from data_ground import job, write_megatron

from shoal_planner.data_spec import DataSpec
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
