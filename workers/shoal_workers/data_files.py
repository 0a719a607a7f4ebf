"""The files that a job's data lies in, near or far: which there are, and byte ranges of them.

Owns listing, in an order that is the same on every machine, and reading by range. Nothing is kept open, and no more
than a few pieces in memory, however many files there are and however large. What stands in them is others' affair.
"""

from __future__ import annotations

import io
import os
import sysconfig
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from shoal_planner.data_spec import STDLIB
from shoal_planner.errors import InvalidField
from shoal_recovery.store import Entry, Store, check_name, open_store
from shoal_workers.data_cache import PIECE_BYTES, DataCache
from shoal_workers.errors import DataError

# Folders of the standard library's folder that differ between machines, or that many machines lack.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests"})
_PIECES_IN_MEMORY = 4  # of far files, for neighbours are often read in turn


class File(Protocol):
    """`name` is what messages call it, `relative` what it is called in its folder. `version` changes with its content.
    Never empty."""

    @property
    def name(self) -> str: ...

    @property
    def relative(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def version(self) -> str: ...

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
        return _whole(self.name, found, offset, num_bytes)

    def open(self) -> Any:
        return str(self.path)


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


class FarFile:
    """Of an object store, in pieces of which the node keeps some on its disk."""

    def __init__(self, store: Store, entry: Entry, relative: str, cache: DataCache | None, pieces: _Pieces) -> None:
        self._store = store
        self._entry = entry
        self._cache = cache
        self._pieces = pieces
        self._key = f"{store.uri} {entry.name} {entry.num_bytes} {entry.version}"
        self.relative = relative
        self.name = f"{store.uri}/{entry.name}"
        self.num_bytes = entry.num_bytes
        self.version = entry.version

    def read(self, offset: int, num_bytes: int) -> bytes:
        parts, end = [], min(offset + num_bytes, self.num_bytes)
        position = offset
        while position < end:
            number, within = divmod(position, PIECE_BYTES)
            parts.append(self._part(number, within, min(end - position, PIECE_BYTES - within)))
            position += len(parts[-1])
        return _whole(self.name, b"".join(parts), offset, num_bytes)

    def open(self) -> Any:
        return io.BufferedReader(_FarStream(self), buffer_size=2**16)

    def _part(self, number: int, offset: int, num_bytes: int) -> bytes:
        """Of one piece."""
        first = number * PIECE_BYTES
        piece_bytes = min(PIECE_BYTES, self.num_bytes - first)
        held = self._pieces.get(self._key, number)
        if held is None and self._cache is not None:
            found = self._cache.part(self._key, number, piece_bytes, offset, num_bytes)
            if found is not None:
                return found
        if held is None:
            held = self._store.read(self._entry.name, first, piece_bytes)
            self._pieces.put(self._key, number, held)
            if self._cache is not None:
                self._cache.keep(self._key, number, held)
        return held[offset : offset + num_bytes]


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


def find(field: str, uri: str, cache: DataCache | None = None) -> list[File]:
    """The files at `uri` that are not empty, by relative path. Raises InvalidField, which calls the URI `field`, where
    there are none that could be read; StoreError where a store does not answer."""
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        return _far(field, uri, cache)
    try:
        if uri == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            return _near(root, _walk(root, suffix=".py", left_out=_LEFT_OUT))
        root = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not root.is_absolute():
            raise InvalidField(field, uri, "must name a place on every node: file:///absolute/path")
        if not root.exists():
            raise InvalidField(field, uri, "does not exist")
        if root.is_dir():
            return _near(root, _walk(root, suffix="", left_out=frozenset()))
        with root.open("rb"):  # whether we may
            return _near(root.parent, [root])
    except OSError as error:
        raise InvalidField(field, uri, f"cannot be read: {error}") from error


def _near(root: Path, paths: list[Path]) -> list[File]:
    found: list[File] = []
    for path in paths:
        status = path.stat()
        if status.st_size:
            name, version = path.relative_to(root).as_posix(), str(status.st_mtime_ns)
            found.append(NearFile(path=path, relative=name, num_bytes=status.st_size, version=version))
    return found


def _far(field: str, uri: str, cache: DataCache | None) -> list[File]:
    parts = urlsplit(uri)
    prefix = parts.path.strip("/")
    store = open_store(f"s3://{parts.netloc}")
    try:
        entries = [
            entry for entry in store.entries(prefix) if entry.name == prefix or entry.name.startswith(f"{prefix}/")
        ]
        for entry in entries:
            check_name(entry.name)
    except ValueError as error:
        raise InvalidField(field, uri, f"cannot be read: {error}") from error
    if not entries:
        raise InvalidField(field, uri, "does not exist: there is no object of that name, nor any below it")
    found = [entry for entry in entries if entry.num_bytes]
    pieces = _Pieces()
    return [
        FarFile(store, entry, entry.name.removeprefix(prefix).lstrip("/") or entry.name, cache, pieces)
        for entry in found
    ]


def whole_version(files: list[File]) -> str:
    """Differs wherever the content of any of them may."""
    return " ".join(f"{file.name} {file.num_bytes} {file.version}" for file in files)


def _walk(root: Path, *, suffix: str, left_out: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in left_out]
        found.extend(Path(folder, name) for name in names if name.endswith(suffix))
    return sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error


def _whole(name: str, found: bytes, offset: int, num_bytes: int) -> bytes:
    if len(found) != num_bytes:
        problem = f"are left of the {num_bytes} that were there when training began: it was cut short"
        raise DataError(name, f"at byte {offset}", f"{len(found)} bytes", problem)
    return found
