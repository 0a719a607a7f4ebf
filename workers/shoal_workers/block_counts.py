"""How many samples each block of documents gives, as far as a node has found out.

Owns the file in which a node notes it. Any number of processes append to it; what a full disk or a lost power spoilt is
told by a checksum in each record, and passed over.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

VERSION = 7  # of the records, and of the rules by which documents become samples: notes of other versions mean nothing
_RECORD = struct.Struct("<QI")  # block, samples
_SUM = struct.Struct("<I")  # CRC-32 of the record
_BYTES = _RECORD.size + _SUM.size


class Counts:
    """Without a `path`, or where the disk takes nothing, in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            content = b"" if path is None else path.read_bytes()
        except OSError:
            content = b""
        self._known = _read(content)

    def get(self, block: int) -> int | None:
        return self._known.get(block)

    def put(self, block: int, count: int) -> None:
        if self._known.get(block) == count:
            return
        self._known[block] = count
        if self._path is None:
            return
        record = _RECORD.pack(block, count)
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, record + _SUM.pack(zlib.crc32(record)))
            finally:
                os.close(descriptor)
        except OSError:
            self._path = None  # a replay would be slower for it, and nothing else


def _read(content: bytes) -> dict[int, int]:
    """Of records of which some may be cut short or spoilt: behind such a one the next may begin at any byte."""
    known: dict[int, int] = {}
    at = 0
    while at + _BYTES <= len(content):
        record = content[at : at + _RECORD.size]
        if _SUM.unpack_from(content, at + _RECORD.size)[0] == zlib.crc32(record):
            block, count = _RECORD.unpack(record)
            known[block] = count
            at += _BYTES
        else:
            at += 1
    return known
