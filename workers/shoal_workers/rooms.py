"""Room for a node's snapshots: a folder in memory, and one on disk, within a budget, for what has no room there.

Owns in which of the two a file comes to lie, how much is left, and telling of it whoever watches. What is in the files
is the shard store's.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog

from shoal_workers.messages import RoomShort

log = structlog.get_logger()

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):
    """Neither in memory nor within the budget on disk."""


class Rooms:
    """Any thread may call. `memory` and `disk` have a folder for each job; with no budget nothing lies on disk.
    `make_way` is called when there has to: what else lies there is worth less."""

    def __init__(
        self,
        memory: Path,
        disk: Path | None = None,
        disk_limit_bytes: int = 0,
        make_way: Callable[[], object] = lambda: None,
    ) -> None:
        self.memory = memory
        self.disk = disk if disk_limit_bytes > 0 else None
        self._limit_bytes = disk_limit_bytes
        self._make_way = make_way
        self._lock = threading.Lock()
        self._told: dict[str, RoomShort] = {}
        self._watchers: defaultdict[str, list[queue.SimpleQueue[Any]]] = defaultdict(list)
        for folder in self.folders():
            folder.mkdir(parents=True, exist_ok=True)

    def folders(self) -> tuple[Path, ...]:
        return (self.memory,) if self.disk is None else (self.memory, self.disk)

    def place(self, job: str, num_bytes: int, make: Callable[[Path], T]) -> T:
        """`make`s so many bytes of files in the nearest folder that has room for them; what a failed attempt leaves is
        its own to remove. Raises NoRoom."""
        try:
            return make(self.memory / job)
        except OSError as error:
            if error.errno not in _FULL:
                raise
        if self.disk is not None:
            self._make_way()
        if self.disk is not None and num_bytes <= self._free_on_disk(self.disk):
            try:
                made = make(self.disk / job)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
            else:
                self._tell(job, num_bytes, on_disk=True)
                return made
        self._tell(job, num_bytes, on_disk=False)
        raise NoRoom(errno.ENOSPC, self._problem(num_bytes))

    def room_bytes(self) -> int:
        """What snapshots of all jobs take and could take."""
        free = _free_bytes(self.memory)
        if self.disk is not None:
            free += max(0, self._free_on_disk(self.disk))
        return free + sum(map(_used_bytes, self.folders()))

    def left_of_budget(self) -> int:
        """Bytes on disk that snapshots do not take."""
        return 0 if self.disk is None else self._limit_bytes - _used_bytes(self.disk)

    def watch(self, job: str, events: queue.SimpleQueue[Any]) -> None:
        """Puts what was told last of this job into the queue, and from then on what is new."""
        with self._lock:
            if job in self._told:
                events.put(self._told[job])
            self._watchers[job].append(events)

    def unwatch(self, job: str, events: queue.SimpleQueue[Any]) -> None:
        with self._lock:
            self._watchers[job].remove(events)

    def forget(self, job: str) -> None:
        with self._lock:
            self._told.pop(job, None)

    def _tell(self, job: str, num_bytes: int, *, on_disk: bool) -> None:
        """Of each job once that some of it lies on disk, and each time that there was no room at all."""
        news = RoomShort(job=job, num_bytes=num_bytes, on_disk=on_disk, room_bytes=self.room_bytes())
        with self._lock:
            before = self._told.get(job)
            self._told[job] = news
            if before is not None and before.on_disk and on_disk:
                return
            log.warning("no room in memory for snapshots", job=job, num_bytes=num_bytes, on_disk=on_disk)
            for events in self._watchers[job]:
                events.put(news)

    def _free_on_disk(self, disk: Path) -> int:
        return min(self.left_of_budget(), _free_bytes(disk))

    def _problem(self, num_bytes: int) -> str:
        here = f"{_free_bytes(self.memory)} are free in memory ({self.memory})"
        if self.disk is None:
            return f"no room for {num_bytes} bytes of snapshots: {here}"
        there = f"{max(0, self._free_on_disk(self.disk))} of {self._limit_bytes} on disk ({self.disk})"
        return f"no room for {num_bytes} bytes of snapshots: {here}, {there}"


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _used_bytes(folder: Path) -> int:
    """Others make and remove files meanwhile: what is gone takes no room."""
    files = (path for job in _entries(folder) for path in _entries(job) if ".slot" in path.name)
    return sum(map(_size_bytes, files))


def _entries(folder: Path) -> tuple[Path, ...]:
    try:
        return tuple(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
