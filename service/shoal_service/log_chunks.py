"""Printed lines in chunks: how a chunk is written, and finding lines in it. Pure; where chunks lie is log_store.py.

A chunk is compressed text with a JSON array for each line: time of day, level, attempt, rank, node, text.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
CHUNK_BYTES = 2**18
CHUNK_LINES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One printed line. `at_s` by the clock of its node; `attempt` is the epoch; `rank` and `node` are None where
    nobody knows."""

    at_s: float
    level: str
    attempt: int
    rank: int | None
    node: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which lines: of this rank, node and attempt, at least as serious as `level`, with `search` somewhere in the text
    (in whatever case), from `since_s` up to `until_s`. None: any."""

    rank: int | None = None
    node: str | None = None
    attempt: int | None = None
    level: str | None = None
    search: str | None = None
    since_s: float | None = None
    until_s: float | None = None

    @property
    def worst(self) -> int:
        return 0 if self.level is None else LEVELS.index(self.level)

    def takes(self, line: Line) -> bool:
        return (
            (self.rank is None or line.rank == self.rank)
            and (self.node is None or line.node == self.node)
            and (self.attempt is None or line.attempt == self.attempt)
            and LEVELS.index(line.level) >= self.worst
            and (self.since_s is None or line.at_s >= self.since_s)
            and (self.until_s is None or line.at_s <= self.until_s)
            and (self.search is None or self.search.lower() in line.text.lower())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is common to the lines of a chunk; the names are those of the columns of LogChunkRow."""

    num_lines: int
    num_bytes: int
    first_at_s: float
    last_at_s: float
    first_attempt: int
    last_attempt: int
    worst: int


def packed(lines: Sequence[Line]) -> bytes:
    """At least one."""
    return zlib.compress("\n".join(_row(line) for line in lines).encode(errors="backslashreplace"))


def unpacked(content: bytes) -> list[Line]:
    return [_line(row) for row in _text(content).split("\n")]


def summary(lines: Sequence[Line]) -> Summary:
    return Summary(
        num_lines=len(lines),
        num_bytes=sum(num_bytes(line) for line in lines),
        first_at_s=min(line.at_s for line in lines),
        last_at_s=max(line.at_s for line in lines),
        first_attempt=min(line.attempt for line in lines),
        last_attempt=max(line.attempt for line in lines),
        worst=max(LEVELS.index(line.level) for line in lines),
    )


def num_bytes(line: Line) -> int:
    """Of its text, with the end of the line."""
    return len(line.text.encode(errors="backslashreplace")) + 1


def cut(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Into chunks."""
    chunk: list[Line] = []
    size = 0
    for line in lines:
        if chunk and (size >= CHUNK_BYTES or len(chunk) >= CHUNK_LINES):
            yield chunk
            chunk, size = [], 0
        chunk.append(line)
        size += num_bytes(line)
    if chunk:
        yield chunk


def found(content: bytes, wanted: Wanted) -> list[tuple[int, Line]]:
    """Which lines of a chunk are wanted, each with its place in it."""
    text = _text(content)
    needle = None if wanted.search is None else json.dumps(wanted.search, ensure_ascii=False)[1:-1].lower()
    if needle is not None and needle not in text.lower():
        return []
    # Most rows need not be read as JSON to know that they are not wanted, which takes ten times as long.
    rows = ((place, row) for place, row in enumerate(text.split("\n")) if _may_be(row, wanted, needle))
    lines = ((place, _line(row)) for place, row in rows)
    return [(place, line) for place, line in lines if wanted.takes(line)]


def _may_be(row: str, wanted: Wanted, needle: str | None) -> bool:
    if needle is not None and needle not in row.lower():
        return False
    if wanted.rank is None and wanted.attempt is None:
        return True
    _, _, attempt, rank, _ = row.split(",", 4)
    of_rank = wanted.rank is None or rank == str(wanted.rank)
    return of_rank and (wanted.attempt is None or attempt == str(wanted.attempt))


def _text(content: bytes) -> str:
    return zlib.decompress(content).decode()


def _row(line: Line) -> str:
    values = [line.at_s, line.level, line.attempt, line.rank, line.node, line.text]
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def _line(row: str) -> Line:
    values: list[Any] = json.loads(row)
    at_s, level, attempt, rank, node, text = values
    return Line(at_s=at_s, level=level, attempt=attempt, rank=rank, node=node, text=text)
