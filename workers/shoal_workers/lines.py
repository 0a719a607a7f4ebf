"""Text and jsonl files as blocks: ranges of bytes, aligned to lines.

All files are laid end to end, and block b owns what begins in bytes [b * block_bytes, (b + 1) * block_bytes) of that.
Of jsonl that is lines, each a document. A text file is one document, which may be cut at line ends, and where no line
ends for long, between two characters. Both borders follow from the bytes around them alone, so nothing is read through.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from shoal_planner.errors import show
from shoal_workers.documents import Chunk, Raw, shown, what_then
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File, looked_at
from shoal_workers.plain_text import text_of

# Hundreds of streams keep the tokens that are left over of a chunk, and at the end these were made for nothing.
_CHUNK_BYTES = 2**14
_LINES_BYTES = 2**15  # which are asked for at once: fewer documents together are encoded more slowly
_LOOK_BYTES = 2**16  # how far for the end of a line
_FIRST_LOOK_BYTES = 2**10
_LONGEST_LINE_BYTES = 64 * 2**20
_COUNTED_BYTES = 2**20
_CONTEXT_BYTES = 64
_BYTE_ORDER_MARK = "\ufeff"
_MARK_BYTES = _BYTE_ORDER_MARK.encode()
_ARRAY = "is no JSON object, but of an array: write each object on a line of its own, as jq -c '.[]' does"
_SCAN = json.JSONDecoder().raw_decode
_CONTINUES = range(0x80, 0xC0)  # of UTF-8: bytes within a character


class _Ranges:
    """`block_bytes` of all `files`, one behind the other."""

    def __init__(self, files: Sequence[File], block_bytes: int) -> None:
        self.files = tuple(files)
        self._starts = tuple(accumulate((file.num_bytes for file in files), initial=0))
        self._block_bytes = block_bytes

    def __len__(self) -> int:
        return -(-self._starts[-1] // self._block_bytes)

    @property
    def digest(self) -> str:
        return " ".join(f"{file.relative}:{file.num_bytes}:{file.version}" for file in self.files)

    def _parts(self, block: int) -> Iterator[tuple[int, int, int]]:
        """File and its bytes [low, high) in which what begins is the block's."""
        first, last = block * self._block_bytes, min((block + 1) * self._block_bytes, self._starts[-1])
        index = bisect_right(self._starts, first) - 1
        while first < last:
            start, end = self._starts[index], min(last, self._starts[index + 1])
            yield index, first - start, end - start
            first = end
            index += 1


class TextBlocks(_Ranges):
    """Text files, in UTF-8."""

    def read(self, block: int, place: int) -> Chunk:
        """See `Blocks`."""
        base, found, num_bytes = block * self._block_bytes, list[Raw](), 0
        for index, low, high in self._parts(block):
            file, start = self.files[index], self._starts[index]
            first, end = _cut(file, low), _cut(file, high)
            first = max(first, place + base - start)
            while first < end:
                if num_bytes >= _CHUNK_BYTES:
                    return Chunk(found, start + first - base)
                last = min(end, _cut(file, first + _CHUNK_BYTES))
                text = text_of(file, first, file.read(first, last - first))
                raw = Raw(
                    content=text.removeprefix(_BYTE_ORDER_MARK) if first == 0 else text,
                    place=start + first - base,
                    file=file.name,
                    where=f"byte {first}",
                    begins=first == 0,
                    ends=last == file.num_bytes,
                    before=_before(file, first),
                )
                found.append(raw)
                num_bytes += last - first
                first = last
        return Chunk(found, None)


class JsonLines(_Ranges):
    """Each line an object, of which `field` is the document, and `tools_field`, if it has that, the tools of a chat.
    Empty lines are passed over; a line that is null is a document that is."""

    def __init__(self, files: Sequence[File], block_bytes: int, field: str, tools_field: str | None = None) -> None:
        super().__init__(files, block_bytes)
        self._field = field
        self._tools_field = tools_field

    def read(self, block: int, place: int) -> Chunk:
        """See `Blocks`."""
        base, found, num_bytes = block * self._block_bytes, list[Raw](), 0
        for index, low, high in self._parts(block):
            file, start = self.files[index], self._starts[index]
            first = place + base - start
            if first <= low:
                first = _next_line(file, low, high)
            while first < high:
                if num_bytes >= _LINES_BYTES // 2:
                    return Chunk(found, start + first - base)
                content = _lines(file, first)
                found += self._documents(file, first, high, content, start - base)
                num_bytes += len(content)
                first += len(content)
        return Chunk(found, None)

    def check_first(self) -> None:
        """Of some files the first document that is there, before others are trained on. Raises DataError, OSError,
        StoreError."""
        for file in looked_at(self.files):
            documents = self._documents(file, 0, file.num_bytes, _lines(file, 0), 0)
            next((raw for raw in documents if raw.content is not None), None)

    def _documents(self, file: File, offset: int, high: int, content: bytes, shift: int) -> Iterator[Raw]:
        """Of the lines that begin before `high`; `content` stands at `offset`. `shift` makes places of offsets."""
        for line in content.split(b"\n"):
            if offset >= high:
                return
            if line.strip():
                yield self._document(file, offset, line, shift)
            offset += len(line) + 1

    def _document(self, file: File, offset: int, line: bytes, shift: int) -> Raw:
        try:
            value = _parsed(line)
        except (ValueError, RecursionError) as error:
            problem = _ARRAY if _begins_array(line) else f"is no JSON ({error})"
            raise self._wrong(file, offset, line, problem) from error
        if value is None:
            return Raw(None, offset + shift, file.name, _Line(file, offset))
        if not isinstance(value, dict):
            raise self._wrong(file, offset, line, _ARRAY if _begins_array(line) else "is no JSON object")
        if self._field not in value:
            problem = f"has no field {show(self._field)}: it has {shown(list(value))}{what_then(self._field, value)}"
            raise self._wrong(file, offset, line, problem)
        tools = None if self._tools_field is None else value.get(self._tools_field)
        return Raw(value[self._field], offset + shift, file.name, _Line(file, offset), tools=tools)

    def _wrong(self, file: File, offset: int, line: bytes, problem: str) -> DataError:
        return DataError(file.name, str(_Line(file, offset)), shown(line.decode("utf-8", "replace")), problem)


def _parsed(line: bytes) -> Any:
    """As `json.loads`, in two thirds of the time where a line is as it mostly is: UTF-8 with nothing around it. Raises
    ValueError, RecursionError."""
    try:
        text = line.decode()
        value, end = _SCAN(text)
        if end == len(text):
            return value
    except (ValueError, RecursionError):
        pass  # it may be right still, and if not, this is not who says why
    return json.loads(line)


def _begins_array(line: bytes) -> bool:
    return line.removeprefix(_MARK_BYTES).lstrip().startswith(b"[")


class _Line(NamedTuple):
    """Its number is counted only when it is shown: to know it, all before it has to be read."""

    file: File
    offset: int

    def __str__(self) -> str:
        number = 1
        for first in range(0, self.offset, _COUNTED_BYTES):
            number += self.file.read(first, min(_COUNTED_BYTES, self.offset - first)).count(b"\n")
        return f"line {number}"


def _lines(file: File, first: int) -> bytes:
    """Whole lines, the first of which begins at `first`. Raises DataError where one is too long."""
    found = b""
    while True:
        num_bytes = min(max(_LINES_BYTES, len(found)), file.num_bytes - first - len(found))
        found += file.read(first + len(found), num_bytes)
        if first + len(found) == file.num_bytes:
            return found
        end = found.rfind(b"\n") + 1
        if end:
            return found[:end]
        if len(found) > _LONGEST_LINE_BYTES:
            problem = f"have no line end: a line may have {_LONGEST_LINE_BYTES}"
            raise DataError(file.name, str(_Line(file, first)), f"{len(found)} bytes", problem)


def _next_line(file: File, low: int, high: int) -> int:
    """Where the first line begins that begins in [low, high); `high` if there is none."""
    if low == 0:
        return 0
    position = low - 1  # the line begins at `low` if this ends one
    while position < high - 1:
        found = file.read(position, min(_LOOK_BYTES, high - 1 - position))
        at = found.find(b"\n")
        if at >= 0:
            return position + at + 1
        position += len(found)
    return high


def _before(file: File, position: int) -> str:
    """The last characters before it."""
    first = max(0, position - _CONTEXT_BYTES)
    return file.read(first, position - first).decode("utf-8", "ignore") if position else ""


def _cut(file: File, position: int) -> int:
    """The first place from `position` on where a text may be cut: the begin of a line, or, if there is none for long,
    of a character. Never before that of an earlier position."""
    if position <= 0:
        return 0
    if position >= file.num_bytes:
        return file.num_bytes
    for num_bytes in (_FIRST_LOOK_BYTES, _LOOK_BYTES):
        found = file.read(position - 1, min(num_bytes, file.num_bytes - position + 1))
        at = found.find(b"\n")
        if at >= 0:
            return position + at
    after = position - 1 + len(found)
    if after >= file.num_bytes:
        return file.num_bytes
    ahead = file.read(after, min(4, file.num_bytes - after))
    return after + next((index for index, byte in enumerate(ahead) if byte not in _CONTINUES), len(ahead))
