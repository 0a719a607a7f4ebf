"""The lines that processes of one node print, as its agent hands them out: read from their files (`log_output`), told
apart, numbered, and kept until somebody says that they stand elsewhere.

Bounded in memory and on disk: what nobody fetches stays in the files, and where those take too much the oldest are
given up and a line says how many lines that were. Files are deleted when all of them is kept elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from shoal_workers.log_levels import WARNING, Levels
from shoal_workers.log_messages import ReadLogs
from shoal_workers.log_output import FileName
from shoal_workers.rows import Row

log = structlog.get_logger()

_LOOK_S = 0.2
_READ_BYTES = 2**18
_KEPT_BYTES = 8 * 2**20  # of lines in memory, at most
_LINE_BYTES = 2**13  # of one line, the rest is left out
_ENDLESS_BYTES = 2**16  # without the end of a line: it is taken for one
_QUIET_S = 1.0  # after which the beginning of a line is taken for all of it
_GONE_S = 60.0
_OVERHEAD_BYTES = 100  # of a line in memory, beside its text
_STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # for terminals alone
_OFFSETS = "read.json"


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    job: str
    name: FileName
    read: int = 0  # up to this byte it was read,
    kept: int = 0  # and all before this one is kept elsewhere
    partial: bytes = b""
    grown_s: float = 0.0
    levels: Levels = field(default_factory=Levels)


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    file: _File
    end: int
    at_s: float
    level: str
    text: str

    def row(self) -> Row:
        name = self.file.name
        return [self.number, self.file.job, self.at_s, self.level, name.epoch, name.rank, self.text]

    @property
    def num_bytes(self) -> int:
        return len(self.text) + _OVERHEAD_BYTES


class LogSpool:
    """Of the files in `folder`, one folder for each job. Files may take `limit_bytes` before they are read."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        kept_bytes: int = _KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.life = uuid.uuid4().hex[:12]
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._kept_bytes = kept_bytes
        self._clock, self._wall_clock = clock, wall_clock
        self._files: dict[str, _File] = {}
        self._lines: deque[_Line] = deque()
        self._num_bytes = 0
        self._last = 0
        self._offsets = self._read_offsets()
        self._changed = threading.Condition()
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="log-spool", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def read(self, asked: ReadLogs) -> list[Row]:
        """The rows of LogsAre."""
        mine = asked.life == self.life
        after, have = (asked.after, asked.have) if mine else (0, 0)
        with self._changed:
            self._forget(have)
            self._changed.wait_for(lambda: self._last > after, asked.wait_s)
            return self._rows(after, asked.max_bytes)

    def look(self) -> None:
        """Reads what has come. One thread calls."""
        with self._changed:
            for path in self._paths():
                self._add(path)
            for file in self._in_order():
                self._read(file)
            self._give_up()
            self._clear()
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self.look()
            except OSError as error:  # a disk that is full or broken: the agent has more to do than this
                log.warning("printed lines are not read", why=str(error))

    # --- handing out ---

    def _rows(self, after: int, max_bytes: int) -> list[Row]:
        rows: list[Row] = []
        for line in self._lines:
            if line.number <= after:
                continue
            if rows and max_bytes <= 0:
                break
            rows.append(line.row())
            max_bytes -= line.num_bytes
        return rows

    def _forget(self, have: int) -> None:
        while self._lines and self._lines[0].number <= have:
            line = self._lines.popleft()
            self._num_bytes -= line.num_bytes
            line.file.kept = max(line.file.kept, line.end)

    # --- reading ---

    def _paths(self) -> list[Path]:
        return [path for path in self._folder.glob("*/*.log") if str(path) not in self._files]

    def _add(self, path: Path) -> None:
        name = FileName.read(path.name)
        if name is not None:
            begin = self._offsets.pop(f"{path.parent.name}/{path.name}", 0)
            self._files[str(path)] = _File(path, path.parent.name, name, begin, begin, grown_s=self._clock())

    def _in_order(self) -> list[_File]:
        """Those of one process in the order in which it wrote them."""
        return sorted(self._files.values(), key=lambda file: (file.job, file.name.pid, file.name.number))

    def _read(self, file: _File) -> None:
        if _size(file.path) > file.read:
            self._read_on(file)
        if file.partial and self._clock() - file.grown_s > _QUIET_S:
            self._emit(file, file.partial, file.read, self._wall_clock() - _QUIET_S)
            file.partial = b""

    def _read_on(self, file: _File) -> None:
        with contextlib.suppress(FileNotFoundError), file.path.open("rb") as opened:
            opened.seek(file.read)
            while self._num_bytes < self._kept_bytes and (found := opened.read(_READ_BYTES)):
                # Of what came long ago nobody knows when; the last of it was written then.
                at_s = min(self._wall_clock(), os.fstat(opened.fileno()).st_mtime)
                file.grown_s = self._clock()
                self._split(file, found, at_s)

    def _split(self, file: _File, found: bytes, at_s: float) -> None:
        begin = file.read - len(file.partial)
        file.read += len(found)
        *lines, file.partial = (file.partial + found).split(b"\n")
        for line in lines:
            begin += len(line) + 1
            self._emit(file, line, begin, at_s)
        if len(file.partial) > _ENDLESS_BYTES:
            self._emit(file, file.partial, file.read, at_s)
            file.partial = b""

    def _emit(self, file: _File, raw: bytes, end: int, at_s: float) -> None:
        # Of what a progress bar has drawn over and over, a reader wants the last.
        shown = raw.rstrip(b"\r").rpartition(b"\r")[2]
        text = _STYLE.sub("", shown[:_LINE_BYTES].decode(errors="replace")).replace("\x00", "")
        if len(shown) > _LINE_BYTES:
            text += f" ... ({len(shown) - _LINE_BYTES} bytes more)"
        self._append(file, end, at_s, file.levels.of(text), text)

    def _append(self, file: _File, end: int, at_s: float, level: str, text: str) -> None:
        self._last += 1
        line = _Line(self._last, file, end, at_s, level, text)
        self._lines.append(line)
        self._num_bytes += line.num_bytes

    # --- files that go ---

    def _give_up(self) -> None:
        """The oldest of what was not read, where that is too much."""
        unread = [(file, size - file.read) for file in self._in_order() if (size := _size(file.path)) > file.read]
        too_much = sum(num_bytes for _, num_bytes in unread) - self._limit_bytes
        for file, num_bytes in sorted(unread, key=lambda each: _modified_s(each[0].path)):
            if too_much <= 0:
                return
            too_much -= num_bytes
            num_lines, end = _count_lines(file.path, file.read)
            text = f"{num_lines} lines were dropped: nobody fetched them, and there is no room for more"
            file.read, file.partial = end, b""
            self._append(file, end, self._wall_clock(), WARNING, text)

    def _clear(self) -> None:
        """Deletes files of which nothing is lacking elsewhere, and writes down how far the others are."""
        newest = {(file.job, file.name.pid): file.name.number for file in self._in_order()}
        for key, file in list(self._files.items()):
            # Children of a process that turned to another file, or is gone, may write on for a while.
            quiet = self._clock() - file.grown_s > _GONE_S
            left = file.name.number < newest[file.job, file.name.pid] or not _lives(file.name.pid)
            if quiet and left and file.kept >= _size(file.path) and not file.partial:
                file.path.unlink(missing_ok=True)
                del self._files[key]
                with contextlib.suppress(OSError):  # another one is there
                    file.path.parent.rmdir()
        offsets = {f"{file.job}/{file.path.name}": file.kept for file in self._files.values() if file.kept}
        if offsets != self._offsets:
            self._offsets = offsets
            self._folder.mkdir(parents=True, exist_ok=True)
            fresh = self._folder / f"{_OFFSETS}.new"
            fresh.write_text(json.dumps(offsets))
            fresh.replace(self._folder / _OFFSETS)

    def _read_offsets(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self._folder / _OFFSETS).read_text())
            return {str(name): int(offset) for name, offset in found.items()}
        return {}


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _modified_s(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _count_lines(path: Path, begin: int) -> tuple[int, int]:
    """From this byte on; and where it ended."""
    count, end = 0, begin
    with path.open("rb") as opened:
        opened.seek(begin)
        while found := opened.read(_READ_BYTES):
            count += found.count(b"\n")
            end += len(found)
    return count, end


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
