"""Brings snapshots into the object store, in the background: a step never waits for more than a copy to local disk.

Owns the copy on disk, the uploading thread and the reports about it. What makes a step whole in the store (the
manifest) is the supervisor's business.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from shoal_planner.errors import InvalidField
from shoal_recovery.checkpoints import put_shard
from shoal_recovery.errors import StoreError
from shoal_recovery.state import Snapshot, StoredPiece
from shoal_recovery.store import Store
from shoal_workers.messages import Uploaded
from shoal_workers.rows import stored_rows
from shoal_workers.shards import epoch_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    job: str
    snapshot: Snapshot
    uri: str
    path: Path


class Uploads:
    def __init__(self, folder: Path, open_store: Callable[[str], Store]) -> None:
        self._folder = folder
        self._open_store = open_store
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._done: defaultdict[str, list[Uploaded]] = defaultdict(list)
        self._watchers: defaultdict[str, list[queue.SimpleQueue[Uploaded]]] = defaultdict(list)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._run, name="uploads", daemon=True).start()

    def add(self, job: str, snapshot: Snapshot, uri: str, content: memoryview) -> None:
        """Returns as soon as `content` may be overwritten. A full disk costs this checkpoint, never the step."""
        # Numbered: a snapshot may be asked for again while it is still on its way.
        path = self._folder / f"{job}-{snapshot.name}-{snapshot.step}.{next(self._numbers)}"
        task = _Task(job=job, snapshot=snapshot, uri=uri, path=path)
        try:
            path.write_bytes(content)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._tell(_result(task, (), f"no copy on the node's disk: {error}"))
        else:
            self._tasks.put(task)

    def watch(self, job: str) -> queue.SimpleQueue[Uploaded]:
        """A queue of all results of this job, earlier ones first: a supervisor that comes late misses none."""
        events: queue.SimpleQueue[Uploaded] = queue.SimpleQueue()
        with self._lock:
            for done in self._done[job]:
                events.put(done)
            self._watchers[job].append(events)
        return events

    def unwatch(self, job: str, events: queue.SimpleQueue[Uploaded]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._watchers[job].remove(events)

    def forget(self, job: str) -> None:
        with self._lock:
            self._done.pop(job, None)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            result = self._bring(task)
            task.path.unlink(missing_ok=True)
            self._tell(result)

    def _tell(self, result: Uploaded) -> None:
        with self._lock:
            self._done[result.job].append(result)
            for events in self._watchers[result.job]:
                events.put(result)

    def _bring(self, task: _Task) -> Uploaded:
        step = task.snapshot.step
        try:
            pieces = put_shard(
                self._open_store(task.uri),
                job=task.job,
                step=step,
                epoch=epoch_of(task.snapshot.name),
                shard=task.snapshot.name,
                data=task.path.read_bytes(),
                pieces=task.snapshot.pieces,
            )
        except (StoreError, InvalidField, OSError) as error:
            # Training goes on without this checkpoint; the supervisor tells the user.
            log.warning("upload failed", job=task.job, step=step, error=str(error))
            return _result(task, (), str(error))
        return _result(task, pieces, None)


def _result(task: _Task, pieces: tuple[StoredPiece, ...], problem: str | None) -> Uploaded:
    return Uploaded(
        job=task.job,
        step=task.snapshot.step,
        epoch=epoch_of(task.snapshot.name),
        name=task.snapshot.name,
        rows=stored_rows(pieces),
        problem=problem,
    )
