"""Documents put into sequences of one length, one behind the other. Pure.

Sequences overlap by a token, as the last of one is the first target-giver of the next. Attention crosses documents
within a sequence; what a document begins with is no target, for nothing before it says what it will be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal_workers.documents import Encoded

Sequence = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """A sequence in the form of `samples`, and where the one after it begins: after `skip` tokens of the document that
    stands at `place`."""

    tokens: Sequence
    place: int
    skip: int


def pack(documents: Iterable[Encoded], seq_len: int, skip: int, pad: int, *, whole: bool) -> Iterator[Packed]:
    """Sequences of seq_len + 1 tokens, from behind the first `skip` tokens on. What is left at the end is dropped; but
    where there is nothing else, and these are all (`whole`) documents of a block, it is filled up, if there is anything
    to learn from it."""
    left = _Left()
    packed_any = False
    for document in documents:
        left.add(document, skip)
        skip = max(0, skip - len(document.ids))
        while left.num_tokens > seq_len:
            tokens = left.first(seq_len + 1)
            left.drop(seq_len)
            packed_any = True
            yield Packed(tokens, *left.begin)
    if whole and not packed_any and left.num_tokens > 1:
        tokens = left.first(left.num_tokens)
        if (tokens[1:] >= 0).any():
            filled = np.full(seq_len + 1, ~pad, dtype=np.int64)
            filled[: len(tokens)] = tokens
            left.drop(left.num_tokens - 1)
            yield Packed(filled, *left.begin)


class _Left:
    """Tokens that are in no sequence yet."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Sequence, int, int]] = deque()  # with the place and how many tokens stand before
        self.num_tokens = 0

    def add(self, document: Encoded, skip: int) -> None:
        ids = document.ids.astype(np.int64)
        tokens = np.where(document.learnt, ids, ~ids)[skip:]
        if len(tokens):
            self._parts.append((tokens, document.place, skip))
            self.num_tokens += len(tokens)

    def first(self, num_tokens: int) -> Sequence:
        found, missing = [], num_tokens
        for tokens, _, _ in self._parts:
            found.append(tokens[:missing])
            missing -= len(found[-1])
            if not missing:
                break
        return np.concatenate(found)

    def drop(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens
        while num_tokens:
            tokens, place, skip = self._parts.popleft()
            if num_tokens < len(tokens):
                self._parts.appendleft((tokens[num_tokens:], place, skip + num_tokens))
                return
            num_tokens -= len(tokens)

    @property
    def begin(self) -> tuple[int, int]:
        """A sequence leaves its last token here, so there is one."""
        _, place, skip = self._parts[0]
        return place, skip
