"""The object store as a folder on a local or shared disk, such as a network file system that all nodes mount.

Owns atomicity there, and that nobody waits for ever for a disk that hangs: a mount whose server is gone answers
nothing, not even with an error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from shoal_recovery.errors import StoreChanged, StoreConflict, StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.patient_disk import PatientDisk, Progress
from shoal_recovery.store import NAME, Data, Entry, check_length, check_name, exactly, fill, probe

T = TypeVar("T")
_UNFINISHED = ".unfinished"  # folder of objects that are still being written
_ABANDONED_AFTER_S = 24 * 3600.0
_PATIENCE_S = 30.0
_PART = 16 << 20  # bytes that are durable, or read, before the patience begins anew
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


class DirectoryStore:
    """Needs rename and hard links to be atomic, as POSIX promises. Whatever makes no progress for a while raises
    StoreUnreachable, and so does everything else then, at once, until it has gone through after all."""

    def __init__(self, folder: Path, uri: str | None = None, disk: PatientDisk | None = None) -> None:
        self._folder = folder
        self.uri = uri or folder.as_uri()
        self._disk = disk or _disk_of(folder)

    def put(self, name: str, data: Data) -> None:
        self._write(name, data, os.replace)

    def put_new(self, name: str, data: Data) -> None:
        self._write(name, data, self._link)

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        path = self._folder / check_name(name)

        def work(progress: Progress) -> bytes:
            with path.open("rb") as file:
                file.seek(offset)
                return _content(file, num_bytes, progress)

        return exactly(self.uri, name, self._run(name, work), offset, num_bytes)

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        """By way of memory of its own: a read that was given up may end when the places have become somebody else's."""
        position = offset
        with self._explained(name), self._opened(self._folder / check_name(name)) as descriptor:

            def read(place: memoryview) -> int:
                nonlocal position
                part = self._disk.run(lambda _: os.pread(descriptor, min(_PART, place.nbytes), position))
                place.cast("B")[: len(part)] = part
                position += len(part)
                return len(part)

            found = fill(read, places)
        check_length(self.uri, name, found, offset, sum(place.nbytes for place in places))

    def list(self, prefix: str) -> tuple[str, ...]:
        # Only the folder that the prefix leads into; the rest of the store may be large.
        start = self._folder / Path(prefix + "x").parent

        def work(progress: Progress) -> list[str]:
            found: list[str] = []
            for folder, _, files in os.walk(start, onerror=_raise_unless_missing):
                within = Path(folder).relative_to(self._folder)
                found.extend((within / file).as_posix() for file in files)
                progress()
            return found

        found = self._run(prefix, work)
        return tuple(sorted(name for name in found if name.startswith(prefix) and NAME.fullmatch(name)))

    def entries(self, prefix: str) -> tuple[Entry, ...]:
        names = self.list(prefix)

        def work(progress: Progress) -> tuple[Entry, ...]:
            found = []
            for name in names:
                status = (self._folder / name).stat()
                found.append(Entry(name=name, num_bytes=status.st_size, version=str(status.st_mtime_ns)))
                progress()
            return tuple(found)

        return self._run(prefix, work)

    def read_listed(self, entry: Entry, offset: int, num_bytes: int) -> bytes:
        if entry not in self.entries(entry.name):
            raise StoreChanged(self.uri, f"{entry.name} was replaced or removed")
        return self.read(entry.name, offset, num_bytes)

    def delete(self, name: str) -> None:
        path = self._folder / check_name(name)

        def work(_: Progress) -> None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                with contextlib.suppress(OSError):  # not empty: others still stand in it
                    path.parent.rmdir()

        self._run(name, work)

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
        self._run(_UNFINISHED, self._sweep)

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

        def work(progress: Progress) -> None:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_durably(temporary, data, progress)
                self._place(temporary, path, place)
            finally:
                temporary.unlink(missing_ok=True)

        self._run(name, work)

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

    def _sweep(self, progress: Progress) -> None:
        """Removes what killed writers left."""
        for path in (self._folder / _UNFINISHED).iterdir():
            with contextlib.suppress(FileNotFoundError):  # its writer has just finished
                if path.stat().st_mtime < time.time() - _ABANDONED_AFTER_S:
                    path.unlink()
            progress()

    def _run(self, name: str, work: Callable[[Progress], T]) -> T:
        with self._explained(name):
            return self._disk.run(work)

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        descriptor = self._disk.run(lambda _: os.open(path, os.O_RDONLY), undo=os.close)
        try:
            yield descriptor
        finally:
            self._disk.soon(lambda: os.close(descriptor))

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StoreError(self.uri, f"{name} is not there") from error
        except OSError as error:
            problem = "no space is left" if error.errno == errno.ENOSPC else (error.strerror or str(error)).lower()
            raise _ERRORS.get(error.errno or 0, StoreError)(self.uri, f"{name}: {problem}") from error


@functools.lru_cache(maxsize=256)
def _disk_of(folder: Path) -> PatientDisk:
    """One for all stores of a process that stand there, so that what hangs holds up one thread and not one of each."""
    return PatientDisk(_PATIENCE_S)


def _content(file: IO[bytes], num_bytes: int | None, progress: Progress) -> bytes:
    """So many bytes, or all that are left, or fewer at the end of the file."""
    parts, left = [], num_bytes
    while left is None or left > 0:
        part = file.read(_PART if left is None else min(_PART, left))
        if not part:
            break
        parts.append(part)
        left = None if left is None else left - len(part)
        progress()
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_durably(path: Path, data: Data, progress: Progress) -> None:
    content = memoryview(data).cast("B")
    with path.open("xb") as file:
        for at in range(0, max(1, content.nbytes), _PART):
            file.write(content[at : at + _PART])
            file.flush()
            os.fsync(file.fileno())
            progress()


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
