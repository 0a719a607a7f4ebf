"""Rows of blocks that are being read, laid out so that any of them are at hand: a column of a block as an Arrow file.

A row group or a large record batch can only be read from its beginning, and hundreds of streams read parts of as many
in turn. So each block is taken out once, whole; what does not fit into a bounded room of memory lies on the node's
disk, where it is mapped. Nothing is kept open between reads.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Any

from shoal_workers.data_cache import DataCache

CHUNK_BYTES = 2**15
_ROOM_BYTES = 64 * 2**20
_COLUMN = "column"
_STARTS = b"starts"


class _Room:
    """What was used last, of all sources of the process together. What has to go is put on disk first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[str, tuple[bytes, DataCache | None]] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: str, content: bytes, cache: DataCache | None) -> None:
        gone = []
        self.drop(key)
        with self._lock:
            self._held[key] = (content, cache)
            self._num_bytes += len(content)
            while self._num_bytes > self._limit_bytes:
                old, (held, below) = self._held.popitem(last=False)
                self._num_bytes -= len(held)
                gone.append((old, held, below))
        for old, held, below in gone:
            if below is not None:
                below.keep(old, 0, held)

    def drop(self, key: str) -> None:
        with self._lock:
            if key in self._held:
                self._num_bytes -= len(self._held.pop(key)[0])


_ROOM = _Room(_ROOM_BYTES)


class HeldRows:
    """Of one source. Keys are told apart by `name`, which differs wherever rows may."""

    def __init__(self, name: str, cache: DataCache | None) -> None:
        self._name = name
        self._cache = cache

    def chunk(self, block: int, row: int) -> tuple[Any, bool] | None:
        """An array of what stands from that row of the block on, a part of it, and whether it is the last; None if the
        block is not held."""
        import pyarrow as pa

        content, path = _ROOM.get(self._key(block)), None
        if content is None:
            path = None if self._cache is None else self._cache.kept(self._key(block), 0)
            if path is None:
                return None
        try:
            with pa.BufferReader(content) if path is None else pa.memory_map(str(path)) as source:
                return _chunk(pa.ipc.open_file(source), row)
        except (OSError, ValueError):
            if path is None:
                raise
            return None  # it was removed at this moment, or the disk has spoilt it: it is taken out anew

    def hold(self, block: int, arrays: Iterable[Any]) -> None:
        """`arrays` are all its rows, in order."""
        _ROOM.put(self._key(block), _laid_out(arrays), self._cache)

    def let_go(self, block: int) -> None:
        """It was read to its end."""
        _ROOM.drop(self._key(block))

    def _key(self, block: int) -> str:
        return f"rows {self._name} {block}"


def _chunk(file: Any, row: int) -> tuple[Any, bool]:
    starts = json.loads(file.schema.metadata[_STARTS])
    number = bisect_right(starts, row) - 1
    if number < 0:
        return (), True
    column = file.get_batch(number).column(0)
    return column.slice(row - starts[number]), number + 1 == file.num_record_batches


def _laid_out(arrays: Iterable[Any]) -> bytes:
    import pyarrow as pa

    plain = (array.dictionary_decode() if pa.types.is_dictionary(array.type) else array for array in arrays)
    parts = [part for array in plain for part in _bounded(array)]
    kind = parts[0].type if parts else pa.null()
    starts, row = [], 0
    for part in parts:
        starts.append(row)
        row += len(part)
    schema = pa.schema([pa.field(_COLUMN, kind)], metadata={_STARTS: json.dumps(starts)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for part in parts:
            writer.write_batch(pa.record_batch([part], schema=schema))
    found: bytes = sink.getvalue().to_pybytes()
    return found


def _bounded(array: Any) -> Iterator[Any]:
    """Parts of a column that have few bytes, or a single row."""
    if not len(array):
        return
    if len(array) == 1 or array.nbytes <= CHUNK_BYTES:
        yield array
        return
    half = len(array) // 2
    yield from _bounded(array.slice(0, half))
    yield from _bounded(array.slice(half))
