"""What a block of documents is, and how documents become tokens.

A block is a part of a source that is read in one go, from its beginning or from the place of a document in it. Which
blocks there are is known from sizes of files and from their footers. `lines` and `tables` say what they are in files;
which blocks are read when, and how documents fill sequences, is `streams`' affair.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from shoal_planner.errors import show
from shoal_workers.answer_tokens import PlacedTokens, learnt_tokens
from shoal_workers.borders import BEGINS
from shoal_workers.chat import ChatTemplate, Shown
from shoal_workers.conversations import is_empty_chat
from shoal_workers.data_cache import DataCache
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File
from shoal_workers.kept_ids import KeptIds
from shoal_workers.tokenizing import Ids, Places, Tokenizer, with_begin

_MOST_SHOWN = 80
_CHATS = frozenset({"messages", "conversations"})
_FOR_CHATS = "; for chats say data.template"
log = structlog.get_logger()


class Raw(NamedTuple):
    """A document as it was read: its `content` (text, or whatever stands for it), `place` in its block, and `where`
    that is, as text for people. A document may be cut into several; only the last `ends` it, only the first
    `begins`, and `before` is the end of what stands before others. `tools` are those of a chat."""

    content: object
    place: int
    file: str
    where: object
    begins: bool = True
    ends: bool = True
    before: str = ""
    tools: object = None


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


Tokens = npt.NDArray[np.int32]  # hundreds of streams hold some that wait: half of the room is enough


class Encoded(NamedTuple):
    """A document as tokens, its end among them; what is not to be learnt is there as its complement."""

    tokens: Tokens
    place: int

    @property
    def ids(self) -> Tokens:
        return np.where(self.learnt, self.tokens, ~self.tokens & ~BEGINS)

    @property
    def learnt(self) -> npt.NDArray[np.bool_]:
        return self.tokens >= 0


class Encoder:
    """`template`: documents are lists of messages. `cache` is for ids of long texts. `by_document`: first tokens are
    marked as such."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        cache: DataCache | None = None,
        *,
        by_document: bool = False,
    ) -> None:
        self.by_document = by_document
        self._tokenizer = tokenizer
        self._encode = tokenizer.encode if cache is None else KeptIds(tokenizer, cache).encode
        self._chats = None if template is None else (template, PlacedTokens(tokenizer))
        self._end = np.array([tokenizer.end], dtype=np.uint32)
        self._said_missing = False
        self._num_empty, self._told_empty = 0, 0

    @property
    def end(self) -> int:
        return self._tokenizer.end

    def encode(self, chunk: Sequence[Raw]) -> list[Encoded]:
        """What comes first in a document cannot be known from the document before it, so it is not to be learnt; its
        end is, unless it follows what is not. Null, or a chat without messages, is none. Raises DataError."""
        if self._chats is None:
            empty = [raw for raw in chunk if raw.content is None]
        else:
            empty = [raw for raw in chunk if is_empty_chat(raw.content)]
        if empty:
            self._say_empty(empty)
            places = {raw.place for raw in empty}
            chunk = [raw for raw in chunk if raw.place not in places]
        return self._encoded(chunk)

    def _encoded(self, chunk: Sequence[Raw]) -> list[Encoded]:
        encode = self._texts if self._chats is None else functools.partial(self._shown, *self._chats)
        try:
            return encode(chunk)
        except ValueError as error:
            if len(chunk) == 1:
                raise _wrong(chunk[0], str(error)) from error
            return [self._encoded([raw])[0] for raw in chunk]  # one of them will say so

    def _texts(self, chunk: Sequence[Raw]) -> list[Encoded]:
        ids = self._encode([_text(raw) for raw in chunk], [raw.before for raw in chunk])
        if self._tokenizer.begin:
            ids = [with_begin(self._tokenizer, own) if raw.begins else own for raw, own in zip(chunk, ids, strict=True)]
        return self._ended(chunk, ids)

    def _shown(self, template: ChatTemplate, tokens: PlacedTokens, chunk: Sequence[Raw]) -> list[Encoded]:
        """Each encoded as a whole, as whoever asks the model has it encoded."""
        chats = [template.show(raw.content, raw.tools) for raw in chunk]
        placed = tokens.encode([chat.text for chat in chats])
        return [self._chat(*one) for one in zip(chunk, chats, placed, strict=True)]

    def _chat(self, raw: Raw, chat: Shown, placed: tuple[Ids, Places]) -> Encoded:
        ids, places = placed
        if chat.num_missing:
            self._say_missing(raw, chat.num_missing)
        learnt = learnt_tokens(self._tokenizer, chat.text, ids, places, chat.answers)
        learnt[:1] = False
        tokens = np.concatenate((np.where(learnt, ids, ~ids), self._end if chat.ends else ~self._end)).view(np.int32)
        if self.by_document:
            tokens[:1] = ~(Encoded(tokens[:1], raw.place).ids | BEGINS)
        return Encoded(tokens, raw.place)

    def _say_missing(self, raw: Raw, num_missing: int) -> None:
        """Once: chats of one source are alike."""
        if not self._said_missing:
            self._said_missing = True
            log.warning(
                "answers of a chat are not learnt, as the template does not show them so that they can be told",
                file=raw.file,
                where=str(raw.where),
                num_answers=num_missing,
            )

    def _say_empty(self, empty: Sequence[Raw]) -> None:
        """Again when there are ten times as many: a few are usual, very many may be a mistake. Not in which lines: all
        before them would have to be read for that."""
        self._num_empty += len(empty)
        if self._num_empty >= 10 * self._told_empty:
            self._told_empty = self._num_empty
            log.warning(
                "documents that are null, or chats without messages, are passed over",
                file=empty[0].file,
                num_documents=self._num_empty,
            )

    def _ended(self, chunk: Sequence[Raw], ids: Sequence[Ids]) -> list[Encoded]:
        """All at once: many documents are short."""
        parts: list[Ids] = []
        for raw, own in zip(chunk, ids, strict=True):
            parts.append(own)
            if raw.ends:
                parts.append(self._end)
        tokens = np.concatenate(parts or [self._end[:0]]).view(np.int32)
        found, firsts, first = [], [], 0
        for raw, own in zip(chunk, ids, strict=True):
            last = first + len(own) + raw.ends
            if raw.begins and first < last:
                firsts.append(first)
            found.append(Encoded(tokens[first:last], raw.place))
            first = last
        tokens[firsts] = ~(tokens[firsts] | BEGINS) if self.by_document else ~tokens[firsts]
        return found


def _text(raw: Raw) -> str:
    if not isinstance(raw.content, str):
        is_chat = isinstance(raw.content, list) and bool(raw.content) and isinstance(raw.content[0], dict)
        raise _wrong(raw, f"is no text{_FOR_CHATS if is_chat else ''}")
    return raw.content


def what_then(field: str, names: Iterable[str]) -> str:
    """What to say behind the `names` that are there where `field` is not."""
    return _FOR_CHATS if field not in _CHATS and not _CHATS.isdisjoint(names) else ""


def _wrong(raw: Raw, problem: str) -> DataError:
    return DataError(raw.file, str(raw.where), shown(raw.content), problem)


def shown(value: object) -> str:
    """As messages quote it."""
    text = show(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
