"""Turns uploaded snapshots into checkpoints: when all of a safe step are in the store, its manifest is written.

Only safe steps: recovery may go back behind a step that is merely done, and a manifest stands for ever.

Owns which uploads have come, the writing of manifests (in a thread of its own, so that a slow store holds up nothing),
and what the job says of its store: once that it fails, once that it works again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import structlog

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_recovery import checkpoints, tenure
from shoal_recovery.errors import ManifestUnreadable, StoreConflict, StoreError, StoreUnreachable
from shoal_recovery.hf_beside import files_beside, is_kept, keep_beside
from shoal_recovery.journal import CheckpointCommitted, CheckpointFailed, StoreFailed, StoreRecovered
from shoal_recovery.lineage import counts
from shoal_recovery.state import Manifest
from shoal_recovery.store import Store, open_store
from shoal_recovery.tenure import Life
from shoal_workers import messages as m
from shoal_workers.data_marks import DataMarks
from shoal_workers.rows import stored_from_rows
from shoal_workers.store_check import patiently
from shoal_workers.tokenizing import end_token_of

log = structlog.get_logger()

_MANIFEST_VERSION = 1

_LAST_CLEAN_UP_S = 10.0
_TAKE_OVER_WAIT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0

Result = CheckpointCommitted | CheckpointFailed | StoreFailed | StoreRecovered


class CheckpointCommits:
    """`marks` go into manifests. `life` is that of the cluster that has the job. Where another one has taken it over
    (`lost_to`), nothing is written any more."""

    def __init__(self, job: str, spec: JobSpec, life: Life, done: Callable[[Result], None]) -> None:
        self.lost_to: Life | None = None
        self.marks = DataMarks()
        self._life = life
        self._takes_over = False
        self._job = job
        self._spec = spec
        self._done = done
        self._expected: dict[int, frozenset[str]] = {}
        self._starts: dict[int, int] = {}
        self._came: defaultdict[tuple[int, int], dict[str, m.Uploaded]] = defaultdict(dict)
        self._first_s: dict[tuple[int, int], float] = {}
        self._queued: set[tuple[int, int]] = set()
        self._arrived: set[tuple[int, int, str]] = set()
        self.num_arrived = 0  # snapshots that came to the store since this began, each counted once
        self._settled: set[int] = set()
        self._swept: set[int] = set()  # epochs after whose beginning orphans were looked for
        self._safe_step = 0
        self._kept_beside = False
        self._closed = threading.Event()
        self._health = threading.Lock()
        self._failing_step: int | None = None  # the newest that waits for a store that fails
        self._failing_since_s = 0.0
        self._tasks: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def take_over(self) -> None:
        """Another life of a cluster had the job before; its time is over. Said in the store at once, if that answers,
        and else before anything is written."""
        self._takes_over = True
        uri = self._spec.checkpoint.uri
        if uri is not None:
            try:
                patiently(uri, lambda: self._holds(open_store(uri)), _TAKE_OVER_WAIT_S)
            except (StoreError, InvalidField) as error:
                log.warning("not said yet that the job was taken over", job=self._job, error=str(error))

    def settled(self, step: int) -> bool:
        """Whether the checkpoint of this step is committed, or has failed for good."""
        return step in self._settled

    def adopt(self, steps: set[int], failed: StoreFailed | None) -> None:
        """Steps that an earlier supervisor committed, and what it said last of a store that still fails."""
        self._settled |= steps
        if failed is not None:
            self._failing_step, self._failing_since_s = failed.step, time.monotonic()

    def fails(self, step: int, problem: str) -> None:
        """The store does not take this step, at present. Any thread."""
        with self._health:
            first = self._failing_step is None
            if first:
                self._failing_since_s = time.monotonic()
            self._failing_step = max(step, self._failing_step or 0)
        if first:
            self._done(StoreFailed(uri=str(self._spec.checkpoint.uri), step=step, problem=problem))

    def _works(self, step: int) -> None:
        with self._health:
            if self._failing_step is None or step < self._failing_step:
                return
            self._failing_step = None
            failed_s = time.monotonic() - self._failing_since_s
        self._done(StoreRecovered(uri=str(self._spec.checkpoint.uri), step=step, duration_s=failed_s))

    def begins(self, epoch: int, start: int) -> None:
        """This epoch does the steps behind `start`: of older ones nothing of them must be stored any more, and what
        became of them does not matter."""
        self._starts[epoch] = start
        for step in [step for step in self._settled.copy() if step > start]:
            self._settled.discard(step)

    def never_began(self, epoch: int) -> None:
        """What was said of this epoch is taken back."""
        del self._starts[epoch]

    def expect(self, epoch: int, start: int, names: frozenset[str]) -> None:
        """The ranks of `epoch`, which began at step `start`, upload snapshots of these names."""
        self._expected[epoch] = names
        self._starts[epoch] = start
        for key in [key for key in self._came if key[0] == epoch]:
            self._consider(key)

    def try_again(self, epoch: int, step: int) -> None:
        """This step is about to be uploaded once more; what became of it before does not matter."""
        key = (epoch, step)
        if key in self._queued and step not in self._settled:
            return  # all of it is there, and its manifest is being written
        self._queued.discard(key)
        self._came.pop(key, None)
        self._first_s.pop(key, None)
        self._settled.discard(step)

    def safe(self, step: int) -> None:
        """Steps up to this one will never be done again."""
        self._safe_step = max(self._safe_step, step)
        for key in list(self._came):
            self._consider(key)

    def uploaded(self, upload: m.Uploaded) -> None:
        key = (upload.epoch, upload.step)
        if upload.step in self._settled:
            return  # told again to whoever supervises now, or too late
        self._forget_older()
        if not upload.problem and (*key, upload.name) not in self._arrived:  # what is brought again is no progress
            self._arrived.add((*key, upload.name))
            self.num_arrived += 1
        self._first_s.setdefault(key, time.monotonic())
        self._came[key][upload.name] = upload
        self._consider(key)

    def close(self, *, over: bool = False) -> None:
        """`over`: nobody uploads any more, so what no manifest names is removed; waits for that, within reason."""
        self._over = over and self._spec.checkpoint.uri is not None
        self._closed.set()
        self._tasks.put(None)
        if self._over:
            self._thread.join(_LAST_CLEAN_UP_S)

    def _consider(self, key: tuple[int, int]) -> None:
        expected = self._expected.get(key[0])
        if expected is None or key[1] in self._settled or key[1] > self._safe_step:
            return
        if not counts(*key, self._starts):
            return  # done again by a later epoch: its snapshots are the ones that count
        if expected <= self._came[key].keys() and key not in self._queued:
            self._queued.add(key)
            self._tasks.put(key)

    def _forget_older(self) -> None:
        """What came of steps that are settled: a manifest of a large model takes megabytes, and there are thousands."""
        newest = max(self._settled, default=0)
        for key in [key for key in self._came if key[1] in self._settled and key[1] < newest]:
            del self._came[key]
            self._first_s.pop(key, None)
            self._queued.discard(key)
        self._arrived = {one for one in self._arrived if one[1] >= newest}

    def _run(self) -> None:
        while (key := self._tasks.get()) is not None:
            if key[1] not in self._settled and not self._is_void(key):
                result = self._commit(key)
                if self._is_void(key) and self.lost_to is None:
                    self._take_back(key)
                    continue
                self._done(result)
                if isinstance(result, CheckpointCommitted):
                    self._works(result.step)
                self._settled.add(key[1])  # after it was said: the end of a job waits for its last step to be settled
                if self._is_void(key):  # a change of plan has begun just now
                    self._settled.discard(key[1])
                    self._take_back(key)
                if isinstance(result, CheckpointCommitted):
                    self._clean_up(result)
                else:
                    self._swept.discard(key[0])
        if self._over:
            try:
                store = open_store(str(self._spec.checkpoint.uri))
                if self._is_ours(store):
                    checkpoints.remove_orphans(store, self._job, over=True)
            except (StoreError, InvalidField) as error:
                log.warning("what was half uploaded is not removed", job=self._job, error=str(error))

    def _is_void(self, key: tuple[int, int]) -> bool:
        """Whether a change of plan has gone back behind this step, which will be done again."""
        return not counts(*key, dict(self._starts))

    def _take_back(self, key: tuple[int, int]) -> None:
        """Its manifest would stand in the way of the one that counts, and outlive older ones that do. Another cluster
        may have the job by now, for which that step counts: it may go on from there, or have stored it itself."""
        epoch, step = key
        try:
            store = open_store(str(self._spec.checkpoint.uri))
            if tenure.holder(store, self._job)[1] == self._life:
                checkpoints.take_back(store, self._job, step, epoch)
        except (StoreError, InvalidField) as error:  # whoever restores passes it over
            log.warning("manifest of a void step not removed", job=self._job, step=step, error=str(error))

    def _commit(self, key: tuple[int, int]) -> CheckpointCommitted | CheckpointFailed:
        epoch, step = key
        uri = str(self._spec.checkpoint.uri)
        uploads = [self._came[key][name] for name in sorted(self._expected[epoch])]
        problem = next((upload.problem for upload in uploads if upload.problem), None)
        pieces = tuple(piece for upload in uploads for piece in stored_from_rows(upload.rows))
        if problem is None:
            manifest = Manifest(
                version=_MANIFEST_VERSION,
                job=self._job,
                step=step,
                epoch=epoch,
                next_sample=step * self._spec.train.global_batch,
                marks=tuple(map(tuple, self.marks.at(step))),
                files=tuple(self.marks.known_files()),
                pieces=pieces,
            )
            problem = self._write(manifest, uri)
        if problem is not None:
            return CheckpointFailed(step=step, uri=uri, problem=problem)
        return CheckpointCommitted(
            step=step,
            epoch=epoch,
            uri=uri,
            num_bytes=sum(piece.num_bytes for piece in pieces),
            duration_s=time.monotonic() - self._first_s[key],
        )

    def _write(self, manifest: Manifest, uri: str) -> str | None:
        """Tries until it is there, as reading it back shows, or cannot be, or the next one waits."""
        pause_s, made_way = _FIRST_PAUSE_S, False
        while True:
            try:
                store = open_store(uri)
                if not self._holds(store):
                    return f"another cluster has taken the job over: {self.lost_to}"
                self._keep_beside(store)
                with contextlib.suppress(StoreConflict):  # an earlier supervisor wrote it just before it died
                    checkpoints.commit(store, manifest, self._spec.model)
                there = self._standing(store, manifest.step)
                if there is None and made_way:
                    return "what was written as its manifest cannot be read"
                if there is None:
                    checkpoints.remove_unreadable(store, self._job, manifest.step)
                elif counts(there.epoch, there.step, dict(self._starts)):
                    return None
                elif made_way or not self._is_behind(there, manifest.epoch):
                    return f"epoch {there.epoch} has stored this step, and is no part of the history any more"
                else:
                    checkpoints.take_back(store, self._job, there.step, there.epoch)
                made_way = True
            except StoreUnreachable as error:
                self.fails(manifest.step, str(error))
                if not self._tasks.empty() or self._closed.wait(pause_s):
                    return str(error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except (StoreError, InvalidField) as error:
                return str(error)

    def _standing(self, store: Store, step: int) -> Manifest | None:
        """The manifest of this step; None where it cannot be read. Raises StoreError."""
        try:
            return checkpoints.load_manifest(store, self._job, step)
        except ManifestUnreadable as error:
            log.warning("manifest cannot be read", job=self._job, step=step, problem=error.problem)
            return None

    def _is_behind(self, manifest: Manifest, epoch: int) -> bool:
        """Whether it is one of an older epoch, behind which a change of plan has gone back because it was spoilt: it
        stands in the way of the one that counts, and would be taken for the newest."""
        return manifest.epoch < epoch and not counts(manifest.epoch, manifest.step, dict(self._starts))

    def _remove_void(self, store: Store, done: CheckpointCommitted) -> None:
        """And what cannot be read of steps behind the one that is done: it would count among the newest, which are
        kept. Raises StoreError."""
        for step in checkpoints.list_manifests(store, self._job):
            manifest = self._standing(store, step)
            if manifest is None and step > done.step:
                checkpoints.remove_unreadable(store, self._job, step)
            elif manifest is not None and self._is_behind(manifest, done.epoch):
                checkpoints.take_back(store, self._job, step, manifest.epoch)

    def _keep_beside(self, store: Store) -> None:
        """What an export needs besides, before the first manifest. State counts more: where it cannot be read now, the
        next checkpoint tries again. Raises StoreError of this store alone."""
        if self._kept_beside or is_kept(store, self._job):
            self._kept_beside = True
            return
        try:
            files = files_beside(self._spec, end_token_of(self._spec))
        except (StoreError, InvalidField, OSError) as error:
            log.warning("an export would lack tokenizer and ids", job=self._job, error=str(error))
            return
        keep_beside(store, self._job, files)
        self._kept_beside = True

    def _holds(self, store: Store) -> bool:
        """Whether the job is this life's; where it is nobody's yet, it is from now on. Raises StoreError."""
        _, holder = tenure.holder(store, self._job)
        if holder is None or self._takes_over:
            tenure.claim(store, self._job, self._life)
            _, holder = tenure.holder(store, self._job)  # a later claim may have been quicker
        self._takes_over = False
        if holder is not None and holder != self._life:
            log.warning("job taken over", job=self._job, cluster=holder.cluster)
            self.lost_to = holder
            return False
        return True

    def _is_ours(self, store: Store) -> bool:
        """Or what looks left over may be what another cluster stores. Raises StoreError."""
        return self.lost_to is None and tenure.holder(store, self._job)[1] in (None, self._life)

    def _clean_up(self, done: CheckpointCommitted) -> None:
        """Removes what is past keeping; and, once an epoch, what the end of an earlier one left half uploaded."""
        try:
            store = open_store(done.uri)
            if not self._is_ours(store):
                return
            if done.epoch not in self._swept:
                self._remove_void(store, done)
            checkpoints.retire(store, self._job, self._spec.checkpoint.keep)
            if done.epoch not in self._swept:
                checkpoints.remove_orphans(store, self._job)
                self._swept.add(done.epoch)
        except StoreError as error:  # the step is stored all the same; the next one cleans up
            log.warning("old checkpoints not removed", job=self._job, error=str(error))
