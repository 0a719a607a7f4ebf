"""Files of an object store, by range: fetched in pieces of which the node keeps some on its disk, and the process the
last few in memory.

An object is read as it was listed: one that was replaced or removed since is no data to go on with.
"""

from __future__ import annotations

import io
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

import structlog

from shoal_recovery.errors import StoreChanged, StoreRefused, StoreUnreachable
from shoal_recovery.store import Entry, Store
from shoal_workers.data_cache import PIECE_BYTES, DataCache
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import whole

log = structlog.get_logger()

T = TypeVar("T")

_PIECES_IN_MEMORY = 4  # for neighbours are often read in turn
_PAUSES_S = (0.1, 0.3, 1.0)  # a connection that breaks is no reason to begin a step anew
_PATIENCE_S = 10.0  # where no answer takes as long as that, the next one will not be quicker


class _Pieces:
    """The last few that were fetched, of all files together."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, key: str, number: int) -> bytes | None:
        with self._lock:
            return self._held.get((key, number))

    def put(self, key: str, number: int, content: bytes) -> None:
        with self._lock:
            self._held[key, number] = content
            while len(self._held) > _PIECES_IN_MEMORY:
                self._held.popitem(last=False)


_PIECES = _Pieces()  # one for the process: their number is bounded however many sources a job has


class FarFile:
    """See `File`."""

    def __init__(self, store: Store, entry: Entry, relative: str, cache: DataCache | None) -> None:
        self._store = store
        self._entry = entry
        self._cache = cache
        self._key = f"{store.uri} {entry.name} {entry.num_bytes} {entry.version}"
        self.relative = relative
        self.name = f"{store.uri}/{entry.name}"
        self.num_bytes = entry.num_bytes
        self.version = self.tag = entry.version

    def read(self, offset: int, num_bytes: int) -> bytes:
        parts, end = [], min(offset + num_bytes, self.num_bytes)
        position = offset
        while position < end:
            number, within = divmod(position, PIECE_BYTES)
            parts.append(self._part(number, within, min(end - position, PIECE_BYTES - within)))
            position += len(parts[-1])
        return whole(self.name, b"".join(parts), offset, num_bytes)

    def open(self) -> Any:
        return io.BufferedReader(_FarStream(self), buffer_size=2**16)

    def _part(self, number: int, offset: int, num_bytes: int) -> bytes:
        """Of one piece."""
        first = number * PIECE_BYTES
        piece_bytes = min(PIECE_BYTES, self.num_bytes - first)
        held = _PIECES.get(self._key, number)
        if held is None and self._cache is not None:
            found = self._cache.part(self._key, number, piece_bytes, offset, num_bytes)
            if found is not None:
                return found
        if held is None:
            held = self._fetched(first, piece_bytes)
            _PIECES.put(self._key, number, held)
            if self._cache is not None:
                self._cache.keep(self._key, number, held)
        return held[offset : offset + num_bytes]

    def _fetched(self, first: int, num_bytes: int) -> bytes:
        try:
            return _patiently(lambda: self._store.read_listed(self._entry, first, num_bytes))
        except StoreChanged as error:
            problem = f"are not there any more as they were when training began: {error.problem}"
            raise DataError(self.name, f"at byte {first}", f"{num_bytes} bytes", problem) from error


def _patiently(ask: Callable[[], T]) -> T:
    """Asks again a few times where there is no answer, as long as it is quick to say so. Raises what `ask` does."""
    began_s = time.monotonic()
    for pause_s in _PAUSES_S:
        try:
            return ask()
        except StoreRefused:
            raise
        except StoreUnreachable as error:
            if time.monotonic() - began_s > _PATIENCE_S:
                raise
            log.info("data is asked for again", error=str(error))
        time.sleep(pause_s)
    return ask()


class _FarStream(io.RawIOBase):
    def __init__(self, file: FarFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.num_bytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        num_bytes = max(0, min(len(buffer), self._file.num_bytes - self._position))
        buffer[:num_bytes] = self._file.read(self._position, num_bytes)
        self._position += num_bytes
        return num_bytes
