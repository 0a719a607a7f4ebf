"""Brings snapshots into the object store, in the background: a step never waits for more than a copy to local disk.

Owns the copies on disk, a thread for each job that has some, and the reports about it. While the store cannot be used,
or is slow, a few copies wait; what an agent that died has left is brought by the next one of its node, once somebody
watches the job. What makes a step whole in the store (the manifest) is the supervisor's business.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from shoal_planner.errors import InvalidField
from shoal_recovery.checkpoints import put_shard, shard_header
from shoal_recovery.errors import StoreError, StoreUnreachable
from shoal_recovery.state import Snapshot, StoredPiece
from shoal_recovery.store import Store
from shoal_workers.messages import UploadDelayed, Uploaded
from shoal_workers.rows import snapshot_rows, snapshots_from_rows, stored_rows
from shoal_workers.shards import epoch_of

log = structlog.get_logger()

_KEPT_STEPS = 4  # of a job, on disk at once
_SLOW_AFTER_S = 10.0  # when the next comes meanwhile
_FORGOTTEN_AFTER_S = 24 * 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_LOOK_S = 0.5  # whether it may write again
_TASK = ".task"

Report = Uploaded | UploadDelayed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """The offsets of `snapshot` are those within the file at `path`."""

    job: str
    snapshot: Snapshot
    uri: str
    path: Path
    since_s: float


class Uploads:
    """While `may_write` says no, nothing is begun: somebody else may be about to do these steps again."""

    def __init__(
        self,
        folder: Path,
        open_store: Callable[[str], Store],
        may_write: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._open_store = open_store
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
        self._watchers: defaultdict[str, list[queue.SimpleQueue[Report]]] = defaultdict(list)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._left = _left_behind(self._folder, self._clock())

    def add(self, job: str, snapshot: Snapshot, uri: str, content: memoryview) -> None:
        """Returns as soon as `content` may be overwritten. A full disk costs this checkpoint, never the step."""
        header = shard_header(snapshot.pieces)
        shifted = tuple(replace(piece, offset=piece.offset + len(header)) for piece in snapshot.pieces)
        # Numbered: a snapshot may be asked for again while it is still on its way.
        path = self._folder / f"{job}-{snapshot.name}-{snapshot.step}.{next(self._numbers)}"
        task = _Task(job=job, snapshot=replace(snapshot, pieces=shifted), uri=uri, path=path, since_s=self._clock())
        try:
            with path.open("wb") as file:
                file.write(header)
                file.write(content[: sum(piece.num_bytes for piece in snapshot.pieces)])
            _write_task(task)
        except OSError as error:
            _remove(task)
            self._tell(_result(task, (), f"no copy on the node's disk: {error}"))
            return
        with self._changed:
            self._tasks.append(task)
            self._set_to_work(job)
            pending = self._steps(job)
            oldest_s = self._clock() - min(one.since_s for one in self._tasks if one.job == job)
            if len(pending) > 1 and oldest_s > _SLOW_AFTER_S:
                self._delay(job, f"step {pending[0]} is still on its way after {oldest_s:.0f} s")
            given_up = self._cut_down(job, pending)
        for one in given_up:
            _remove(one)
            self._tell(_result(one, (), "given up for other steps: the store does not take them as fast as they come"))

    def _steps(self, job: str) -> list[int]:
        return sorted({task.snapshot.step for task in self._tasks if task.job == job})

    def _cut_down(self, job: str, pending: list[int]) -> list[_Task]:
        """Never the first step, which may be half there, nor the newest; of the others the one with the fewest factors
        of two: so nodes that are slow in different ways still keep the same steps, and some become whole."""
        if len(pending) <= _KEPT_STEPS:
            return []
        step = min(pending[1:-1], key=lambda step: (step & -step, step))
        given_up = [task for task in self._tasks if task.job == job and task.snapshot.step == step]
        self._tasks = [task for task in self._tasks if task not in given_up]
        return given_up

    def watch(self, job: str) -> queue.SimpleQueue[Report]:
        """A queue of all results of this job, earlier ones first: a supervisor that comes late misses none."""
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
            over = [task for task in self._tasks + self._left if task.job == job]
            self._tasks = [task for task in self._tasks if task not in over]
            self._left = [task for task in self._left if task not in over]
            self._changed.notify_all()
        for task in over:
            _remove(task)

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
                task = next((task for task in self._tasks if task.job == job), None)
                if task is None:
                    self._at_work.discard(job)
                    return
            result = self._bring(task)
            with self._changed:
                if self._closed:
                    return
                wanted = task in self._tasks
                self._tasks = [one for one in self._tasks if one is not task]
            _remove(task)
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
                return _result(task, self._put(task), None)
            except StoreUnreachable as error:
                with self._changed:
                    self._delay(task.job, str(error))
                    if self._changed.wait_for(lambda: task not in self._tasks, pause_s):
                        return None
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except (StoreError, InvalidField, OSError, ValueError) as error:
                # Training goes on without this checkpoint; the supervisor tells the user.
                log.warning("upload failed", job=task.job, step=task.snapshot.step, error=str(error))
                return _result(task, (), str(error))

    def _put(self, task: _Task) -> tuple[StoredPiece, ...]:
        with task.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # goes with the last view of it
        return put_shard(
            self._open_store(task.uri),
            job=task.job,
            step=task.snapshot.step,
            epoch=epoch_of(task.snapshot.name),
            shard=task.snapshot.name,
            data=memoryview(content),
            pieces=task.snapshot.pieces,
        )

    def _tell(self, result: Uploaded) -> None:
        with self._changed:
            self._done[result.job].append(result)
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


def _result(task: _Task, pieces: tuple[StoredPiece, ...], problem: str | None) -> Uploaded:
    return Uploaded(
        job=task.job,
        step=task.snapshot.step,
        epoch=epoch_of(task.snapshot.name),
        name=task.snapshot.name,
        rows=stored_rows(pieces),
        problem=problem,
    )


# --- on disk: the content first, then what it is; without the latter it is not whole ---


def _write_task(task: _Task) -> None:
    said = {"job": task.job, "uri": task.uri, "snapshot": snapshot_rows((task.snapshot,))[0]}
    unfinished = task.path.with_name(f"{task.path.name}.unfinished")
    unfinished.write_text(json.dumps(said))
    unfinished.rename(task.path.with_name(task.path.name + _TASK))


def _remove(task: _Task) -> None:
    for path in (task.path, task.path.with_name(task.path.name + _TASK)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _left_behind(folder: Path, now_s: float) -> list[_Task]:
    """What an agent before this one has not brought to the end, the oldest first. Removes what is not whole."""
    tasks = []
    for said in folder.glob(f"*{_TASK}"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if said.stat().st_mtime > time.time() - _FORGOTTEN_AFTER_S:
                tasks.append(_read_task(said, now_s))
    whole = {path for task in tasks for path in (task.path, task.path.with_name(task.path.name + _TASK))}
    for path in folder.iterdir():
        if path not in whole:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(tasks, key=lambda task: task.snapshot.step)


def _read_task(path: Path, now_s: float) -> _Task:
    said: dict[str, Any] = json.loads(path.read_text())
    (snapshot,) = snapshots_from_rows([said["snapshot"]])
    content = path.with_name(path.name.removesuffix(_TASK))
    content.stat()
    return _Task(job=said["job"], snapshot=snapshot, uri=said["uri"], path=content, since_s=now_s)
