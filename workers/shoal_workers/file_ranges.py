"""What a file of data is to whoever reads it, wherever it lies: a name, a size and ranges of bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal_workers.errors import DataError

_LOOKED_AT = 256


class File(Protocol):
    """`name` is what messages call it, `relative` what it is called in its folder. `version` changes with its content;
    `tag`, too, as far as it is the same on every node. Never empty."""

    @property
    def name(self) -> str: ...

    @property
    def relative(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def version(self) -> str: ...

    @property
    def tag(self) -> str: ...

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Exactly these bytes. Raises DataError where it has become shorter, OSError, StoreError."""

    def open(self) -> Any:
        """What pyarrow reads from: a path or a file object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearFile:
    """Opened anew for each range: that costs microseconds, and thousands of files need no descriptors."""

    path: Path
    relative: str
    num_bytes: int
    version: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def tag(self) -> str:
        return ""  # copies of one file have other times on each node

    def read(self, offset: int, num_bytes: int) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            found = os.pread(descriptor, num_bytes, offset)
            while len(found) < num_bytes and (
                more := os.pread(descriptor, num_bytes - len(found), offset + len(found))
            ):
                found += more
        finally:
            os.close(descriptor)
        return whole(self.name, found, offset, num_bytes)

    def open(self) -> Any:
        return str(self.path)


def looked_at(files: Sequence[File]) -> Sequence[File]:
    """Those of a source whose beginnings are looked at before training: the first ones, as there may be very many on a
    slow disk; of an object store one, as whole pieces have to be fetched."""
    return files[: _LOOKED_AT if isinstance(files[0], NearFile) else 1] if files else ()


def whole(name: str, found: bytes, offset: int, num_bytes: int) -> bytes:
    """`found`, if it is as long as was asked for. Raises DataError."""
    if len(found) != num_bytes:
        problem = f"are left of the {num_bytes} that were there when training began: it was cut short"
        raise DataError(name, f"at byte {offset}", f"{len(found)} bytes", problem)
    return found
