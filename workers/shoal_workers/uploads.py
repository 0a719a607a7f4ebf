"""Brings snapshots into the object store, in the background, by way of a copy on local disk.

Owns the copies on disk, a thread for each job that has some, and the reports about it. While the store cannot be used,
or is slow, a few copies wait; what an agent that died has left is brought by the next one of its node, once somebody
watches the job. What makes a step whole in the store (the manifest) is the supervisor's business.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from shoal_planner.errors import InvalidField
from shoal_recovery.checkpoints import put_shard
from shoal_recovery.errors import StoreError, StoreUnreachable
from shoal_recovery.patient_disk import PatientDisk, Progress
from shoal_recovery.state import Snapshot, StoredPiece
from shoal_recovery.store import Store
from shoal_workers.messages import UploadDelayed, Uploaded
from shoal_workers.rows import stored_rows
from shoal_workers.shard_files import ShardFile, left_behind, remove_all
from shoal_workers.shards import epoch_of
from shoal_workers.stored_copies import StoredCopies

log = structlog.get_logger()

_KEPT_STEPS = 4  # of a job, on disk at once
_TOLD_STEPS = 32  # of a job; a supervisor that comes late needs those whose manifest is not written yet
_SLOW_AFTER_S = 10.0  # when the next comes meanwhile
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_LOOK_S = 0.5  # whether it may write again

Report = Uploaded | UploadDelayed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """To bring `file` into the store."""

    file: ShardFile
    since_s: float

    @property
    def job(self) -> str:
        return self.file.job

    @property
    def step(self) -> int:
        return self.file.snapshot.step


class Uploads:
    """While `may_write` says no, nothing is begun: somebody else may be about to do these steps again. What is brought
    comes into the hands of `stored`; all of it lies on `disk`."""

    def __init__(
        self,
        folder: Path,
        stored: StoredCopies,
        open_store: Callable[[str], Store],
        disk: PatientDisk,
        may_write: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._stored = stored
        self._open_store = open_store
        self._disk = disk
        self._may_write = may_write
        self._clock = clock
        self._numbers = itertools.count(time.time_ns())
        self._changed = threading.Condition()
        self._tasks: list[_Task] = []
        self._at_work: set[str] = set()  # jobs that have a thread
        self._closed = False
        self._left: list[_Task] = []
        self._done: defaultdict[str, list[Uploaded]] = defaultdict(list)
        self._delayed: dict[str, UploadDelayed] = {}
        self._lives = Counter[str]()  # of jobs: how often each was forgotten
        self._watchers: defaultdict[str, list[queue.SimpleQueue[Report]]] = defaultdict(list)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._left = [_Task(file=file, since_s=self._clock()) for file in left_behind(self._folder)]

    def add(self, job: str, snapshot: Snapshot, uri: str, content: memoryview) -> None:
        """Returns as soon as `content` may be overwritten. A disk that is full, or hangs, costs this checkpoint, never
        the step; and so does the end of the job meanwhile."""
        life = self._lives[job]
        # Numbered: a snapshot may be asked for again while it is still on its way.
        path = self._folder / f"{job}-{snapshot.name}-{snapshot.step}.{next(self._numbers)}"
        try:
            task = _Task(file=self._written(path, job, snapshot, uri, content), since_s=self._clock())
        except Exception as error:  # whatever it is: somebody waits for this checkpoint, or for word of it
            self._tell(_result(job, snapshot, (), f"no copy on the node's disk: {error}"))
            return
        self._enqueue(task, life)

    def again(self, job: str, name: str, step: int) -> bool:
        """What is kept of what was brought is brought once more, if it is."""
        file = self._stored.find(job, name, step)
        if file is not None:
            self._enqueue(_Task(file=file, since_s=self._clock()), self._lives[job])
        return file is not None

    def _enqueue(self, task: _Task, life: int) -> None:
        with self._changed:
            is_over = self._lives[task.job] != life
            given_up = [task] if is_over else self._take_on(task)
        self._remove(given_up)
        for one in () if is_over else given_up:
            problem = "given up for other steps: the store does not take them as fast as they come"
            self._tell(_result(one.job, one.file.snapshot, (), problem))

    def _take_on(self, task: _Task) -> list[_Task]:
        """Those that make way for it. The caller has the lock."""
        if self._closed:
            return []  # it is for the next agent of this node
        job = task.job
        self._tasks.append(task)
        self._set_to_work(job)
        pending = self._steps(job)
        oldest_s = self._clock() - min(one.since_s for one in self._tasks if one.job == job)
        if len(pending) > 1 and oldest_s > _SLOW_AFTER_S:
            self._delay(job, f"step {pending[0]} is still on its way after {oldest_s:.0f} s")
        return self._cut_down(job, pending)

    def _written(self, path: Path, job: str, snapshot: Snapshot, uri: str, content: memoryview) -> ShardFile:
        """Even if what is in the store already must go for it. Raises OSError."""

        def write(progress: Progress) -> ShardFile:
            return ShardFile.write(path, job, snapshot, uri, content, progress)

        try:
            return self._disk.run(write, undo=ShardFile.remove)
        except OSError as error:
            if error.errno == errno.ETIMEDOUT or not self._stored.make_way():
                raise
            return self._disk.run(write, undo=ShardFile.remove)

    def _remove(self, tasks: Sequence[_Task]) -> None:
        """In their time, where the disk hangs."""
        if tasks:
            self._disk.soon(partial(remove_all, [task.file for task in tasks]))

    def _steps(self, job: str) -> list[int]:
        return sorted({task.step for task in self._tasks if task.job == job})

    def _cut_down(self, job: str, pending: list[int]) -> list[_Task]:
        """Never the first step, which may be half there, nor the newest; of the others the one with the fewest factors
        of two: so nodes that are slow in different ways still keep the same steps, and some become whole."""
        if len(pending) <= _KEPT_STEPS:
            return []
        step = min(pending[1:-1], key=lambda step: (step & -step, step))
        given_up = [task for task in self._tasks if task.job == job and task.step == step]
        self._tasks = [task for task in self._tasks if task not in given_up]
        return given_up

    def watch(self, job: str) -> queue.SimpleQueue[Report]:
        """A queue of the results of this job, earlier ones first: a supervisor that comes late misses none that it may
        still need."""
        events: queue.SimpleQueue[Report] = queue.SimpleQueue()
        with self._changed:
            wanted = [task for task in self._left if task.job == job]
            self._left = [task for task in self._left if task.job != job]
            self._tasks = wanted + self._tasks
            self._set_to_work(job)
            for done in self._done[job]:
                events.put(done)
            if job in self._delayed and self._steps(job):
                events.put(self._delayed[job])
            self._watchers[job].append(events)
        return events

    def unwatch(self, job: str, events: queue.SimpleQueue[Report]) -> None:
        with self._changed, contextlib.suppress(ValueError):
            self._watchers[job].remove(events)

    def forget(self, job: str) -> None:
        """The job is over: what is not stored yet will not be."""
        with self._changed:
            self._done.pop(job, None)
            self._delayed.pop(job, None)
            self._lives[job] += 1
            over = [task for task in self._tasks + self._left if task.job == job]
            self._tasks = [task for task in self._tasks if task not in over]
            self._left = [task for task in self._left if task not in over]
            self._changed.notify_all()
        self._remove(over)
        self._stored.forget(job)

    def close(self) -> None:
        """What is not there yet stays on disk, for the next agent of this node."""
        with self._changed:
            self._closed, self._tasks = True, []
            self._changed.notify_all()

    def _set_to_work(self, job: str) -> None:
        """The caller has the lock. A thread for each job: the store of one may be dead."""
        if job not in self._at_work and any(task.job == job for task in self._tasks):
            self._at_work.add(job)
            threading.Thread(target=self._work, args=(job,), name="uploads", daemon=True).start()

    def _work(self, job: str) -> None:
        while True:
            with self._changed:
                # Not as they came: two may be written to the disk at once.
                mine = (task for task in self._tasks if task.job == job)
                task = min(mine, key=lambda task: (task.file.epoch, task.step), default=None)
                if task is None:
                    self._at_work.discard(job)
                    return
            result = self._bring(task)
            with self._changed:
                if self._closed:
                    return
                wanted = task in self._tasks
                self._tasks = [one for one in self._tasks if one is not task]
            if wanted and result is not None and result.problem is None:
                self._stored.keep(task.file)
            elif not self._stored.holds(task.file):  # else it may be brought once more when the store works again
                task.file.remove()
            if wanted and result is not None:
                self._tell(result)

    def _bring(self, task: _Task) -> Uploaded | None:
        """Tries until it is there, or will never be; None if nobody wants it any more."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                while not self._may_write():
                    if self._changed.wait_for(lambda: task not in self._tasks, _LOOK_S):
                        return None
            try:
                return _result(task.job, task.file.snapshot, self._put(task.file), None)
            except StoreUnreachable as error:
                with self._changed:
                    self._delay(task.job, str(error))
                    if self._changed.wait_for(lambda: task not in self._tasks, pause_s):
                        return None
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except (StoreError, InvalidField, OSError, ValueError) as error:
                # Training goes on without this checkpoint; the supervisor tells the user.
                log.warning("upload failed", job=task.job, step=task.step, error=str(error))
                return _result(task.job, task.file.snapshot, (), str(error))

    def _put(self, file: ShardFile) -> tuple[StoredPiece, ...]:
        """Raises OSError where it is not what was sealed any more: a step with that would count, and be of no use."""
        store = self._open_store(file.uri)
        for piece, problem in file.spoilt(verified=True):
            self._stored.discard(file)
            raise OSError(f"the copy of {piece.key.fqn} on the node's disk is spoilt: {problem}")
        if not file.has_header():
            self._stored.discard(file)
            raise OSError(f"the copy of {file.snapshot.name} on the node's disk is spoilt: its header is another one")
        return put_shard(
            store,
            job=file.job,
            step=file.snapshot.step,
            epoch=file.epoch,
            shard=file.snapshot.name,
            data=file.mapped(),
            pieces=file.snapshot.pieces,
        )

    def _tell(self, result: Uploaded) -> None:
        with self._changed:
            self._done[result.job] = _newest([*self._done[result.job], result])
            self._send(result)

    def _delay(self, job: str, problem: str) -> None:
        """Said again when a newer step has to wait, too. The caller has the lock."""
        said, pending = self._delayed.get(job), self._steps(job)
        if pending and (said is None or said.step < pending[-1]):
            log.warning("upload delayed", job=job, step=pending[-1], error=problem)
            self._delayed[job] = UploadDelayed(job=job, step=pending[-1], problem=problem)
            self._send(self._delayed[job])

    def _send(self, report: Report) -> None:
        for events in self._watchers[report.job]:
            events.put(report)


def _newest(results: Sequence[Uploaded]) -> list[Uploaded]:
    """Those of the steps that came last, and of those that failed last: where most fail, what came is needed longer.
    Not the highest: steps that are done again come after what they replace."""
    steps = list(dict.fromkeys((one.problem is None, one.epoch, one.step) for one in reversed(results)))
    came, failed = ([step for step in steps if step[0] is kind][:_TOLD_STEPS] for kind in (True, False))
    return [one for one in results if (one.problem is None, one.epoch, one.step) in (*came, *failed)]


def _result(job: str, snapshot: Snapshot, pieces: tuple[StoredPiece, ...], problem: str | None) -> Uploaded:
    return Uploaded(
        job=job,
        step=snapshot.step,
        epoch=epoch_of(snapshot.name),
        name=snapshot.name,
        rows=stored_rows(pieces),
        problem=problem,
    )
