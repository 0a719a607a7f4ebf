"""What a node has brought into the object store stays on its disk for a while, and so do the copies that it keeps for
others of such steps: a job that has to go back to a checkpoint then reads only that from the store which no survivor
has.

Owns these files and their end. They make way for whatever else needs the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from shoal_recovery.patient_disk import PatientDisk, Progress
from shoal_recovery.state import Snapshot
from shoal_workers.ranges import Surrounded, surrounded
from shoal_workers.shard_files import ShardFile, left_behind, remove_all
from shoal_workers.shards import epoch_of

log = structlog.get_logger()

# Of a job, of those that are newer than what is known to be whole in the store: any of them may be whole next.
_KEPT_STEPS = 4


class StoredCopies:
    """Any thread may call. So many bytes of them as `most_bytes` says may lie on `disk`, which it may look at."""

    def __init__(self, folder: Path, most_bytes: Callable[[], int], disk: PatientDisk) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._disk = disk
        self._lock = threading.Lock()  # never held while the disk is waited for: it may hang
        self._numbers = itertools.count(time.time_ns())  # an agent before this one may have left files
        self._files: list[ShardFile] = []
        self._coming_bytes = 0  # of files that are none of these yet
        self._whole: dict[str, int] = {}
        self._lives = Counter[str]()  # of jobs: how often each was forgotten

    def start(self) -> None:
        """Takes over what an agent of the node before this one had."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files += left_behind(self._folder)

    def is_whole(self, job: str, step: int) -> None:
        """The store has all of this step: nobody goes back behind it, and all other nodes' part of it lies there, too,
        so it stays until a newer one is whole."""
        with self._lock:
            if step <= self._whole.get(job, 0):
                return
            self._whole[job] = step
            outdated = self._take(one for one in self._files if one.job == job and one.snapshot.step < step)
        self._remove(outdated)

    def keep(self, stored: ShardFile) -> None:
        """Instead of what is older, and of what was done again since. Where there is no room it is removed."""
        if stored.path.parent == self._folder:
            return  # it was kept before, though it may have had to go meanwhile
        with self._room(stored.job, stored.snapshot, stored.num_bytes) as life:
            try:
                if life is not None:
                    self._add(stored.moved(self._folder), life)
                    return
            except OSError as error:
                log.warning("no copy of what was stored is kept", job=stored.job, error=str(error))
            self._remove([stored])

    def add(self, job: str, snapshot: Snapshot, uri: str, content: memoryview) -> None:
        """A copy of what another node brings to `uri`, if there is room."""
        path = self._folder / f"{job}-{snapshot.name}-{snapshot.step}.{next(self._numbers)}"

        def write(progress: Progress) -> ShardFile:
            return ShardFile.write(path, job, snapshot, uri, content, progress)

        with self._room(job, snapshot, sum(piece.num_bytes for piece in snapshot.pieces)) as life:
            try:
                if life is not None:
                    self._add(self._disk.run(write, undo=ShardFile.remove), life)
            except OSError as error:
                log.warning("no copy of what is stored is kept", job=job, error=str(error))

    def holds(self, file: ShardFile) -> bool:
        with self._lock:
            return file in self._files

    def discard(self, file: ShardFile) -> None:
        """It is of no use any more, if it is one of them at all."""
        with self._lock:
            of_no_use = self._take(one for one in self._files if one == file)
        self._remove(of_no_use)

    def make_way(self) -> bool:
        """Whether there was anything to remove."""
        with self._lock:
            there = self._take(self._files)
        self._remove(there)
        return bool(there)

    def forget(self, job: str) -> None:
        with self._lock:
            self._whole.pop(job, None)
            self._lives[job] += 1
            over = self._take(one for one in self._files if one.job == job)
        self._remove(over)

    def epoch(self, job: str) -> int:
        """The highest that any of them is of; 0 where there is none."""
        with self._lock:
            return max((one.epoch for one in self._files if one.job == job), default=0)

    def snapshots(
        self, job: str, spoilt: list[tuple[Snapshot, str]], elsewhere: Collection[tuple[str, int]], *, verified: bool
    ) -> Iterator[Snapshot]:
        """Those of the job but for names and steps that are held `elsewhere`; `spoilt` gets what is not as it was
        sealed (see `ShardStore.snapshots`)."""
        with self._lock:
            files = [one for one in self._files if one.job == job]
        for file in files:
            whole = file.snapshot
            if (whole.name, whole.step) in elsewhere:
                continue
            bad = dict(file.spoilt(verified=verified))
            spoilt.extend((replace(whole, pieces=(piece,)), problem) for piece, problem in bad.items())
            if left := tuple(piece for piece in whole.pieces if piece not in bad):
                yield replace(whole, pieces=left)

    def find(self, job: str, name: str, step: int) -> ShardFile | None:
        with self._lock:
            wanted = (job, name, step)
            return next((one for one in self._files if (one.job, one.snapshot.name, one.snapshot.step) == wanted), None)

    def ranges(self, job: str, name: str, step: int, wanted: Iterable[tuple[int, int]]) -> Surrounded:
        """See `ShardStore.ranges`. Raises KeyError, ValueError, OSError."""
        file = self.find(job, name, step)
        if file is None:
            raise KeyError(f"{name} of step {step}")
        return surrounded(file.mapped(), [(one.offset, one.num_bytes) for one in file.snapshot.pieces], wanted)

    @contextlib.contextmanager
    def _room(self, job: str, snapshot: Snapshot, num_bytes: int) -> Iterator[int | None]:
        """Removes what this snapshot outdates; in which life of its job it may lie there, or None. What comes is
        counted meanwhile."""
        with self._lock:
            life = self._lives[job]
        try:
            most_bytes = self._disk.run(lambda _: self._most_bytes())
        except OSError:  # it hangs
            yield None
            return
        with self._lock:
            outdated, there_is = self._outdated(job, snapshot, num_bytes, most_bytes)
            coming_bytes = num_bytes if there_is else 0
            self._coming_bytes += coming_bytes
        try:
            self._remove(outdated)
            yield life if there_is else None
        finally:
            with self._lock:
                self._coming_bytes -= coming_bytes

    def _outdated(self, job: str, snapshot: Snapshot, num_bytes: int, most_bytes: int) -> tuple[list[ShardFile], bool]:
        """And whether it may lie there then. The caller has the lock, and removes them."""
        mine, epoch = [one for one in self._files if one.job == job], epoch_of(snapshot.name)
        taken = self._take(one for one in mine if one.snapshot.step >= snapshot.step and one.epoch < epoch)
        mine = [one for one in mine if one not in taken]
        for steps in _kept({snapshot.step, *(one.snapshot.step for one in mine)}, self._whole.get(job, 0)):
            taken += self._take(one for one in mine if one.snapshot.step not in steps)
            mine = [one for one in mine if one.snapshot.step in steps]
            if num_bytes + self._coming_bytes + sum(one.num_bytes for one in self._files) <= most_bytes:
                return taken, snapshot.step in steps
        return taken, False

    def _add(self, file: ShardFile, life: int) -> None:
        """Unless its job is over meanwhile."""
        with self._lock:
            if self._lives[file.job] == life:
                self._files.append(file)
                return
        self._remove([file])

    def _take(self, files: Iterable[ShardFile]) -> list[ShardFile]:
        """They are none of these any more. The caller has the lock, and removes them."""
        taken = list(files)
        self._files = [one for one in self._files if one not in taken]
        return taken

    def _remove(self, files: Collection[ShardFile]) -> None:
        """In their time, where the disk hangs."""
        if files:
            self._disk.soon(partial(remove_all, files))


def _kept(steps: Collection[int], whole: int) -> Iterator[frozenset[int]]:
    """What to keep of these, and what instead where the disk is too small for that, each a part of the one before.
    Where the store is slow, nodes are slow in different ways: of the steps that may be whole next, each keeps those
    that all others keep, too, as with what is on its way there (`Uploads`). With little room what is whole makes way at
    last: the step after it mostly is whole soon."""
    later = sorted(step for step in steps if step > whole)
    for most in range(_KEPT_STEPS, 1, -1):
        while len(later) > most:
            later.remove(min(later[1:-1], key=lambda step: (step & -step, step)))
        yield frozenset((whole, *later))
    yield frozenset(later)
