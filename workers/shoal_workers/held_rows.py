"""Rows of blocks that are being read, laid out so that any of them are at hand: a column of a block as an Arrow file.

A row group or a large record batch can only be read from its beginning, and hundreds of streams read parts of as many
in turn. So each block is taken out once, whole, and its neighbours with it; what does not fit into a bounded room of
memory lies on the node's disk. No file is kept open between reads.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
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
        self.limit_bytes = limit_bytes
        self._held: OrderedDict[str, tuple[Laid, DataCache | None]] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def get(self, key: str) -> Laid | None:
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: str, content: Laid, cache: DataCache | None) -> None:
        gone = []
        self.drop(key)
        with self._lock:
            self._held[key] = (content, cache)
            self._num_bytes += len(content)
            while self._num_bytes > self.limit_bytes:
                old, (held, below) = self._held.popitem(last=False)
                self._num_bytes -= len(held)
                gone.append((old, held, below))
        for old, held, below in gone:
            if below is not None:
                below.keep(old, 0, memoryview(held.buffer))

    def drop(self, key: str) -> None:
        with self._lock:
            if key in self._held:
                self._num_bytes -= len(self._held.pop(key)[0])


class Laid:
    """A laid out block, opened: to do that for each of its chunks takes longer than to read them."""

    def __init__(self, buffer: Any) -> None:
        import pyarrow as pa

        file = pa.ipc.open_file(pa.BufferReader(buffer))
        self.buffer = buffer
        self._starts = _starts_of(file)
        self._columns = [_column(file, number) for number in range(file.num_record_batches)]  # that copies nothing

    def __len__(self) -> int:
        return int(self.buffer.size)

    def chunk(self, row: int) -> tuple[Any, bool]:
        """See `HeldRows`."""
        return _chunk(self._starts, row, self._columns.__getitem__)


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

        held = _ROOM.get(self._key(block))
        if held is not None:
            return held.chunk(row)
        path = None if self._cache is None else self._cache.kept(self._key(block), 0)
        if path is None:
            return None
        try:
            with pa.OSFile(str(path)) as source:  # not mapped: whoever cuts a mapped file short ends the process
                file = pa.ipc.open_file(source)
                return _chunk(_starts_of(file), row, functools.partial(_column, file))
        except (OSError, ValueError):
            return None  # it was removed at this moment, or the disk has spoilt it: it is taken out anew

    @property
    def room_bytes(self) -> int:
        """How much can be kept in memory until it is read. (To put on disk what nobody asked for yet takes ten times as
        long as to decode it.)"""
        return _ROOM.limit_bytes

    def hold(self, block: int, arrays: Iterable[Any]) -> Laid:
        """`arrays` are all its rows, in order. Others may need the room at once: what comes back is here still."""
        laid = Laid(_laid_out(arrays))
        _ROOM.put(self._key(block), laid, self._cache)
        return laid

    def let_go(self, block: int) -> None:
        """It was read to its end."""
        _ROOM.drop(self._key(block))

    def _key(self, block: int) -> str:
        return f"rows {self._name} {block}"


def _starts_of(file: Any) -> list[int]:
    found: list[int] = json.loads(file.schema.metadata[_STARTS])
    return found


def _column(file: Any, number: int) -> Any:
    return file.get_batch(number).column(0)


def _chunk(starts: list[int], row: int, column: Callable[[int], Any]) -> tuple[Any, bool]:
    number = bisect_right(starts, row) - 1
    if number < 0:
        return (), True
    return column(number).slice(row - starts[number]), number + 1 == len(starts)


def _laid_out(arrays: Iterable[Any]) -> Any:
    """A buffer of pyarrow's."""
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
    return sink.getvalue()


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
