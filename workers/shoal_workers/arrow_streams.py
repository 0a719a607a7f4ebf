"""Where the record batches of an Arrow stream stand.

A stream has no footer, but its messages say how long they are, so one hops from head to head. For a file that is far
away that is most of a download, so what was found is noted on the node.
"""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from shoal_workers.data_cache import DataCache
from shoal_workers.file_ranges import File

SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of messages, as Arrow's Message.fbs numbers them
_MAGIC = b"ARROW1\x00\x00"
_CONTINUATION = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Message:
    """Of an Arrow stream: where it stands, how long it is with its head, and its kind."""

    offset: int
    num_bytes: int
    kind: int


def messages_of(file: File, cache: DataCache | None) -> tuple[list[Message], list[int]]:
    """The messages of a stream, and the rows of its batches; from the node's notes if it was looked at before. Raises
    ValueError."""
    notes = None if cache is None else cache.notes(f"messages {file.name} {file.num_bytes} {file.version}")
    if notes is not None and notes.exists():
        try:
            said = json.loads(notes.read_text(encoding="ascii"))
            return [Message(*row) for row in said["messages"]], said["rows"]
        except (ValueError, KeyError, TypeError, OSError):
            pass  # half written: it is found out anew
    messages, rows = _walk(file)
    if notes is not None:
        said = {"messages": [[one.offset, one.num_bytes, one.kind] for one in messages], "rows": rows}
        _note(notes, json.dumps(said))
    return messages, rows


def _note(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # then it is found out anew
        path.write_text(text, encoding="ascii")


def _walk(file: File) -> tuple[list[Message], list[int]]:
    """See "Encapsulated message format" in the description of Arrow's columnar format."""
    offset = len(_MAGIC) if file.read(0, min(len(_MAGIC), file.num_bytes)) == _MAGIC else 0
    messages: list[Message] = []
    rows: list[int] = []
    while offset < file.num_bytes:
        head = _exactly(file, offset, 8)
        continuation, length = struct.unpack("<Ii", head)
        if continuation != _CONTINUATION:
            raise ValueError(f"at byte {offset} no message begins")
        if length == 0:
            break
        metadata = _exactly(file, offset + 8, length)
        kind, num_rows, body = _described(metadata)
        num_bytes = 8 + length + body
        if offset + num_bytes > file.num_bytes:
            raise ValueError(
                f"at byte {offset} a message of {num_bytes} bytes begins, {file.num_bytes - offset} are there"
            )
        if kind == DICTIONARY and rows:
            raise ValueError(
                f"at byte {offset} it replaces a dictionary between batches, which cannot be read by parts"
            )
        messages.append(Message(offset, num_bytes, kind))
        if kind == BATCH:
            rows.append(num_rows)
        offset += num_bytes
    if not messages or messages[0].kind != SCHEMA:
        raise ValueError("it does not begin with a schema")
    return messages, rows


def _described(metadata: bytes) -> tuple[int, int, int]:
    """Kind, rows (of a batch) and bytes of the body of a message, from its flatbuffer: fields 1, 2 and 3 of Message,
    and field 0 of RecordBatch."""
    try:
        table = struct.unpack_from("<I", metadata, 0)[0]
        kind_at, header_at, body_at = (_field(metadata, table, number) for number in (1, 2, 3))
        kind = metadata[kind_at] if kind_at else 0
        body = struct.unpack_from("<q", metadata, body_at)[0] if body_at else 0
        num_rows = 0
        if kind == BATCH:
            header = header_at + struct.unpack_from("<I", metadata, header_at)[0]
            rows_at = _field(metadata, header, 0)
            num_rows = struct.unpack_from("<q", metadata, rows_at)[0] if rows_at else 0
    except (struct.error, IndexError) as error:
        raise ValueError(f"a message cannot be understood ({error})") from error
    return kind, num_rows, body


def _field(metadata: bytes, table: int, number: int) -> int:
    """Where a field of a table stands; 0 where it has its default."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    size = struct.unpack_from("<H", metadata, vtable)[0]
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + at)[0] if at < size else 0
    return table + offset if offset else 0


def _exactly(file: File, offset: int, num_bytes: int) -> bytes:
    if num_bytes < 0 or offset + num_bytes > file.num_bytes:
        raise ValueError(f"at byte {offset} it is cut short")
    return file.read(offset, num_bytes)
