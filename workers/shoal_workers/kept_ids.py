"""Ids of long texts, kept on the node's disk within the budget of its data cache.

Whoever goes on within a document, after a change of plan or in the next pass over the data, needs its ids from the
beginning: of one with many megabytes that takes seconds, and a step waits for it. Owns which ids are kept and how they
stand in a file; what they are is the tokenizer's affair.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from shoal_workers.block_counts import VERSION
from shoal_workers.data_cache import DataCache
from shoal_workers.tokenizing import Ids, Tokenizer, hash_of

LONG_CHARS = 2**18  # some 0.1 s; what is shorter is tokenised in about the time in which it would be found
_SUM_BYTES = 4  # CRC-32 of what follows


class KeptIds:
    """Encodes as its tokenizer does. Ids are kept by what a text is, wherever it stands."""

    def __init__(self, tokenizer: Tokenizer, cache: DataCache) -> None:
        self._tokenizer = tokenizer
        self._cache = cache

    def encode(self, texts: Sequence[str], before: Sequence[str]) -> list[Ids]:
        """Raises ValueError."""
        long = [index for index, text in enumerate(texts) if len(text) >= LONG_CHARS]
        if not long:
            return self._tokenizer.encode(texts, before)
        short = [index for index, text in enumerate(texts) if len(text) < LONG_CHARS]
        others = self._tokenizer.encode([texts[index] for index in short], [before[index] for index in short])
        found = dict(zip(short, others, strict=True))
        for index in long:
            found[index] = self._long(texts[index], before[index])
        return [found[index] for index in range(len(texts))]

    def _long(self, text: str, before: str) -> Ids:
        key = f"ids {VERSION} {self._tokenizer.digest} {hash_of(before)} {hash_of(text)}"
        found = self._read(key)
        if found is None:
            (found,) = self._tokenizer.encode([text], [before])
            content = found.tobytes()
            self._cache.keep(key, 0, zlib.crc32(content).to_bytes(_SUM_BYTES, "little") + content)
        return found

    def _read(self, key: str) -> Ids | None:
        path = self._cache.kept(key, 0)
        if path is None:
            return None
        try:
            content = path.read_bytes()
        except OSError:
            return None  # it was removed at this moment
        said, held = content[:_SUM_BYTES], memoryview(content)[_SUM_BYTES:]
        if zlib.crc32(held).to_bytes(_SUM_BYTES, "little") != said:
            return None  # the disk has spoilt it
        return np.frombuffer(held, dtype=np.uint32)
