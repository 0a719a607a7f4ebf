"""What a block of documents is, and how documents become tokens.

A block is a part of a source that is read in one go, from its beginning or from the place of a document in it. Which
blocks there are is known from sizes of files and from their footers. `lines` and `tables` say what they are in files;
which blocks are read when, and how documents fill sequences, is `streams`' affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal_planner.errors import show
from shoal_workers.chat import ChatTemplate
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File
from shoal_workers.tokenizing import Ids, Tokenizer

_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Raw:
    """A document as it was read: its `content` (text, or whatever stands for it), `place` in its block, and `where`
    that is, as text for people. A document may be cut into several; only the last `ends` it, and only the first
    `begins`."""

    content: object
    place: int
    file: str
    where: object
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some documents that stand one behind the other, a few ten thousand bytes unless one is larger; and where those
    behind them begin (None: the block ends)."""

    documents: list[Raw]
    end: int | None


class Blocks(Protocol):
    """`digest` differs wherever the documents of a block may."""

    @property
    def digest(self) -> str: ...

    @property
    def files(self) -> Sequence[File]: ...

    def __len__(self) -> int: ...

    def read(self, block: int, place: int) -> Chunk:
        """The next documents of a block, from `place` on: its beginning (0), the place of one, or the end of a chunk.
        Nothing is kept open for what comes after. Raises DataError, OSError, StoreError."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as ids, its end among them, and which of them are to be learnt."""

    ids: Ids
    learnt: npt.NDArray[np.bool_]
    place: int


class Encoder:
    """`template`: documents are lists of messages."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def end(self) -> int:
        return self._tokenizer.end

    def encode(self, chunk: Sequence[Raw]) -> list[Encoded]:
        """Raises DataError."""
        parts = [self._parts(raw) for raw in chunk]
        try:
            ids = iter(self._tokenizer.encode([text for own in parts for text, _ in own]))
        except ValueError as error:
            if len(chunk) == 1:
                raise DataError(chunk[0].file, str(chunk[0].where), shown(chunk[0].content), str(error)) from error
            return [self.encode([raw])[0] for raw in chunk]  # one of them will say so
        return [
            self._joined(raw, [(next(ids), learnt) for _, learnt in own]) for raw, own in zip(chunk, parts, strict=True)
        ]

    def _parts(self, raw: Raw) -> list[tuple[str, bool]]:
        if self._template is None:
            if not isinstance(raw.content, str):
                raise DataError(raw.file, str(raw.where), shown(raw.content), "is no text")
            return [(raw.content, True)]
        try:
            return self._template.parts(raw.content)
        except ValueError as error:
            raise DataError(raw.file, str(raw.where), shown(raw.content), str(error)) from error

    def _joined(self, raw: Raw, parts: list[tuple[Ids, bool]]) -> Encoded:
        """What comes first in a document cannot be known from the document before it, so it is not to be learnt; its
        end is, unless it follows what is not."""
        ids = [part for part, _ in parts]
        learnt = [np.full(len(part), value) for part, value in parts]
        if raw.ends:
            ids.append(np.array([self.end], dtype=np.uint32))
            learnt.append(np.array([self._template is None]))
        mask = np.concatenate(learnt) if learnt else np.zeros(0, dtype=np.bool_)
        if raw.begins:
            mask[:1] = False
        return Encoded(np.concatenate(ids) if ids else np.zeros(0, dtype=np.uint32), mask, raw.place)


def shown(value: object) -> str:
    """As messages quote it."""
    text = show(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
