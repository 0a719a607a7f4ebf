"""What a rank's process has mapped of the memory that its snapshots lie in. It stays mapped from one epoch to the next,
as the agent gives the same memory again: a page that is mapped costs a tenth of one that is not. Owns these mappings.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass

from shoal_workers.slot_files import touch

_MOST_LEFT = 8  # the agent keeps those of one epoch ready; attempts to begin it may have been interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    """`descriptor` tells whether the file still has a name."""

    descriptor: int
    content: mmap.mmap


class SlotMaps:
    """Any thread may use it: that of a run that was abandoned may still be about to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, int], _Mapped] = {}  # by device and inode: names change
        self._left: deque[str] = deque(maxlen=_MOST_LEFT)

    @property
    def left(self) -> tuple[str, ...]:
        """Snapshots that this process has written and never writes again."""
        with self._lock:
            return tuple(self._left)

    def leave(self, name: str) -> None:
        with self._lock:
            self._left.append(name)

    def map(self, path: str) -> mmap.mmap:
        """The whole file, to be written, with every page mapped."""
        with self._lock:
            self._forget()
            descriptor = os.open(path, os.O_RDWR)
            found = os.fstat(descriptor)
            key = found.st_dev, found.st_ino
            known = self._mapped.get(key)
            if known is not None:
                os.close(descriptor)
                if len(known.content) >= found.st_size:
                    return known.content
                descriptor = known.descriptor
            content = mmap.mmap(descriptor, found.st_size, flags=mmap.MAP_SHARED)
            touch(content)
            self._mapped[key] = _Mapped(descriptor=descriptor, content=content)
            return content

    def _forget(self) -> None:
        """Lets go of files that nobody can give to anybody any more: their memory is free when nothing maps it."""
        for key, mapped in list(self._mapped.items()):
            if not os.fstat(mapped.descriptor).st_nlink:
                os.close(mapped.descriptor)
                del self._mapped[key]
