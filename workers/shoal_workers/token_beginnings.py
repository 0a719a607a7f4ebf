"""Whether files that are to be read as ids alone are such, as far as their first bytes tell.

Owns what is said of those that have a header, or ids of another width. Whether ids are below the vocabulary is looked
at when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal_planner.errors import InvalidField
from shoal_workers.file_ranges import File, looked_at
from shoal_workers.numbered import KINDS

_HEAD_BYTES = 2**10
_LEAST_PAIRS = 32  # fewer ids may have a zero at every second place by chance
_NAMES = {4: "uint32", 8: "int64"}
_WAYS = {4: "say token_type: uint32", 8: "write its ids as uint16 or uint32"}
_LLM_C = "has a header of llm.c, which would be read as ids: cut it off, tail -c +1025 FILE > NEW, and"
# With what files begin that are no ids alone, by what they are and what to do.
_BEGINNINGS = {
    b"\x93NUMPY": "is a NumPy file, whose header would be read as ids: write these alone, numpy.load(FILE).tofile(NEW)",
    (20240520).to_bytes(4, "little"): f"{_LLM_C} say token_type: uint16",
    (20240801).to_bytes(4, "little"): f"{_LLM_C} say token_type: uint32",
    b"MMIDIDX": "is an index of Megatron: say format: megatron",
}


def check_ids(field: str, uri: str, files: Sequence[File], token_type: str, vocab: int) -> None:
    """Of the first ones, which are to be `token_type` below `vocab`. Raises InvalidField, OSError, StoreError,
    DataError."""
    for file in looked_at(files):
        head = file.read(0, min(_HEAD_BYTES, file.num_bytes))
        problem = next((problem for start, problem in _BEGINNINGS.items() if head.startswith(start)), None)
        wide = _num_bytes_of_ids(head, KINDS[token_type].num_bytes, vocab)
        if problem is None and wide in _NAMES and _NAMES[wide] != token_type:
            problem = f"looks like {_NAMES[wide]}: {_WAYS[wide]}"
        if problem is not None:
            raise InvalidField(field, uri, f"is no file of {token_type}: {file.name} {problem}")


def _num_bytes_of_ids(head: bytes, num_bytes: int, vocab: int) -> int:
    """`num_bytes`, or more where every second of such ids is but the upper half of one: no larger than that of the
    last of the vocabulary, and mostly zero."""
    while num_bytes < 8 and len(head) >= 2 * num_bytes * _LEAST_PAIRS:
        ids = np.frombuffer(head[: len(head) // (2 * num_bytes) * 2 * num_bytes], dtype=f"<u{num_bytes}")
        lower, upper = ids[::2], ids[1::2]
        if not lower.any() or upper.max() > (vocab - 1) >> (8 * num_bytes):
            break
        num_bytes *= 2
    return num_bytes
