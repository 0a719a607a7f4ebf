"""The shard store of one node: snapshots in memory-mapped files that outlive ranks, epochs and the agent itself.

A snapshot file has two slots, one for even and one for odd steps. A slot counts only while its seal stands beside it:
the seal is removed before the first byte changes and written, with the checksum of every piece, after the last.
Files are plain files in folders of the node: they go with nobody's death. Thread-safe. Owns no sockets; in which
folder a file lies, `rooms` decides.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from shoal_recovery.crc import checksum
from shoal_recovery.state import ELEMENT_BYTES, Piece, ShardKey, Snapshot
from shoal_workers.rooms import Rooms
from shoal_workers.rows import key_rows, keys_from_rows

log = structlog.get_logger()

NUM_SLOTS = 2


def snapshot_name(epoch: int, rank: int) -> str:
    return f"{epoch:06d}-{rank}"


def epoch_of(name: str) -> int:
    return int(name.split("-")[0])


@dataclass(slots=True)
class _File:
    layout: tuple[ShardKey, ...]
    layout_sum: str
    offsets: tuple[int, ...]
    num_bytes: int
    maps: tuple[mmap.mmap, ...]
    folder: Path

    def slot_path(self, name: str, slot: int) -> Path:
        return _slot_path(self.folder, name, slot)

    def seal_path(self, name: str, slot: int) -> Path:
        return self.folder / f"{name}.seal{slot}"

    def pieces(self, checksums: list[str]) -> tuple[Piece, ...]:
        return tuple(
            Piece(key=key, offset=offset, num_bytes=key.numel * ELEMENT_BYTES, checksum=value)
            for key, offset, value in zip(self.layout, self.offsets, checksums, strict=True)
        )

    def checksums(self, slot: int) -> list[str]:
        view = self.view(slot)
        return [
            checksum(view[offset : offset + key.numel * ELEMENT_BYTES])
            for key, offset in zip(self.layout, self.offsets, strict=True)
        ]

    def sum_of_seal(self, step: int, checksums: list[str]) -> str:
        """Of everything that says what the bytes are."""
        return checksum(json.dumps([self.layout_sum, step, checksums]).encode())

    def view(self, slot: int) -> memoryview:
        """Raises OSError for a file that somebody cut short: to touch what is missing would end the process."""
        mapped = self.maps[slot]
        if mapped.size() < self.num_bytes:
            raise OSError(f"the file has {mapped.size()} of its {self.num_bytes} bytes")
        return memoryview(mapped)

    def spoilt(self, slot: int, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, str]]:
        """Those that are not what was sealed, and why."""
        try:
            found = self.checksums(slot)
        except OSError as error:
            yield from ((piece, str(error)) for piece in pieces)
            return
        for piece, value in zip(pieces, found, strict=True):
            if value != piece.checksum:
                yield piece, f"it was sealed with {piece.checksum}, and has {value}"

    def around(self, view: memoryview, offset: int, num_bytes: int) -> tuple[int, int]:
        """The CRC-32 of what lies before and behind these bytes in their shard. Raises ValueError if that is none."""
        index = bisect_right(self.offsets, offset) - 1
        first = self.offsets[index] if index >= 0 else offset
        last = first + (self.layout[index].numel * ELEMENT_BYTES if index >= 0 else 0)
        if offset + num_bytes > last:
            raise ValueError(f"bytes [{offset}, {offset + num_bytes}) are not within one shard")
        return zlib.crc32(view[first:offset]), zlib.crc32(view[offset + num_bytes : last])


class ShardStore:
    """All snapshots that one node keeps, for all jobs. Adopts what it finds in the folders of `rooms`."""

    def __init__(self, rooms: Rooms, node: str) -> None:
        self._rooms = rooms
        self._node = node
        self._files: dict[tuple[str, str], _File] = {}
        self._lock = threading.Lock()
        for layout_path in (path for folder in rooms.folders() for path in folder.glob("*/*.layout")):
            job, name = layout_path.parent.name, layout_path.stem
            try:
                layout = keys_from_rows(json.loads(layout_path.read_text()))
                self._files[job, name] = _map(layout_path.parent, name, layout)
            except (ValueError, TypeError, AssertionError) as error:
                log.warning("layout of a snapshot cannot be read", job=job, name=name, error=str(error))
            except OSError as error:  # the agent before this one died while it made them
                log.warning("slots of a snapshot are not all there", job=job, name=name, error=str(error))

    def open(self, job: str, name: str, layout: tuple[ShardKey, ...]) -> tuple[tuple[str, ...], int]:
        """Makes both slots, with all their pages before the first write; answers their paths and size in bytes. Raises
        NoRoom."""
        with self._lock:
            known = self._files.get((job, name))
            if known is None or known.layout != layout:
                if known is not None:
                    self._remove(job, name)
                num_bytes = NUM_SLOTS * sum(key.numel * ELEMENT_BYTES for key in layout)
                known = self._rooms.place(job, num_bytes, lambda folder: _make(folder, name, layout))
                self._files[job, name] = known
            return tuple(str(known.slot_path(name, slot)) for slot in range(NUM_SLOTS)), known.num_bytes

    def begin(self, job: str, name: str, step: int) -> None:
        """From now on the slot of this step holds nothing. Raises KeyError when the snapshot was never opened."""
        with self._lock:
            self._file(job, name).seal_path(name, step % NUM_SLOTS).unlink(missing_ok=True)

    def seal(self, job: str, name: str, step: int, expected: list[str] | None = None) -> list[str]:
        """The slot of this step is whole; answers the checksums. Raises ValueError if others were expected."""
        with self._lock:
            file = self._file(job, name)
        found = file.checksums(step % NUM_SLOTS)
        if expected is not None and found != expected:
            raise ValueError(f"the copy of {name} at step {step} does not match its checksums")
        with self._lock:
            if (job, name) in self._files:
                seal = {"step": step, "checksums": found, "sum": file.sum_of_seal(step, found)}
                _write_whole(file.seal_path(name, step % NUM_SLOTS), json.dumps(seal))
        return found

    def layout(self, job: str, name: str) -> tuple[ShardKey, ...]:
        with self._lock:
            return self._file(job, name).layout

    def slot(self, job: str, name: str, step: int) -> memoryview:
        """The bytes of the slot of this step, sealed or not. Raises OSError if they are not all there any more."""
        with self._lock:
            return self._file(job, name).view(step % NUM_SLOTS)

    def ranges(
        self, job: str, name: str, step: int, wanted: Iterable[tuple[int, int]]
    ) -> tuple[list[memoryview], list[tuple[int, int]]]:
        """Bytes (offset, length) of a sealed snapshot, and the CRC-32 of what is around each in its shard: with those
        whoever has the bytes can verify them. Raises KeyError, ValueError, OSError."""
        self.sealed(job, name, step)
        with self._lock:
            file = self._file(job, name)
        slot = file.view(step % NUM_SLOTS)
        parts, around = [], []
        for offset, num_bytes in wanted:
            if not 0 <= offset <= offset + num_bytes <= slot.nbytes:
                raise ValueError(f"bytes [{offset}, {offset + num_bytes}) are not within a slot of {slot.nbytes}")
            parts.append(slot[offset : offset + num_bytes])
            around.append(file.around(slot, offset, num_bytes))
        return parts, around

    def sealed(self, job: str, name: str, step: int) -> Snapshot:
        """Raises KeyError when the node does not hold this snapshot whole."""
        with self._lock:
            file = self._file(job, name)
            seal = self._read_seal(file, job, name, step % NUM_SLOTS)
        if seal is None or seal[0] != step:
            raise KeyError(f"{name} of step {step}")
        return Snapshot(node=self._node, name=name, step=step, pieces=file.pieces(seal[1]))

    def snapshots(self, job: str, spoilt: list[tuple[Snapshot, str]] | None = None) -> Iterator[Snapshot]:
        """Every snapshot of the job, with the shards that have their checksums now; `spoilt` gets those that do not,
        each as a snapshot of its own, and why."""
        with self._lock:
            names = [name for owner, name in self._files if owner == job]
        for name in names:
            for slot in range(NUM_SLOTS):
                with self._lock:
                    file = self._files.get((job, name))
                    seal = None if file is None else self._read_seal(file, job, name, slot)
                if file is not None and seal is not None:
                    whole = Snapshot(node=self._node, name=name, step=seal[0], pieces=file.pieces(seal[1]))
                    bad = dict(file.spoilt(slot, whole.pieces))
                    if spoilt is not None:
                        spoilt.extend((replace(whole, pieces=(piece,)), problem) for piece, problem in bad.items())
                    if not bad or len(bad) < len(whole.pieces):
                        yield replace(whole, pieces=tuple(piece for piece in whole.pieces if piece not in bad))

    def epoch(self, job: str) -> int:
        """The highest that a snapshot of the job is of; 0 where there is none."""
        with self._lock:
            return max((epoch_of(name) for owner, name in self._files if owner == job), default=0)

    def retire(self, job: str, before_epoch: int | None) -> None:
        """Forgets snapshots of epochs before this one; all of the job's when None."""
        with self._lock:
            for owner, name in list(self._files):
                if owner == job and (before_epoch is None or epoch_of(name) < before_epoch):
                    self._remove(job, name)
            if before_epoch is None:
                self._rooms.forget(job)
                for folder in self._rooms.folders():
                    shutil.rmtree(folder / job, ignore_errors=True)

    def _remove(self, job: str, name: str) -> None:
        _remove_files(self._files.pop((job, name)).folder, name)

    def _file(self, job: str, name: str) -> _File:
        return self._files[job, name]

    def _read_seal(self, file: _File, job: str, name: str, slot: int) -> tuple[int, list[str]] | None:
        """A seal that is not as it was written is none: it may name another step, or belong to another layout."""
        try:
            seal = json.loads(file.seal_path(name, slot).read_text())
            step, checksums, found = seal["step"], seal["checksums"], seal["sum"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning("seal of a snapshot cannot be read", job=job, name=name, slot=slot, error=str(error))
            return None
        if found != file.sum_of_seal(step, checksums):
            log.warning("seal of a snapshot is not as it was written", job=job, name=name, slot=slot)
            return None
        return step, checksums


def _make(folder: Path, name: str, layout: tuple[ShardKey, ...]) -> _File:
    """Both slots of a new snapshot; nothing is left of an attempt that fails."""
    folder.mkdir(exist_ok=True)
    try:
        _write_whole(folder / f"{name}.layout", json.dumps(key_rows(layout)))
        return _map(folder, name, layout)
    except OSError:
        _remove_files(folder, name)
        raise


def _map(folder: Path, name: str, layout: tuple[ShardKey, ...]) -> _File:
    offsets, total = [], 0
    for key in layout:
        offsets.append(total)
        total += key.numel * ELEMENT_BYTES
    maps = tuple(_map_file(_slot_path(folder, name, slot), max(total, 1)) for slot in range(NUM_SLOTS))
    layout_sum = checksum(json.dumps(key_rows(layout)).encode())
    return _File(
        layout=layout, layout_sum=layout_sum, offsets=tuple(offsets), num_bytes=total, maps=maps, folder=folder
    )


def _slot_path(folder: Path, name: str, slot: int) -> Path:
    return folder / f"{name}.slot{slot}"


def _remove_files(folder: Path, name: str) -> None:
    for path in folder.glob(f"{name}.*"):
        path.unlink(missing_ok=True)


def _map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Maps the file, with every page in memory: the first touch costs ten times the copy (and must not hit a step)."""
    with path.open("a+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _write_whole(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never a part."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text)
    scratch.replace(path)
