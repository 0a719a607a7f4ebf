"""Parquet files and Arrow datasets (as Hugging Face saves them) as blocks: row groups and record batches, several of
them where they are small, and parts of their rows where they are too few or too large.

Owns which rows a block has, and their values. What stands where is told by Parquet's footers and by the messages of
Arrow's streams (`arrow_streams`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from shoal_planner.errors import InvalidField, show
from shoal_workers.arrow_streams import BATCH, Message, messages_of
from shoal_workers.data_cache import DataCache
from shoal_workers.data_files import chosen
from shoal_workers.documents import Raw
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File

_CHUNK_ROWS = 64


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

    def values(self, unit: Unit, first: int, last: int) -> Iterator[list[Any]]:
        """Of the column, for rows [first, last) of a unit, some at a time."""


class RowBlocks:
    """About `block_bytes` each: several units of a file that follow each other, or a part of the rows of one."""

    def __init__(self, table: _Table, units: Sequence[Unit], block_bytes: int, digest: str) -> None:
        self._table = table
        self._groups = _grouped(units, block_bytes)
        parts = [max(1, min(_rows(group), round(_bytes(group) / block_bytes))) for group in self._groups]
        self._starts = tuple(accumulate(parts, initial=0))
        self.digest = f"{digest} {block_bytes}"
        self.files = tuple(table.files)

    def __len__(self) -> int:
        return self._starts[-1]

    def chunks(self, block: int, place: int) -> Iterator[list[Raw]]:
        """See `Blocks`. Places are rows of the block."""
        index = bisect_right(self._starts, block) - 1
        group, part = self._groups[index], block - self._starts[index]
        num_rows, num_parts = _rows(group), self._starts[index + 1] - self._starts[index]
        low, high = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
        before = 0
        for unit in group:
            first, last = max(low + place - before, 0), min(high - before, unit.num_rows)
            if first < last:
                yield from self._unit_chunks(unit, first, last, before - low)
            before += unit.num_rows

    def _unit_chunks(self, unit: Unit, row: int, last: int, shift: int) -> Iterator[list[Raw]]:
        """Rows [row, last) of a unit. `shift` makes places of them."""
        file = self._table.files[unit.file]
        try:
            for values in self._table.values(unit, row, last):
                yield [
                    Raw(value, row + index + shift, file.name, f"row {unit.first_row + row + index + 1}")
                    for index, value in enumerate(values)
                ]
                row += len(values)
        except (ValueError, NotImplementedError, OSError) as error:  # what pyarrow raises is one of these
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the node's trouble, not the file's
            where = f"rows {unit.first_row + 1} to {unit.first_row + unit.num_rows}"
            raise DataError(file.name, where, f"block {unit.number}", f"cannot be read: {error}") from error


def _grouped(units: Sequence[Unit], block_bytes: int) -> list[list[Unit]]:
    """Small ones of one file together: the end of each block is lost."""
    groups: list[list[Unit]] = []
    for unit in units:
        if groups and groups[-1][0].file == unit.file and _bytes(groups[-1]) + unit.num_bytes <= block_bytes:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def _rows(group: Sequence[Unit]) -> int:
    return sum(unit.num_rows for unit in group)


def _bytes(group: Sequence[Unit]) -> int:
    return sum(unit.num_bytes for unit in group)


class _Parquet:
    """Footers are kept: they are read once, not with each block."""

    def __init__(self, files: Sequence[File], column: str, footers: Sequence[Any]) -> None:
        self.files = files
        self._column = column
        self._footers = footers

    def values(self, unit: Unit, first: int, last: int) -> Iterator[list[Any]]:
        import pyarrow.parquet as pq

        # A buffer of its own instead of whole column chunks, which may have any size.
        source, footer = self.files[unit.file].open(), self._footers[unit.file]
        with pq.ParquetFile(source, metadata=footer, buffer_size=2**20, pre_buffer=False) as file:
            row = 0
            batches = file.iter_batches(
                _CHUNK_ROWS, row_groups=[unit.number], columns=[self._column], use_threads=False
            )
            for batch in batches:
                low, high = max(first - row, 0), min(last - row, batch.num_rows)
                row += batch.num_rows
                if low < high:
                    yield batch.column(0).slice(low, high - low).to_pylist()
                if row >= last:
                    return


def parquet_blocks(field: str, uri: str, files: Sequence[File], column: str, block_bytes: int) -> RowBlocks:
    """Raises InvalidField, DataError."""
    import pyarrow.parquet as pq

    files = chosen(field, uri, files, ".parquet")
    units, footers = [], []
    for index, file in enumerate(files):
        try:
            with pq.ParquetFile(file.open()) as opened:
                metadata, names = opened.metadata, opened.schema_arrow.names
        except (ValueError, OSError) as error:
            raise InvalidField(field, uri, f"cannot be read: {file.name} is no whole Parquet file: {error}") from error
        _check_column(field, uri, file, column, names)
        footers.append(metadata)
        first = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            num_bytes = sum(
                group.column(at).total_uncompressed_size
                for at in range(group.num_columns)
                if group.column(at).path_in_schema.split(".")[0] == column
            )
            if group.num_rows:
                units.append(Unit(index, number, first, group.num_rows, num_bytes))
            first += group.num_rows
    return RowBlocks(_Parquet(files, column, footers), units, block_bytes, _digest(files))


class _Arrow:
    def __init__(self, files: Sequence[File], column: str, messages: Sequence[Sequence[Message]]) -> None:
        self.files = files
        self._column = column
        self._messages = messages

    def values(self, unit: Unit, first: int, last: int) -> Iterator[list[Any]]:
        import pyarrow as pa

        file, messages = self.files[unit.file], self._messages[unit.file]
        batches = [message for message in messages if message.kind == BATCH]
        # A stream of its own: what every batch needs, and this one.
        wanted = [message for message in messages if message.kind != BATCH] + [batches[unit.number]]
        content = b"".join(file.read(message.offset, message.num_bytes) for message in wanted)
        with pa.ipc.open_stream(content) as stream:
            column = stream.read_next_batch().column(self._column)
        for row in range(first, last, _CHUNK_ROWS):
            yield column.slice(row, min(_CHUNK_ROWS, last - row)).to_pylist()


def arrow_blocks(
    field: str, uri: str, files: Sequence[File], column: str, block_bytes: int, cache: DataCache | None
) -> RowBlocks:
    """Raises InvalidField, DataError."""
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
    return RowBlocks(_Arrow(files, column, found), units, block_bytes, _digest(files))


def _saved(field: str, uri: str, files: Sequence[File]) -> list[File]:
    """The files of a dataset in the order in which its state names them; without one, all Arrow files."""
    by_name = {file.relative: file for file in files}
    if "dataset_dict.json" in by_name:
        splits = json.loads(_text(by_name["dataset_dict.json"])).get("splits", [])
        raise InvalidField(
            field, uri, f"has several datasets: name one of them, as in {uri}/{(splits or ['train'])[0]}"
        )
    if "state.json" not in by_name:
        found = [file for file in files if file.relative.endswith(".arrow")]
        if not found:
            raise InvalidField(field, uri, "has no file that ends in .arrow")
        return found
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
    return [by_name[name] for name in names]


def _check_column(field: str, uri: str, file: File, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise InvalidField(field, uri, f"has no column {show(column)}: {file.name} has {', '.join(names)}")


def _digest(files: Sequence[File]) -> str:
    return " ".join(f"{file.relative}:{file.num_bytes}:{file.version}" for file in files)


def _text(file: File) -> str:
    return file.read(0, file.num_bytes).decode("utf-8", "replace")
