"""What the processes of a script say to the supervisor of their job, and ask of it: starts of workers, reports, where
workers may be, and what a failure of theirs was. Owns the steps that reports become.

Every method may be called by any thread, and called again where an answer was lost: what is known already changes
nothing. They answer None to whom the job has gone on without.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal_planner.cluster import ClusterSnapshot, snapshot_to_mapping
from shoal_planner.script_spec import ScriptSpec
from shoal_recovery.decide_script import leaves, may_grow, usable
from shoal_recovery.evidence import names
from shoal_recovery.journal import AT_REST, JobState, NodeStays, RecoveryDone
from shoal_recovery.journal_scripts import (
    CheckpointReported,
    ScriptFailed,
    ScriptReported,
    TrainerAdjusted,
    WorkersStarted,
)
from shoal_recovery.script_errors import in_short
from shoal_workers.nodes import Cluster
from shoal_workers.script_places import ScriptPlaces
from shoal_workers.script_record import ScriptRecord
from shoal_workers.script_words import loss_of

Answer = dict[str, Any] | None
_LOOK_S = 0.1
_ALIVE_S = 30.0  # after a loss, in which what its workers had reported before may still come
_JUDGE_S = 3.0  # after a failure of workers, before it counts as theirs: a loss is noticed long before


@dataclass(slots=True, kw_only=True)
class _Change:
    """Of workers, under way."""

    cause: str
    reason: str
    since_s: float
    lost: frozenset[str]
    detect_s: float


class ScriptReports:
    """`lost` are nodes of the workers that started last, or of the script, that are gone."""

    def __init__(
        self,
        job: str,
        spec: ScriptSpec,
        cluster: Cluster,
        record: ScriptRecord,
        places: ScriptPlaces,
        lock: threading.RLock,
        clock: Callable[[], float],
        silence_s: float,
    ) -> None:
        """Who was silent for `silence_s` may be lost."""
        self._job, self._spec, self._cluster = job, spec, cluster
        self._record, self._places, self._lock, self._clock = record, places, lock, clock
        self._silence_s = silence_s
        self._change: _Change | None = None
        self._said: list[tuple[int, str, str, str]] = []
        self._why: str | None = None
        self._last_s = clock()
        self._offered: frozenset[str] = frozenset()
        self.lost: set[str] = set()

    # --- to the supervisor's loop, which holds the lock ---

    @property
    def waits_for_workers(self) -> bool:
        """They were lost, and have not started again."""
        return self._change is not None and bool(self._record.begun_at)

    def nodes(self) -> frozenset[str]:
        """That workers are on, or, as long as they are only being started, may be on."""
        workers = self._record.workers
        training = frozenset() if workers is None else frozenset(workers.nodes)
        return training | self._offered if self._change is not None or workers is None else training

    def begin(self) -> None:
        """The script is started: nothing of it is anywhere yet."""
        self.lost.clear()
        self._offered = frozenset()

    def lose(self, nodes: frozenset[str], reason: str, detect_s: float) -> None:
        """Noticed after so long."""
        now_s = self._clock()
        self.lost |= nodes
        before = self._change
        since_s = now_s if before is None else before.since_s
        lost = nodes if before is None else nodes | before.lost
        self._change = _Change(cause="node_lost", reason=reason, since_s=since_s, lost=lost, detect_s=detect_s)

    def failed(self, told: dict[str, str] | None, node: str) -> None:
        """The script ended with this: written down, unless a worker's failure was, of which it is the echo."""
        if told is not None and told["traceback"] and self._why is None:
            self._fail(None, node, told["traceback"])

    def why_failed(self) -> str | None:
        return self._why

    # --- to the script's processes ---

    def trainer_adjusted(self, attempt: int, trainer: int, settings: dict[str, str]) -> Answer:
        with self._lock:
            if not self._counts(attempt):
                return None
            event = TrainerAdjusted(attempt=attempt, trainer=trainer, settings=settings)
            self._record.append(event)
            return {}

    def places(self, attempt: int) -> Answer:
        """By incarnation: how many workers may be where (`slots`), which they are to leave, and in how many seconds;
        and whether more of them may be taken in."""
        with self._lock:
            if not self._counts(attempt):
                return None
            record, all_places, least = self._record, self._places.all(), self._spec.workers.min
            workers = frozenset() if record.workers is None else frozenset(record.workers.nodes)
            going, left_s = leaves(all_places, workers, least), self._places.leaving_s()
            self._stay((workers & left_s.keys()) - going)
            free = usable(all_places, least)
            self._offered = frozenset(free)
            return {
                "slots": self._by_incarnation(free),
                "leaving": self._by_incarnation({node: left_s[node] for node in going & left_s.keys()}),
                "grow": may_grow(record.step, record.stored_step),
            }

    def workers_started(
        self, attempt: int, trainer: int, nodes: list[str], checkpoint: str | None, metrics: dict[str, Any]
    ) -> Answer:
        """One worker on each of these nodes, by rank; they may begin with `checkpoint`, reported with `metrics`."""
        with self._lock:
            if not self._counts(attempt):
                return None
            record = self._record
            if checkpoint is not None and checkpoint not in record.stored:
                # It was stored, and whoever was to tell of it was lost just then: it is of the step after the newest.
                self._append_report(record.step + 1, metrics, checkpoint, 0)
            step = self._step_of(trainer, checkpoint)
            before, had = record.step, record.workers
            names_of = tuple(self._places.name(node) for node in nodes)
            snapshot = ClusterSnapshot(nodes=tuple(s.node for s in self._places.nodes() if s.node.id in names_of))
            event = WorkersStarted(
                epoch=self._cluster.claim_epoch(self._job, record.last_epoch + 1),
                trainer=trainer,
                step=step,
                nodes=names_of,
                checkpoint=checkpoint,
                snapshot=snapshot_to_mapping(snapshot),
            )
            record.append(event)
            self._changed(event, before, had)
            self.lost.clear()
            self._said, self._why, self._last_s = [], None, self._clock()
            where = names(frozenset(names_of))
            reason = f"{len(nodes)} workers train on {where}, from step {step} on."
            if record.state is JobState.RUNNING:
                record.say("training", reason)
            else:
                record.enter(JobState.RUNNING, "training", reason)
            return {"epoch": event.epoch}

    def reported(
        self, attempt: int, epoch: int, count: int, metrics: dict[str, Any], checkpoint: str | None, num_bytes: int
    ) -> Answer:
        """The `count`th report since the workers of this epoch started."""
        with self._lock:
            workers = self._record.workers
            if not self._counts(attempt) or workers is None or workers.epoch != epoch:
                return None
            step = workers.step + count
            if step > self._record.step:
                self._append_report(step, metrics, checkpoint, num_bytes)
                self._show_life()
            return {}

    def workers_failed(self, attempt: int, epoch: int, errors: list[tuple[int, str, str, str]]) -> Answer:
        """Each with rank, incarnation of its node, kind (raised or died), and text. What it was `judge` tells."""
        with self._lock:
            if not self._counts(attempt):
                return None
            self._said = [(rank, self._places.name(node), kind, text) for rank, node, kind, text in errors]
            return {}

    def judge(self, attempt: int) -> Answer:
        """Whether workers failed because a node of theirs was `lost`. Waits until that would have been noticed."""
        deadline_s = time.monotonic() + _JUDGE_S
        while True:
            with self._lock:
                if not self._counts(attempt):
                    return None
                if self.lost:
                    return {"lost": True}
                if time.monotonic() > deadline_s and not self._doubtful():
                    self._blame()
                    return {"lost": False}
            time.sleep(_LOOK_S)

    # --- how ---

    def _show_life(self) -> None:
        """All workers take part in a report. Where it comes long after a node of theirs was lost, they were not: its
        agent alone was."""
        change = self._change
        if change is not None and self._record.workers is not None and self._clock() - change.since_s > _ALIVE_S:
            self._change = None
            self.lost.clear()
            reason = f"The workers go on, although {names(change.lost)} did not answer."
            self._record.enter(JobState.RUNNING, "training", reason)

    def _counts(self, attempt: int) -> bool:
        return attempt == self._record.attempt and self._record.state not in AT_REST

    def _by_incarnation(self, figures: dict[str, Any]) -> dict[str, Any]:
        found = {self._places.incarnation(node): figure for node, figure in figures.items()}
        return {node: figure for node, figure in found.items() if node is not None}

    def _stay(self, nodes: frozenset[str]) -> None:
        for node in sorted(nodes - self._record.staying):
            reason = f"fewer than {self._spec.workers.min} workers (workers.min) fit without it"
            self._record.append(NodeStays(node=node, reason=reason))

    def _step_of(self, trainer: int, checkpoint: str | None) -> int:
        """That workers begin after. A trainer of which nothing was stored begins where it began, and one that follows
        another where that one ended."""
        if checkpoint is not None:
            return self._record.stored[checkpoint]
        return self._record.begun_at.get(trainer, self._record.step)

    def _append_report(self, step: int, metrics: dict[str, Any], checkpoint: str | None, num_bytes: int) -> None:
        record, now_s = self._record, self._clock()
        loss = loss_of(metrics, self._spec.metric)
        took_s, self._last_s = now_s - self._last_s, now_s
        event = ScriptReported(epoch=record.last_epoch, step=step, metrics=metrics, loss=loss, duration_s=took_s)
        record.append(event)
        if checkpoint is not None:
            stored = CheckpointReported(epoch=record.last_epoch, step=step, uri=checkpoint, num_bytes=num_bytes)
            record.append(stored)

    def _changed(self, now: WorkersStarted, before: int, had: WorkersStarted | None) -> None:
        """The end of a change of workers, whatever it was for."""
        change, self._change = self._change, None
        drained = frozenset() if had is None else frozenset(had.nodes) & self._places.leaving_s().keys()
        drained -= frozenset(now.nodes)
        if change is None and had is None:
            return
        cause, reason = _cause(had, now, drained) if change is None else (change.cause, change.reason)
        at_s = self._clock()
        since_s = self._last_s if change is None else change.since_s  # nothing was done since the newest report
        joined = frozenset(now.nodes) - (frozenset() if had is None else frozenset(had.nodes))
        self._record.append(
            RecoveryDone(
                epoch=now.epoch,
                cause=cause,
                reason=reason,
                step=now.step,
                redone_steps=max(0, before - now.step),
                lost_steps=0,
                detect_s=0.0 if change is None else change.detect_s,
                decide_s=0.0,
                restore_s=0.0,
                rebuild_s=at_s - since_s,
                total_s=at_s - since_s + (0.0 if change is None else change.detect_s),
                num_bytes={},
                nodes_lost=tuple(sorted(frozenset() if change is None else change.lost)),
                nodes_joined=tuple(sorted(joined)),
                nodes_drained=tuple(sorted(drained)),
            )
        )

    def _doubtful(self) -> bool:
        """Whether a node of the workers may be lost and is not yet known to be."""
        return self._places.quiet(self.nodes(), self._silence_s)

    def _blame(self) -> None:
        """The workers' own failure is written down, that of the lowest rank that raised anything first."""
        for rank, node, _, text in sorted(self._said, key=lambda said: (said[2] != "raised", said[0]))[:1]:
            self._fail(rank, node, text)

    def _fail(self, rank: int | None, node: str, text: str) -> None:
        who = "The script" if rank is None else f"Worker {rank} on {node}"
        self._why = f"{who} failed: {in_short(text)}"
        event = ScriptFailed(attempt=self._record.attempt, rank=rank, node=node, problem=in_short(text), traceback=text)
        self._record.append(event)


def _cause(had: WorkersStarted | None, now: WorkersStarted, drained: frozenset[str]) -> tuple[str, str]:
    if drained:
        return "preemption_notice", f"Workers have left {names(drained)}, which is to go away."
    if had is not None and len(now.nodes) > len(had.nodes):
        return "node_joined", f"There is room for {len(now.nodes)} workers instead of {len(had.nodes)}."
    return "workers_failed", "Workers that failed were started again, as the script asks for (max_failures)."
