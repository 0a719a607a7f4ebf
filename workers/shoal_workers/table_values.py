"""What the rows of tables hold: the values of a column, or of two of them in pairs, a chat's messages and its tools."""

from __future__ import annotations

from typing import Any

from shoal_workers.documents import shown
from shoal_workers.errors import DataError


def values_of(array: Any, name: str, first_row: int) -> list[Any]:
    """Of the rows of a file from `first_row` on. Raises DataError."""
    try:
        found: list[Any] = array.to_pylist()
    except ValueError:  # what calls itself text need not be any
        return [_value(cell, name, f"row {row + 1}") for row, cell in enumerate(array, first_row)]
    return found


def pair_of(row: Any) -> tuple[Any, Any]:
    return row["content"], row["tools"]


def content_of(batch: Any, column: str, tools: str | None) -> Any:
    """The column of a batch; with the name of one for tools, pairs of both, whether it is there or not."""
    import pyarrow as pa

    found = batch.column(column)
    if tools is None:
        return found
    beside = batch.column(tools) if tools in batch.schema.names else pa.nulls(len(found))
    return pa.StructArray.from_arrays([found, beside], names=["content", "tools"])


def _value(cell: Any, name: str, where: str) -> Any:
    """Raises DataError."""
    try:
        return cell.as_py()
    except ValueError as error:
        content = cell.as_buffer().to_pybytes() if hasattr(cell, "as_buffer") else str(cell.type)
        raise DataError(name, where, shown(content), f"cannot be read: {error}") from error
