"""Documents put into sequences of one length, one behind the other. Pure.

Sequences overlap by a token, as the last of one is the first target-giver of the next. What a document begins with is
no target, for nothing before it says what it will be. Whether attention crosses documents is not decided here
(`borders`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal_workers.documents import Encoded, Tokens

Sequence = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """A sequence in the form of `samples`, and where the one after it begins: after `skip` tokens of the document that
    stands at `place`."""

    tokens: Sequence
    place: int
    skip: int


class Packer:
    """Sequences of seq_len + 1 tokens of the documents that are added, from behind the first `skip` tokens on. What is
    left at the end is dropped; but where there is nothing else, and these are all (`whole`) documents of a block, it is
    filled up with `pad`, if there is anything to learn from it."""

    def __init__(self, seq_len: int, skip: int, pad: int, *, whole: bool) -> None:
        self._seq_len = seq_len
        self._skip = skip
        self._pad = pad
        self._fills_up = whole
        self._left = _Left()

    def add(self, documents: Iterable[Encoded]) -> None:
        for document in documents:
            self._left.add(document, self._skip)
            self._skip = max(0, self._skip - len(document.tokens))

    @property
    def num_tokens(self) -> int:
        """That are in no sequence yet."""
        return self._left.num_tokens

    def next(self) -> Packed | None:
        """None: more documents are needed."""
        if self._left.num_tokens <= self._seq_len:
            return None
        tokens = self._left.take(self._seq_len)
        self._fills_up = False
        return Packed(tokens, *self._left.begin)

    def end(self) -> Packed | None:
        """What is left, when there are no more documents."""
        if not self._fills_up or self._left.num_tokens < 2:
            return None
        self._fills_up = False
        tokens = self._left.take(self._left.num_tokens - 1)
        if not (tokens[1:] >= 0).any():
            return None
        filled = np.full(self._seq_len + 1, ~self._pad, dtype=np.int64)
        filled[: len(tokens)] = tokens
        return Packed(filled, *self._left.begin)


class _Left:
    """Tokens that are in no sequence yet."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Tokens, int, int]] = deque()  # with the place and how many tokens stand before
        self.num_tokens = 0

    def add(self, document: Encoded, skip: int) -> None:
        tokens = document.tokens[skip:] if skip else document.tokens
        if len(tokens):
            self._parts.append((tokens, document.place, skip))
            self.num_tokens += len(tokens)

    def take(self, num_tokens: int) -> Sequence:
        """So many, and behind them one that is there and stays."""
        parts, found, missing = self._parts, [], num_tokens
        tokens, place, skip = parts[0]
        while len(tokens) <= missing:
            found.append(tokens)
            missing -= len(tokens)
            parts.popleft()
            tokens, place, skip = parts[0]
        found.append(tokens[: missing + 1])
        if missing:
            parts[0] = (tokens[missing:], place, skip + missing)
        self.num_tokens -= num_tokens
        return np.concatenate(found, dtype=np.int64)

    @property
    def begin(self) -> tuple[int, int]:
        """A sequence leaves its last token here, so there is one."""
        _, place, skip = self._parts[0]
        return place, skip
