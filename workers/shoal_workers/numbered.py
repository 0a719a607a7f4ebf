"""Tokens that can be read from anywhere: bytes of text, or ids as they stand in files. Sequences are told by number.

Each pass over the data is a permutation of its sequences that is computed number by number, never stored. Neither plan,
rank nor machine has a part in it. What is held out for evaluations is the same random choice of sequences in every
pass, and of as many, in every run with that seed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from shoal_workers.borders import BEGINS
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File
from shoal_workers.permutation import Permutation, mixed
from shoal_workers.plain_text import check_text
from shoal_workers.samples import Row

_SPLIT = -1  # in the place of a pass: the order of sequences of which the first are held out
_DIGEST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TokenKind:
    """How ids lie in a file: `dtype` has as many bytes as one has, `top` is one more than the largest that it means."""

    dtype: torch.dtype
    top: int
    signed: bool = False

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize


# torch cannot do much with unsigned types of more than a byte: what looks like a sign is taken off after reading.
KINDS = {
    "uint8": TokenKind(torch.uint8, 2**8),
    "uint16": TokenKind(torch.int16, 2**16),
    "uint32": TokenKind(torch.int32, 2**32),
    "int8": TokenKind(torch.int8, 2**7, signed=True),
    "int16": TokenKind(torch.int16, 2**15, signed=True),
    "int32": TokenKind(torch.int32, 2**31, signed=True),
    "int64": TokenKind(torch.int64, 2**63, signed=True),
}


class Index(Protocol):
    @property
    def file(self) -> File: ...

    def begins(self, first: int, last: int) -> Sequence[int]:
        """Which of the tokens [first, last) begin documents. Raises DataError, OSError, StoreError."""


@dataclass(frozen=True, slots=True)
class Apart:
    """That documents are seen by themselves. Each file begins one; others begin where its index says, or else behind
    tokens `end`."""

    end: int | None


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Ids of one kind, back to back; of a text (`is_text`) they are its bytes. `index` knows where documents begin."""

    file: File
    kind: TokenKind
    num_tokens: int
    is_text: bool = False
    index: Index | None = None

    def read(self, first: int, last: int) -> Tensor:
        """Tokens [first, last), as int64. Raises DataError."""
        size = self.kind.num_bytes
        found = self.file.read(first * size, (last - first) * size)
        if self.is_text:
            check_text(self.file, first, found)
        tokens = torch.frombuffer(bytearray(found), dtype=self.kind.dtype).long()
        return tokens if self.kind.signed else tokens & (self.kind.top - 1)


class NumberedSamples:
    """Sequence j begins at token j * seq_len of all `files`. Those that are `held_out` are never read; or, with
    `evaluation`, they alone are, in one order for ever. Ids are checked where they may lie outside of `vocab`. Unless
    documents are `apart` there are none."""

    def __init__(
        self,
        files: Sequence[TokenFile],
        seq_len: int,
        seed: int,
        *,
        vocab: int,
        held_out: int = 0,
        evaluation: bool = False,
        apart: Apart | None = None,
    ) -> None:
        self.ignores = self.by_document = apart is not None
        self._apart = apart
        self._files = tuple(files)  # none of them empty
        self._starts = tuple(accumulate((file.num_tokens for file in files), initial=0))
        self._seq_len = seq_len
        self._seed = seed
        self._vocab = vocab
        self._checks = any(file.kind.signed or file.kind.top > vocab for file in files)
        self._held_out = held_out
        self._evaluation = evaluation

    @property
    def num_sequences(self) -> int:
        return max(0, self._starts[-1] - 1) // self._seq_len

    @property
    def digest(self) -> str:
        """Of all tokens, in order; reads all of it. Equal digests mean equal samples on every machine."""
        found = hashlib.blake2b(digest_size=16)
        for one in self._files:
            for offset in range(0, one.file.num_bytes, _DIGEST_BYTES):
                found.update(one.file.read(offset, min(_DIGEST_BYTES, one.file.num_bytes - offset)))
        return found.hexdigest()

    def read(self, numbers: Sequence[int]) -> Tensor:
        """See `Samples`."""
        return torch.stack([self._sequence(self._place(number)) for number in numbers])

    def learn(self, marks: Sequence[Row]) -> None:
        """Nothing: where a sequence stands is computed."""

    def marks(self, undone: Callable[[int], int]) -> list[Row]:
        return []

    def _place(self, number: int) -> int:
        if self._evaluation:
            assert number < self._held_out, number
            return self._split(number)
        num_read = self.num_sequences - self._held_out
        turn, within = divmod(number, num_read)
        place = Permutation(num_read, mixed(self._seed, turn))(within)
        return self._split(self._held_out + place) if self._held_out else place

    def _split(self, number: int) -> int:
        return Permutation(self.num_sequences, mixed(self._seed, _SPLIT))(number)

    def _sequence(self, place: int) -> Tensor:
        first = place * self._seq_len
        last = first + self._seq_len + 1
        parts = []
        index = bisect_right(self._starts, first) - 1
        while first < last:
            start, end = self._starts[index], min(last, self._starts[index + 1])
            parts.append(self._files[index].read(first - start, end - start))
            if self._checks:
                self._check(index, first - start, parts[-1])
            if self._apart is not None:
                parts[-1] = self._marked(self._apart, self._files[index], first - start, parts[-1])
            first = end
            index += 1
        return torch.cat(parts)

    def _marked(self, apart: Apart, file: TokenFile, first: int, tokens: Tensor) -> Tensor:
        """See `borders`. What a sequence begins with is not looked at: it begins a piece anyhow."""
        begins = torch.zeros(len(tokens), dtype=torch.bool)
        begins[0] = first == 0
        if file.index is not None:
            places = file.index.begins(first, first + len(tokens))
            begins[torch.tensor(places, dtype=torch.long) - first] = True
        elif apart.end is not None:
            begins[1:] |= tokens[:-1] == apart.end
        return torch.where(begins, ~(tokens | BEGINS), tokens)

    def _check(self, index: int, first: int, tokens: Tensor) -> None:
        """Raises DataError."""
        wrong = (tokens < 0) | (tokens >= self._vocab)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            name, problem = self._files[index].file.name, f"is not below model.vocab {self._vocab}"
            raise DataError(name, f"token {first + at}", str(int(tokens[at])), problem)
