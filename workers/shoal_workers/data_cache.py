"""Pieces of far files on a node's own disk, within a budget: the least recently used go first.

Any number of processes may share a folder. A piece is written under another name and renamed, so it is whole or not
there; who reads one that somebody removes at that moment fetches it again. What is small and dear to find out (`notes`)
lies beside them, and goes by age alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import structlog

log = structlog.get_logger()

PIECE_BYTES = 8 * 2**20
_UNFINISHED = ".unfinished-"
_LEAVES = 0.9  # of the budget, when something has to go
_UNSEEN = 0.01  # of it, how much a process may add before it looks through all again


@dataclass(frozen=True, slots=True)
class DataCache:
    """`folder` is made when it is first needed. A disk that takes nothing is no error: then nothing is kept."""

    folder: Path
    limit_bytes: int
    # By how much this process let it grow since it looked last: at first, by nobody knows how much.
    _grown: list[float] = field(default_factory=lambda: [math.inf], compare=False, repr=False)

    def part(self, key: str, number: int, piece_bytes: int, offset: int, num_bytes: int) -> bytes | None:
        """Bytes of a piece that is kept here, and that has `piece_bytes`; else None."""
        path = self._path(key, number)
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size == piece_bytes:
                os.utime(path)
                found = os.pread(file.fileno(), num_bytes, offset)
                return found if len(found) == num_bytes else None
        return None

    def kept(self, key: str, number: int) -> Path | None:
        """Where a piece stands, if it is kept; it may be removed at any moment."""
        path = self._path(key, number)
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def keep(self, key: str, number: int, content: bytes | memoryview) -> None:
        """For whoever asks next."""
        if self.limit_bytes >= len(content):
            self._keep(self._path(key, number), content)

    def room_for_a_while(self) -> Path | None:
        """A folder for what its user removes soon; None where the disk takes none."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return self.folder

    def notes(self, key: str) -> Path:
        """Where to keep what was found out about `key`; its folder is there if the disk takes one."""
        path = self.folder / "notes" / _name(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _path(self, key: str, number: int) -> Path:
        return self.folder / _name(key) / str(number)

    def _keep(self, path: Path, content: bytes | memoryview) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent / f"{_UNFINISHED}{uuid.uuid4().hex}"
            try:
                temporary.write_bytes(content)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._grown[0] += len(content)
            if self._grown[0] > _UNSEEN * self.limit_bytes:
                self._make_way()
                self._grown[0] = 0
        except OSError as error:
            log.warning("a piece of data is not kept on disk", folder=str(self.folder), error=str(error))

    def _make_way(self) -> None:
        found = sorted(_files(self.folder))
        total = sum(num_bytes for _, num_bytes, _ in found)
        if total <= self.limit_bytes:
            return
        for _, num_bytes, path in found:
            with contextlib.suppress(OSError):  # another process may have been quicker
                path.unlink()
            total -= num_bytes
            if total <= _LEAVES * self.limit_bytes:
                return


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Oldest use, size and path of each; what vanishes meanwhile is left out."""
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
    return found


def _name(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
