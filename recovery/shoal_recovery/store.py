"""The object store as recovery needs it: a few verbs over named objects, and the implementation for a directory.

Owns the contract and atomicity. Which objects there are and what stands in them is `checkpoints`' affair.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.request import url2pathname

from shoal_planner.errors import InvalidField
from shoal_planner.uris import parts_of
from shoal_recovery.errors import StoreChanged, StoreConflict, StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.storage_access import split_access

Data = bytes | bytearray | memoryview
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._=-]*(/[A-Za-z0-9_-][A-Za-z0-9._=-]*)*")
_UNFINISHED = ".unfinished"  # folder of objects that are still being written
_ABANDONED_AFTER_S = 24 * 3600.0
# What may pass by itself, and what will not: all else is no matter of the place as a whole.
_PASSING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNRESET, errno.ECONNREFUSED),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
)
_REFUSING = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without hard links say, link(2)
_ERRORS: Mapping[int, type[StoreError]] = {
    **dict.fromkeys(_PASSING, StoreUnreachable),
    **dict.fromkeys(_REFUSING, StoreRefused),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object as a store lists it. `version` changes when its content does."""

    name: str
    num_bytes: int
    version: str


class Reader(Protocol):
    """What whoever only reads needs of a store."""

    uri: str

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        """See `Store`."""


class Store(Protocol):
    """Named, immutable runs of bytes. Names are parts of letters, digits and `_ - . =`, joined by `/`.

    Any thread may call. All methods raise StoreUnreachable where the store does not answer (StoreRefused where it does
    not let us), and StoreError for whatever else prevents them. A reader sees an object whole or not at all.
    """

    uri: str

    def put(self, name: str, data: Data) -> None:
        """Returns when the object is durable. Replaces one of the same name. Called again after an error, it goes on
        where it was, as far as the store allows."""

    def put_new(self, name: str, data: Data) -> None:
        """Like `put`, but raises StoreConflict if somebody else's object is already there: one writer wins."""

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        """Exactly these bytes (None: all to the end). No more than these leave the store."""

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        """Fills these, one after the other, with the bytes from `offset` on. After an error they hold anything."""

    def list(self, prefix: str) -> tuple[str, ...]:
        """The names of all objects that begin with `prefix`, sorted."""

    def entries(self, prefix: str) -> tuple[Entry, ...]:
        """The same, with their sizes; names of any form."""

    def read_listed(self, entry: Entry, offset: int, num_bytes: int) -> bytes:
        """Exactly these bytes of an object that `entries` told of, and of no other that has its name by now. Raises
        StoreChanged where there is none."""

    def delete(self, name: str) -> None:
        """An object that is not there is no error."""

    def delete_listed(self, entry: Entry) -> None:
        """Deletes this object that `entries` told of; one that has its name by now stays, as far as the store can tell
        the two apart in one step."""

    def unfinished(self, prefix: str) -> tuple[str, ...]:
        """The names beginning with `prefix` under which a `put` has left something that is no object yet."""

    def abandon(self, name: str) -> None:
        """Removes what unfinished puts of this name have left."""

    def check_writable(self) -> None:
        """Writes a small object, reads it back and deletes it. Raises what prevents that."""


def open_store(uri: str) -> Store:
    """The store at `file:///folder`, `s3://bucket/prefix` or `s3://ACCESS@bucket/prefix` (`storage_access`); does not
    touch it yet. Raises InvalidField, and StoreRefused where credentials that it names are not here."""
    parts = parts_of("uri", uri)
    match parts.scheme:
        case "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise InvalidField("uri", uri, "must name an absolute folder: file:///folder")
            return DirectoryStore(Path(url2pathname(parts.path)), uri)
        case "s3":
            if not parts.netloc:
                raise InvalidField("uri", uri, "must name a bucket: s3://bucket/prefix")
            # boto3 is needed, and takes a moment to load, only where S3 is used.
            from shoal_recovery.store_s3 import open_s3

            bucket, access = split_access(parts.netloc)
            return open_s3(uri, bucket=bucket, prefix=parts.path.strip("/"), access=access)
        case _:
            raise InvalidField("uri", uri, "must begin with file:// or s3://")


def check_name(name: str) -> str:
    """Raises ValueError for a name that could leave the store or that some store would not take."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"object name {name!r}: must be parts of letters, digits and '_-.=', joined by '/'")
    return name


def probe(store: Store) -> None:
    """`check_writable` in terms of the other verbs."""
    name = f"probe-{uuid.uuid4().hex}"
    store.put(name, name.encode())
    try:
        if store.read(name) != name.encode():
            raise StoreError(store.uri, "does not give back what was written")
    finally:
        store.delete(name)


class DirectoryStore:
    """A folder on a local or shared disk. Needs rename and hard links to be atomic, as POSIX promises."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        self._folder = folder
        self.uri = uri or folder.as_uri()

    def put(self, name: str, data: Data) -> None:
        self._write(name, data, os.replace)

    def put_new(self, name: str, data: Data) -> None:
        self._write(name, data, self._link)

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        with self._explained(name), (self._folder / check_name(name)).open("rb") as file:
            file.seek(offset)
            data = file.read(-1 if num_bytes is None else num_bytes)
        return exactly(self.uri, name, data, offset, num_bytes)

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        with self._explained(name), (self._folder / check_name(name)).open("rb", buffering=0) as file:
            file.seek(offset)
            found = fill(file.readinto, places)
        check_length(self.uri, name, found, offset, sum(place.nbytes for place in places))

    def list(self, prefix: str) -> tuple[str, ...]:
        found: list[str] = []
        with self._explained(prefix):
            # Only the folder that the prefix leads into; the rest of the store may be large.
            start = self._folder / Path(prefix + "x").parent
            for folder, _, files in os.walk(start, onerror=_raise_unless_missing):
                within = Path(folder).relative_to(self._folder)
                found.extend((within / file).as_posix() for file in files)
        return tuple(sorted(name for name in found if name.startswith(prefix) and _NAME.fullmatch(name)))

    def entries(self, prefix: str) -> tuple[Entry, ...]:
        found = []
        with self._explained(prefix):
            for name in self.list(prefix):
                status = (self._folder / name).stat()
                found.append(Entry(name=name, num_bytes=status.st_size, version=str(status.st_mtime_ns)))
        return tuple(found)

    def read_listed(self, entry: Entry, offset: int, num_bytes: int) -> bytes:
        if entry not in self.entries(entry.name):
            raise StoreChanged(self.uri, f"{entry.name} was replaced or removed")
        return self.read(entry.name, offset, num_bytes)

    def delete(self, name: str) -> None:
        path = self._folder / check_name(name)
        with self._explained(name), contextlib.suppress(FileNotFoundError):
            path.unlink()
            with contextlib.suppress(OSError):  # not empty: others still stand in it
                path.parent.rmdir()

    def delete_listed(self, entry: Entry) -> None:
        if entry in self.entries(entry.name):
            self.delete(entry.name)

    def unfinished(self, prefix: str) -> tuple[str, ...]:
        return ()  # what killed writers leave has no name, and is swept by age

    def abandon(self, name: str) -> None:
        pass

    def check_writable(self) -> None:
        probe(self)
        self._probe_new()
        with self._explained(_UNFINISHED):
            self._sweep()

    def _probe_new(self) -> None:
        """Not every file system can do it, and nothing but manifests would need it."""
        name = f"probe-{uuid.uuid4().hex}"
        self.put_new(name, b"")
        try:
            with contextlib.suppress(StoreConflict):
                self.put_new(name, b"")
                raise StoreRefused(self.uri, "replaces an object that may be written once only")
        finally:
            self.delete(name)

    def _link(self, temporary: Path, path: Path) -> None:
        """A link, unlike a rename, refuses a name that is taken."""
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StoreRefused(self.uri, "its file system makes no hard links, which manifests need") from error

    def _write(self, name: str, data: Data, place: Callable[[Path, Path], None]) -> None:
        path = self._folder / check_name(name)
        temporary = self._folder / _UNFINISHED / uuid.uuid4().hex
        with self._explained(name):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_durably(temporary, data)
                self._place(temporary, path, place)
            finally:
                temporary.unlink(missing_ok=True)

    def _place(self, temporary: Path, path: Path, place: Callable[[Path, Path], None]) -> None:
        for attempt in itertools.count():
            with contextlib.suppress(FileExistsError):  # a `delete` removed it while mkdir looked what was in its way
                path.parent.mkdir(parents=True, exist_ok=True)
            try:
                place(temporary, path)
                _sync(path.parent)
                return
            except FileExistsError as error:
                raise StoreConflict(self.uri, f"{path.relative_to(self._folder)} is already there") from error
            except FileNotFoundError:  # a `delete` has just removed the folder as empty
                if attempt == 2:
                    raise

    def _sweep(self) -> None:
        """Removes what killed writers left."""
        for path in (self._folder / _UNFINISHED).iterdir():
            with contextlib.suppress(FileNotFoundError):  # its writer has just finished
                if path.stat().st_mtime < time.time() - _ABANDONED_AFTER_S:
                    path.unlink()

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StoreError(self.uri, f"{name} is not there") from error
        except OSError as error:
            problem = "no space is left" if error.errno == errno.ENOSPC else (error.strerror or str(error)).lower()
            raise _ERRORS.get(error.errno or 0, StoreError)(self.uri, f"{name}: {problem}") from error


def exactly(uri: str, name: str, data: bytes, offset: int, num_bytes: int | None) -> bytes:
    """`data`, if it is as long as was asked for."""
    if num_bytes is not None:
        check_length(uri, name, len(data), offset, num_bytes)
    return data


def check_length(uri: str, name: str, found: int, offset: int, num_bytes: int) -> None:
    """Raises StoreError."""
    if found != num_bytes:
        problem = f"{name} has {found} of the {num_bytes} bytes asked for at {offset}: it was cut short or replaced"
        raise StoreError(uri, problem)


def fill(read_into: Callable[[memoryview], int | None], places: Iterable[memoryview]) -> int:
    """How many bytes came: all, or what was there to the end."""
    total = 0
    for place in places:
        position = 0
        while position < place.nbytes:
            came = read_into(place[position:]) or 0
            if came == 0:
                return total
            position += came
            total += came
    return total


def _write_durably(path: Path, data: Data) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """So that the name, too, outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
