"""The shard store of one node: snapshots in memory-mapped files that outlive ranks, epochs and the agent itself.

A snapshot file has two slots, and the older of two steps makes way for the next. A slot counts only while its seal
stands beside it: the seal is removed before the first byte changes and written, with the checksum of every piece, after
the last. Files are plain files in folders of the node: they go with nobody's death. Thread-safe. Owns no sockets; in
which folder a file lies, `rooms` decides.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from shoal_recovery.crc import checksum
from shoal_recovery.state import ELEMENT_BYTES, Piece, ShardKey, Snapshot
from shoal_workers.ranges import Surrounded, surrounded
from shoal_workers.rooms import Rooms
from shoal_workers.rows import key_rows, keys_from_rows
from shoal_workers.slot_files import NUM_SLOTS as NUM_SLOTS
from shoal_workers.slot_files import Sizes, SlotFiles, SpareSlots, map_slots

log = structlog.get_logger()


_MIRROR = "-mirror"
_MOST_ROOM = 2  # times what is needed: a spare that is larger takes longer to make
_SPARE_WAIT_S = 10.0
_NO_STEP = -1


def snapshot_name(epoch: int, rank: int, *, mirror: bool = False) -> str:
    """Of what a rank vouches for, or of what it mirrors. What has one name is, at one step, the same bytes on every
    node."""
    return f"{epoch:06d}-{rank}{_MIRROR if mirror else ''}"


def is_mirror(name: str) -> bool:
    return name.endswith(_MIRROR)


def epoch_of(name: str) -> int:
    return int(name.split("-")[0])


@dataclass(slots=True)
class _File:
    """`num_users`: how many conversations write into the slots, or read what must not change, at this moment;
    `num_readers`: the latter, by slot. `steps` are those that were begun last, by slot."""

    layout: tuple[ShardKey, ...]
    layout_sum: str
    offsets: tuple[int, ...]
    num_bytes: int
    slots: SlotFiles
    num_users: int = 0
    num_readers: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)
    steps: list[int] = field(default_factory=lambda: [_NO_STEP] * NUM_SLOTS)

    @property
    def folder(self) -> Path:
        return self.slots.stem.parent

    def slot_of(self, step: int) -> int:
        """Raises KeyError."""
        if step not in self.steps:
            raise KeyError(f"step {step}")
        return self.steps.index(step)

    def slot_for(self, step: int) -> int:
        """Where it was begun before. Else in place of what is not whole, or of the older; even steps lie in the first
        where there is a choice."""
        if step in self.steps:
            return self.slot_of(step)
        free = [slot for slot in range(NUM_SLOTS) if not self.seal_path(slot).exists()]
        if not free:
            return self.steps.index(min(self.steps))
        return step % NUM_SLOTS if step % NUM_SLOTS in free else free[0]

    def seal_path(self, slot: int) -> Path:
        return self.slots.stem.with_name(f"{self.slots.stem.name}.seal{slot}")

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
        mapped = self.slots.maps[slot]
        if mapped.size() < self.num_bytes:
            raise OSError(f"the file has {mapped.size()} of its {self.num_bytes} bytes")
        return memoryview(mapped)[: max(self.num_bytes, 1)]

    def spoilt(self, slot: int, pieces: Sequence[Piece], *, verified: bool) -> Iterator[tuple[Piece, str]]:
        """Those that are not what was sealed, and why; if not `verified`, those that are not there at all."""
        try:
            self.view(slot)
            found = self.checksums(slot) if verified else [piece.checksum for piece in pieces]
        except OSError as error:
            yield from ((piece, str(error)) for piece in pieces)
            return
        for piece, value in zip(pieces, found, strict=True):
            if value != piece.checksum:
                yield piece, f"it was sealed with {piece.checksum}, and has {value}"


class ShardStore:
    """All snapshots that one node keeps, for all jobs. Adopts what it finds in the folders of `rooms`."""

    def __init__(self, rooms: Rooms, node: str) -> None:
        self._rooms = rooms
        self._node = node
        self._files: dict[tuple[str, str], _File] = {}
        self._lock = threading.Lock()
        self._made_some = threading.Condition(self._lock)
        self._was_read = threading.Condition(self._lock)
        self._making: defaultdict[str, list[int]] = defaultdict(list)  # sizes of spares that are on their way
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # of who makes spares for a job
        self._wanted: dict[tuple[str, bool], Sizes] = {}  # of a job, for whether nodes join or are lost
        self._over: set[str] = set()  # jobs of which nothing is kept any more
        self._last_epochs: dict[str, int] = {}  # that jobs had when they were over
        self._spares = SpareSlots(rooms.memory)
        for layout_path in (path for folder in rooms.folders() for path in folder.glob("*/*.layout")):
            job, name = layout_path.parent.name, layout_path.stem
            try:
                layout = keys_from_rows(json.loads(layout_path.read_text()))
                slots = map_slots(layout_path.with_suffix(""), _size(layout))
                # Perhaps a rank has them mapped.
                file = self._files[job, name] = _file_of(layout, replace(slots, writer=name))
                seals = (self._read_seal(file, job, name, slot) for slot in range(NUM_SLOTS))
                file.steps = [_NO_STEP if seal is None else seal[0] for seal in seals]
            except (ValueError, TypeError, AssertionError) as error:
                log.warning("layout of a snapshot cannot be read", job=job, name=name, error=str(error))
            except OSError as error:  # the agent before this one died while it made them
                log.warning("slots of a snapshot are not all there", job=job, name=name, error=str(error))

    def open(
        self,
        job: str,
        name: str,
        layout: tuple[ShardKey, ...],
        *,
        by_rank: bool = False,
        left: Collection[str] = (),
    ) -> tuple[tuple[str, ...], int]:
        """Has both slots, with all their pages before the first write; answers their paths and size in bytes. Where a
        rank writes into them by itself (`by_rank`) it writes no more into those of the snapshots that it has `left`.
        Raises NoRoom, and ValueError for an epoch with which the job was over: whoever sends it does not know yet, and
        nobody would ever remove it."""
        with self._lock:
            known = self._files.get((job, name))
            if known is None or known.layout != layout:
                self._await_spare(job, _size(layout), left)
            last_epoch = self._last_epochs.get(job, 0)
            if epoch_of(name) <= last_epoch:
                raise ValueError(f"epoch {epoch_of(name)} of {job} is over: the job ended in epoch {last_epoch}")
            self._over.discard(job)
            known = self._files.get((job, name))
            if known is None or known.layout != layout:
                if known is not None:
                    _remove_files(self._files.pop((job, name)).folder, name)
                spare = self._spares.take(job, _size(layout), left)
                found = self._made(job, name, layout) if spare is None else _begun(spare, name, layout)
                found.slots = replace(found.slots, writer=name if by_rank else "")
                known = self._files[job, name] = found
            return tuple(map(str, known.slots.paths)), known.num_bytes

    def make_ready(self, job: str, sizes: Sizes, *, joining: bool = False) -> None:
        """Slots of these sizes lie ready in memory for the next epoch afterwards, as far as there is room: for one that
        follows a loss, or that nodes are `joining`. Enough for either is kept, and no others. Whoever looks ahead may
        be late: of a job that was retired nothing is kept."""
        with self._lock:
            turn = self._turns[job]
        with turn:
            self._make_ready(job, sizes, joining)

    def _make_ready(self, job: str, sizes: Sizes, joining: bool) -> None:
        with self._lock:
            if job in self._over:
                return
            self._wanted[job, joining] = sizes
            lacking = self._spares.lacking(job, sizes.or_more(self._wanted.get((job, not joining), Sizes())))
            stems = [self._spares.next_stem(job) for _ in lacking]
            self._making[job] += lacking
        try:
            while lacking and self._makes_ready(job, stems.pop(0), lacking[0]):
                self._no_longer_making(job, [lacking.pop(0)])
        finally:
            self._no_longer_making(job, lacking)

    def _makes_ready(self, job: str, stem: Path, num_bytes: int) -> bool:
        """Whether there is any use in going on."""
        stem.parent.mkdir(exist_ok=True)
        try:
            made = map_slots(stem, num_bytes)
        except OSError as error:
            log.info("no memory is made ready", job=job, num_bytes=num_bytes, error=str(error))
            return False
        with self._lock:
            if job in self._over:
                made.unlink()
                with contextlib.suppress(OSError):
                    stem.parent.rmdir()
                return False
            self._spares.add(job, made)
        return True

    def _no_longer_making(self, job: str, sizes: list[int]) -> None:
        with self._lock:
            for size in sizes:
                self._making[job].remove(size)
            self._made_some.notify_all()

    def _await_spare(self, job: str, num_bytes: int, left: Collection[str]) -> None:
        """Where one that fits is on its way: to make the same once more would take both of them longer. Not for ever:
        who makes it may hang, and then one of its own is better than none."""
        self._made_some.wait_for(
            lambda: (
                self._spares.fits(job, num_bytes, left)
                or not any(num_bytes <= size <= _MOST_ROOM * num_bytes for size in self._making[job])
            ),
            _SPARE_WAIT_S,
        )

    @contextlib.contextmanager
    def used(self, job: str, name: str) -> Iterator[None]:
        """Meanwhile nothing else gets the memory of this snapshot, even if it is retired. Raises KeyError."""
        with self._lock:
            file = self._file(job, name)
            file.num_users += 1
        try:
            yield
        finally:
            with self._lock:
                file.num_users -= 1

    @contextlib.contextmanager
    def reading(self, job: str, name: str, step: int) -> Iterator[tuple[Snapshot, memoryview]]:
        """A sealed snapshot and its bytes, which stay as they are meanwhile. Raises KeyError, OSError."""
        with self.used(job, name):
            with self._lock:
                file, snapshot = self._file(job, name), self._sealed(job, name, step)
                slot = file.slot_of(step)
                content = file.view(slot)
                file.num_readers[slot] += 1
            try:
                yield snapshot, content
            finally:
                with self._lock:
                    file.num_readers[slot] -= 1
                    self._was_read.notify_all()

    def begin(self, job: str, name: str, step: int) -> int:
        """From now on the slot of this step, which is answered, holds nothing: that of the older step, unless this one
        was begun before. Waits as long as somebody is `reading` it. Raises KeyError when the snapshot was never
        opened."""
        with self._lock:
            while (file := self._file(job, name)).num_readers[slot := file.slot_for(step)]:
                self._was_read.wait()
            file.steps[slot] = step
            file.seal_path(slot).unlink(missing_ok=True)
            return slot

    def seal(self, job: str, name: str, step: int, expected: list[str] | None = None) -> list[str]:
        """The slot of this step is whole; answers the checksums. Raises ValueError if others were expected."""
        with self._lock:
            file = self._file(job, name)
            slot = file.slot_of(step)
        found = file.checksums(slot)
        if expected is not None and found != expected:
            raise ValueError(f"the copy of {name} at step {step} does not match its checksums")
        with self._lock:
            if (job, name) in self._files:
                seal = {"step": step, "checksums": found, "sum": file.sum_of_seal(step, found)}
                _write_whole(file.seal_path(slot), json.dumps(seal))
        return found

    def layout(self, job: str, name: str) -> tuple[ShardKey, ...]:
        with self._lock:
            return self._file(job, name).layout

    def slot(self, job: str, name: str, step: int) -> memoryview:
        """The bytes of the slot of this step, sealed or not. Raises OSError if they are not all there any more."""
        with self._lock:
            file = self._file(job, name)
            return file.view(file.slot_of(step))

    def ranges(self, job: str, name: str, step: int, wanted: Iterable[tuple[int, int]]) -> Surrounded:
        """Of a sealed snapshot (see `surrounded`). Raises KeyError, ValueError, OSError."""
        self.sealed(job, name, step)
        with self._lock:
            file = self._file(job, name)
            slot = file.slot_of(step)
        shards = [(offset, key.numel * ELEMENT_BYTES) for offset, key in zip(file.offsets, file.layout, strict=True)]
        return surrounded(file.view(slot), shards, wanted)

    def is_sealed(self, job: str, name: str, step: int) -> bool:
        try:
            self.sealed(job, name, step)
        except KeyError:
            return False
        return True

    def sealed(self, job: str, name: str, step: int) -> Snapshot:
        """Raises KeyError when the node does not hold this snapshot whole."""
        with self._lock:
            return self._sealed(job, name, step)

    def _sealed(self, job: str, name: str, step: int) -> Snapshot:
        file = self._file(job, name)
        seal = self._read_seal(file, job, name, file.slot_of(step)) if step in file.steps else None
        if seal is None or seal[0] != step:
            raise KeyError(f"{name} of step {step}")
        return Snapshot(node=self._node, name=name, step=step, pieces=file.pieces(seal[1]))

    def snapshots(
        self, job: str, spoilt: list[tuple[Snapshot, str]] | None = None, *, verified: bool = True
    ) -> Iterator[Snapshot]:
        """Every snapshot of the job, with the shards that have their checksums now, or that had them when they were
        sealed if nothing is to be `verified`; `spoilt` gets the others, each as a snapshot of its own, and why."""
        with self._lock:
            names = [name for owner, name in self._files if owner == job]
        for name in names:
            for slot in range(NUM_SLOTS):
                with self._lock:
                    file = self._files.get((job, name))
                    seal = None if file is None else self._read_seal(file, job, name, slot)
                if file is not None and seal is not None:
                    whole = Snapshot(node=self._node, name=name, step=seal[0], pieces=file.pieces(seal[1]))
                    bad = dict(file.spoilt(slot, whole.pieces, verified=verified))
                    if spoilt is not None:
                        spoilt.extend((replace(whole, pieces=(piece,)), problem) for piece, problem in bad.items())
                    if not bad or len(bad) < len(whole.pieces):
                        yield replace(whole, pieces=tuple(piece for piece in whole.pieces if piece not in bad))

    def is_over(self, job: str) -> bool:
        with self._lock:
            return job in self._over

    def epoch(self, job: str) -> int:
        """The highest that a snapshot of the job is or was of; 0 where there is none."""
        with self._lock:
            return self._epoch(job)

    def retire(self, job: str, before_epoch: int | None) -> None:
        """Forgets snapshots of epochs before this one; all of the job's when None, and takes none of these epochs any
        more."""
        with self._lock:
            if before_epoch is None:
                self._last_epochs[job] = self._epoch(job)
            over = [
                name
                for owner, name in self._files
                if owner == job and (before_epoch is None or epoch_of(name) < before_epoch)
            ]
            if over:
                self._drop_spares(job)  # what the epoch before that left, and nobody took
            for name in over:
                self._retire(job, name)
            if before_epoch is None:
                self._over.add(job)
                self._drop_spares(job)
                self._rooms.forget(job)
                for folder in self._rooms.folders():
                    shutil.rmtree(folder / job, ignore_errors=True)

    def _drop_spares(self, job: str) -> None:
        """What was wanted of them was wanted for the epoch that has come, or will not."""
        self._spares.drop(job)
        for joining in (False, True):
            self._wanted.pop((job, joining), None)

    def _epoch(self, job: str) -> int:
        held = (epoch_of(name) for owner, name in self._files if owner == job)
        return max(held, default=self._last_epochs.get(job, 0))

    def _retire(self, job: str, name: str) -> None:
        """Its files lie ready for the next epoch if they lie in memory, unless somebody is busy with them."""
        file = self._files.pop((job, name))
        if file.folder.parent == self._rooms.memory and file.num_bytes and not file.num_users:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed them
                self._spares.add(job, file.slots.moved(self._spares.next_stem(job)))
        _remove_files(file.folder, name)

    def _made(self, job: str, name: str, layout: tuple[ShardKey, ...]) -> _File:
        """Where there is room, even if what lies ready must go for it. Raises NoRoom."""

        def make(folder: Path) -> _File:
            try:
                return _make(folder, name, layout)
            except OSError:
                if not self._spares.drop_all():
                    raise
                return _make(folder, name, layout)

        return self._rooms.place(job, NUM_SLOTS * _size(layout), make)

    def _file(self, job: str, name: str) -> _File:
        return self._files[job, name]

    def _read_seal(self, file: _File, job: str, name: str, slot: int) -> tuple[int, list[str]] | None:
        """A seal that is not as it was written is none: it may name another step, or belong to another layout."""
        try:
            seal = json.loads(file.seal_path(slot).read_text())
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
        return _file_of(layout, map_slots(folder / name, _size(layout)))
    except OSError:
        _remove_files(folder, name)
        raise


def _begun(spare: SlotFiles, name: str, layout: tuple[ShardKey, ...]) -> _File:
    """A new snapshot in files that are there."""
    _write_whole(spare.stem.with_name(f"{name}.layout"), json.dumps(key_rows(layout)))
    return _file_of(layout, spare.moved(spare.stem.with_name(name)))


def _file_of(layout: tuple[ShardKey, ...], slots: SlotFiles) -> _File:
    offsets = tuple(itertools.accumulate((key.numel * ELEMENT_BYTES for key in layout), initial=0))[:-1]
    layout_sum = checksum(json.dumps(key_rows(layout)).encode())
    return _File(layout=layout, layout_sum=layout_sum, offsets=offsets, num_bytes=_size(layout), slots=slots)


def _remove_files(folder: Path, name: str) -> None:
    for path in folder.glob(f"{name}.*"):
        path.unlink(missing_ok=True)


def _size(layout: Iterable[ShardKey]) -> int:
    return sum(key.numel for key in layout) * ELEMENT_BYTES


def _write_whole(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never a part."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text)
    scratch.replace(path)
