"""Parquet files and Arrow datasets (as Hugging Face saves them) as blocks: row groups and record batches, several of
them where they are small, and parts of their rows where they are too few or too large.

Owns which rows a block has, and their values. What stands where is told by Parquet's footers and by the messages of
Arrow's streams (`arrow_streams`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from shoal_planner.errors import InvalidField, show
from shoal_recovery.errors import StoreError
from shoal_workers.arrow_streams import BATCH, Message, messages_of
from shoal_workers.data_cache import DataCache
from shoal_workers.data_files import check_unused, chosen
from shoal_workers.documents import Chunk, Raw, what_then
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File
from shoal_workers.held_rows import HeldRows, Laid
from shoal_workers.table_values import content_of, pair_of, values_of
from shoal_workers.tokenizing import hash_of

_PARTS = 64  # of a large unit: each is found by reading all before it
_FOOTERS = 4
_BATCH_ROWS, _BATCH_BYTES = 2**10, 2**18  # that are taken out of a row group at once, at most and about
_COPIED_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Unit:
    """What has to be read as one: a row group or a record batch. `first_row` is counted in its file."""

    file: int
    number: int
    first_row: int
    num_rows: int
    num_bytes: int


class _Table(Protocol):
    files: Sequence[File]
    column: str
    tools: str | None  # the column of a chat's tools: rows are then pairs of both

    def arrays(self, unit: Unit, first: int, last: int) -> Iterator[Any]:
        """The column, for rows [first, last) of a unit, some at a time."""


class RowBlocks:
    """About `block_bytes` each: several units of a file that follow each other, or a part of the rows of one. As a unit
    can only be read from its beginning, parts of large ones have more, up to `most_bytes` (the second of `sizes`).
    `num_streams` read a block each, in turn."""

    def __init__(
        self,
        table: _Table,
        units: Sequence[Unit],
        sizes: tuple[int, int],
        cache: DataCache | None,
        num_streams: int,
    ) -> None:
        block_bytes, most_bytes = sizes
        self._table = table
        self._groups = _grouped(units, block_bytes)
        parts = [_num_parts(group, block_bytes, most_bytes) for group in self._groups]
        self._starts = tuple(accumulate(parts, initial=0))
        self.files = tuple(table.files)
        known = " ".join(f"{file.relative}:{file.num_bytes}:{file.version}" for file in self.files)
        self.digest = f"{known} {block_bytes} {most_bytes}"
        where = hash_of(f"{[file.name for file in self.files]} {table.column} {table.tools} {self.digest}")
        self._held = HeldRows(where, cache)
        self._at_once_bytes = self._held.room_bytes // num_streams

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, block: int, place: int) -> Chunk:
        """See `Blocks`. Places are rows of the block."""
        array, is_end = self._held.chunk(block, place) or self._take_out(block).chunk(place)
        documents: list[Raw] = []
        for unit, first, last in self._ranges(range(block, block + 1), place, place + len(array)):
            name, at, row = self._table.files[unit.file].name, len(documents), unit.first_row + first
            values = values_of(array[at : at + last - first], name, row)
            pairs = [(value, None) for value in values] if self._table.tools is None else map(pair_of, values)
            documents += [
                Raw(value, place + at + index, name, f"row {row + index + 1}", tools=tools)
                for index, (value, tools) in enumerate(pairs)
            ]
        if is_end:
            self._held.let_go(block)
        return Chunk(documents, None if is_end else place + len(array))

    def _take_out(self, block: int) -> Laid:
        """With those beside it, which whoever takes out one of them comes by. Raises DataError, OSError, StoreError."""
        own: list[Any] | None = None
        try:
            for number, arrays in self._taken_out(self._beside(block)):
                if number == block:
                    own = arrays
                else:
                    self._held.hold(number, arrays)
        except (DataError, OSError, StoreError):
            if own is None:
                raise  # what stands behind is the trouble of whoever comes there
        return self._held.hold(block, own or ())  # last, as it is wanted now

    def _beside(self, block: int) -> range:
        """Blocks of the same units, itself among them: as many as can be kept for every stream until they are read."""
        index = bisect_right(self._starts, block) - 1
        first, last = self._starts[index], self._starts[index + 1]
        num_bytes = sum(unit.num_bytes for unit in self._groups[index])
        count = max(1, min(last - first, self._at_once_bytes * (last - first) // max(1, num_bytes)))
        begin = block - (block - first) % count
        return range(begin, min(begin + count, last))

    def _taken_out(self, blocks: range) -> Iterator[tuple[int, list[Any]]]:
        """Each with the arrays of its rows."""
        arrays, rest = self._arrays(blocks), None
        for block in blocks:
            low, high = self._borders(range(block, block + 1))
            found, missing = [], high - low
            while missing and (array := rest if rest is not None else next(arrays, None)) is not None:
                found.append(array[:missing])
                rest = array[missing:] if len(array) > missing else None
                missing -= len(found[-1])
            yield block, found

    def _arrays(self, blocks: range) -> Iterator[Any]:
        """Raises DataError, OSError, StoreError."""
        for unit, first, last in self._ranges(blocks):
            file = self._table.files[unit.file]
            try:
                yield from self._table.arrays(unit, first, last)
            except (ValueError, NotImplementedError, OSError) as error:  # what pyarrow raises is one of these
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the node's trouble, not the file's
                where = f"rows {unit.first_row + 1} to {unit.first_row + unit.num_rows}"
                raise DataError(file.name, where, f"block {unit.number}", f"cannot be read: {error}") from error

    def _borders(self, blocks: range) -> tuple[int, int]:
        """Rows [low, high) of their units that blocks which follow each other have."""
        index = bisect_right(self._starts, blocks[0]) - 1
        start, num_parts = self._starts[index], self._starts[index + 1] - self._starts[index]
        num_rows = _rows(self._groups[index])
        return num_rows * (blocks[0] - start) // num_parts, num_rows * (blocks[-1] + 1 - start) // num_parts

    def _ranges(self, blocks: range, first: int = 0, last: int | None = None) -> Iterator[tuple[Unit, int, int]]:
        """Of each of their units the rows [first, last) of these blocks, all in which they have some."""
        low, high = self._borders(blocks)
        low, high = low + first, high if last is None else low + last
        before = 0
        for unit in self._groups[bisect_right(self._starts, blocks[0]) - 1]:
            begin, end = max(low - before, 0), min(high - before, unit.num_rows)
            if begin < end:
                yield unit, begin, end
            before += unit.num_rows


def _grouped(units: Sequence[Unit], block_bytes: int) -> list[list[Unit]]:
    """Small ones of one file together: the end of each block is lost."""
    groups: list[list[Unit]] = []
    num_bytes = 0
    for unit in units:
        if groups and groups[-1][0].file == unit.file and num_bytes + unit.num_bytes <= block_bytes:
            groups[-1].append(unit)
            num_bytes += unit.num_bytes
        else:
            groups.append([unit])
            num_bytes = unit.num_bytes
    return groups


def _num_parts(group: Sequence[Unit], block_bytes: int, most_bytes: int) -> int:
    num_bytes = sum(unit.num_bytes for unit in group)
    part_bytes = min(max(block_bytes, num_bytes // _PARTS), most_bytes)
    return max(1, min(_rows(group), round(num_bytes / part_bytes)))


def _rows(group: Sequence[Unit]) -> int:
    return sum(unit.num_rows for unit in group)


class _Parquet:
    """Files are opened anew for each block; of their footers, which may have megabytes, the last few are kept."""

    def __init__(self, files: Sequence[File], column: str, tools: str | None) -> None:
        self.files = files
        self.column = column
        self.tools = tools
        self._footer = functools.lru_cache(maxsize=_FOOTERS)(self._read_footer)

    def arrays(self, unit: Unit, first: int, last: int) -> Iterator[Any]:
        import pyarrow.parquet as pq

        source, footer = self.files[unit.file].open(), self._footer(unit.file)
        num_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * unit.num_rows // max(1, unit.num_bytes)))
        # A buffer of its own instead of whole column chunks, which may have any size.
        with pq.ParquetFile(source, metadata=footer, buffer_size=2**20, pre_buffer=False) as file:
            row, there = 0, file.schema_arrow.names
            names = [name for name in (self.column, self.tools) if name is not None and name in there]
            for batch in file.iter_batches(num_rows, row_groups=[unit.number], columns=names, use_threads=False):
                low, high = max(first - row, 0), min(last - row, batch.num_rows)
                row += batch.num_rows
                if low < high:
                    yield content_of(batch.slice(low, high - low), self.column, self.tools)
                if row >= last:
                    return

    def _read_footer(self, index: int) -> Any:
        import pyarrow.parquet as pq

        return pq.read_metadata(self.files[index].open())


def parquet_blocks(
    field: str,
    uri: str,
    files: Sequence[File],
    column: str,
    sizes: tuple[int, int],
    cache: DataCache | None,
    num_streams: int = 1,
    tools: str | None = None,
) -> RowBlocks:
    """`sizes`: bytes of a block, and the most that one may have; `tools`: the column, if any has it, of the tools of
    chats. Raises InvalidField, DataError."""
    import pyarrow.parquet as pq

    files = chosen(field, uri, files, ".parquet")
    units = []
    for index, file in enumerate(files):
        try:
            with pq.ParquetFile(file.open()) as opened:
                metadata, names = opened.metadata, opened.schema_arrow.names
        except (ValueError, OSError) as error:
            raise InvalidField(field, uri, f"cannot be read: {file.name} is no whole Parquet file: {error}") from error
        _check_column(field, uri, file, column, names)
        first = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            num_bytes = sum(
                group.column(at).total_uncompressed_size
                for at in range(group.num_columns)
                if any(_is_of(group.column(at).path_in_schema, name) for name in (column, tools) if name is not None)
            )
            if group.num_rows:
                units.append(Unit(index, number, first, group.num_rows, num_bytes))
            first += group.num_rows
    return RowBlocks(_Parquet(files, column, tools), units, sizes, cache, num_streams)


def _is_of(path: str, column: str) -> bool:
    """Whether a leaf of a schema belongs to the column, in whose name there may be dots."""
    return path == column or path.startswith(f"{column}.")


class _Arrow:
    def __init__(
        self,
        files: Sequence[File],
        column: str,
        tools: str | None,
        messages: Sequence[Sequence[Message]],
        cache: DataCache | None,
    ) -> None:
        self.files = files
        self.column = column
        self.tools = tools
        self._messages = messages
        self._cache = cache

    def arrays(self, unit: Unit, first: int, last: int) -> Iterator[Any]:
        import pyarrow as pa

        file, messages = self.files[unit.file], self._messages[unit.file]
        batches = [message for message in messages if message.kind == BATCH]
        # A stream of its own: what every batch needs, and this one.
        wanted = [message for message in messages if message.kind != BATCH] + [batches[unit.number]]
        schema = pa.ipc.read_schema(pa.py_buffer(file.read(messages[0].offset, messages[0].num_bytes)))
        fields = [schema.get_field_index(name) for name in (self.column, self.tools) if name in schema.names]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        with self._source(file, wanted) as source, pa.ipc.open_stream(source, options=options) as stream:
            yield content_of(stream.read_next_batch().slice(first, last - first), self.column, self.tools)

    @contextlib.contextmanager
    def _source(self, file: File, wanted: Sequence[Message]) -> Iterator[Any]:
        """The messages, one behind the other. Large ones lie on disk and are mapped, so only what is looked at takes
        memory."""
        import pyarrow as pa

        parts = (
            file.read(first, min(_COPIED_BYTES, message.offset + message.num_bytes - first))
            for message in wanted
            for first in range(message.offset, message.offset + message.num_bytes, _COPIED_BYTES)
        )
        if sum(message.num_bytes for message in wanted) <= 2 * _COPIED_BYTES:
            yield pa.BufferReader(b"".join(parts))
            return
        folder = None if self._cache is None else self._cache.room_for_a_while()
        with tempfile.NamedTemporaryFile(dir=folder) as copy:
            for part in parts:
                copy.write(part)
            copy.flush()
            with pa.memory_map(copy.name) as mapped:
                yield mapped


def arrow_blocks(
    field: str,
    uri: str,
    files: Sequence[File],
    column: str,
    sizes: tuple[int, int],
    cache: DataCache | None,
    num_streams: int = 1,
    tools: str | None = None,
) -> RowBlocks:
    """As for Parquet. Raises InvalidField, DataError."""
    import pyarrow as pa

    files = _saved(field, uri, files)
    units, found = [], []
    for index, file in enumerate(files):
        try:
            messages, rows = messages_of(file, cache)
            schema = pa.ipc.read_schema(pa.py_buffer(file.read(messages[0].offset, messages[0].num_bytes)))
        except (ValueError, OSError) as error:
            raise InvalidField(field, uri, f"cannot be read: {file.name} is no whole Arrow stream: {error}") from error
        _check_column(field, uri, file, column, schema.names)
        found.append(messages)
        batches = [message for message in messages if message.kind == BATCH]
        first = 0
        for number, (message, num_rows) in enumerate(zip(batches, rows, strict=True)):
            if num_rows:
                units.append(Unit(index, number, first, num_rows, message.num_bytes))
            first += num_rows
    return RowBlocks(_Arrow(files, column, tools, found, cache), units, sizes, cache, num_streams)


def _saved(field: str, uri: str, files: Sequence[File]) -> list[File]:
    """The files of a dataset in the order in which its state names them; without one, all Arrow files."""
    by_name = {file.relative: file for file in files}
    if "dataset_dict.json" in by_name:
        splits = json.loads(_text(by_name["dataset_dict.json"])).get("splits", [])
        raise InvalidField(
            field, uri, f"has several datasets: name one of them, as in {uri}/{(splits or ['train'])[0]}"
        )
    if "state.json" not in by_name:
        return chosen(field, uri, files, ".arrow")
    try:
        state = json.loads(_text(by_name["state.json"]))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidField(field, uri, f"cannot be read: state.json does not name its files ({error!r})") from error
    if state.get("_indices_data_files"):
        raise InvalidField(field, uri, "has an order of rows of its own: save it after flatten_indices()")
    missing = [name for name in names if name not in by_name]
    if missing:
        raise InvalidField(field, uri, f"is incomplete: {missing[0]} is not there, or empty")
    check_unused(field, uri, [file for file in files if file.relative not in names])
    return [by_name[name] for name in names]


def _check_column(field: str, uri: str, file: File, column: str, names: Sequence[str]) -> None:
    if column not in names:
        there = f"{file.name} has {', '.join(names)}{what_then(column, names)}"
        raise InvalidField(field, uri, f"has no column {show(column)}: {there}")


def _text(file: File) -> str:
    return file.read(0, file.num_bytes).decode("utf-8", "replace")
