"""What a tracker is told next: the steps of a job whose figures will not change any more, and what belongs to them.

Owns which steps these are and how figures are called. The newest done step is held back while the job goes on, for a
recovery may do it once more; the one before it is safe. Where safe steps were done again all the same (more nodes lost
than there were copies), what was written counts no more, and all of it is to be written anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import EvaluationDone, JobState, RecoveryDone
from shoal_service import jobs, journal
from shoal_service.curve import evaluation, point
from shoal_service.models import JobRow, JournalRow, StepRow

MOST_STEPS = 500  # in one batch
_OF_STEPS = ("loss", "grad_norm", "lr", "tokens_per_s", "duration_s")
_OF_EVALUATIONS = ("loss", "perplexity", "duration_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """All steps up to `step`, which is entry `step_seq` of the journal, and all else up to entry `seq`."""

    step: int = 0
    step_seq: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """Figures by their names in trackers (`train/loss`), of `step`; `at_s` is wall time."""

    step: int
    at_s: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Recovery `number` (the first is 1): ranks stepped on from `step`."""

    step: int
    at_s: float
    number: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job has ended after `step`; `state` is that of JobState."""

    step: int
    state: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """In the order of steps. With an `end` nothing comes after it."""

    steps: tuple[Scalars, ...] = ()
    evaluations: tuple[Scalars, ...] = ()
    notes: tuple[Note, ...] = ()
    end: End | None = None

    def __bool__(self) -> bool:
        return bool(self.steps or self.evaluations or self.notes or self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What comes after a cursor, and the cursor after that. `rewritten`: steps before it do not count any more.
    `more`: there is more already."""

    batch: Batch
    cursor: Cursor
    rewritten: bool = False
    more: bool = False


def last_settled(job: JobRow) -> int:
    """The newest step whose figures stay as they are."""
    at_rest = jobs.ended(job) or job.state == JobState.PAUSED
    return job.step if at_rest else max(0, job.step - 1)


async def read_feed(session: AsyncSession, job: JobRow, cursor: Cursor) -> Feed:
    """At most MOST_STEPS steps after `cursor`, and what else belongs to them."""
    # Those that count have numbers in the journal in the order of steps.
    query = select(StepRow).where(
        StepRow.job_id == job.id, StepRow.seq > cursor.step_seq, StepRow.rolled_back.is_(False)
    )
    found = (await session.scalars(query.order_by(StepRow.seq).limit(MOST_STEPS))).all()
    if found and found[0].step <= cursor.step:
        return Feed(batch=Batch(), cursor=Cursor(), rewritten=True)
    settled = last_settled(job)
    rows = [row for row in found if row.step <= settled]
    last = rows[-1].step if rows else cursor.step
    others = await _others(session, job.id, cursor.seq)
    more = len(rows) == MOST_STEPS or len(others) == MOST_STEPS
    all_steps = jobs.ended(job) and last >= settled
    ends = all_steps and not more
    entries = _belonging(others, None if all_steps else last)
    number = await _recoveries_until(session, job.id, cursor.seq)
    batch = Batch(
        steps=tuple(scalars_of_step(row) for row in rows),
        evaluations=tuple(scalars_of_evaluation(row) for row in entries if row.kind == EvaluationDone.kind),
        notes=_notes([row for row in entries if row.kind == RecoveryDone.kind], number),
        end=End(step=last, state=job.state, reason=job.reason, at_s=job.since_at_s) if ends else None,
    )
    after = Cursor(
        step=last, step_seq=rows[-1].seq if rows else cursor.step_seq, seq=entries[-1].seq if entries else cursor.seq
    )
    return Feed(batch=batch, cursor=after, more=more and bool(batch))


async def cursor_at(session: AsyncSession, job_id: str, step: int) -> Cursor:
    """Where a tracker says itself that it has all up to `step`: what belongs to earlier steps comes again."""
    mine = (StepRow.job_id == job_id, StepRow.rolled_back.is_(False), StepRow.step == step)
    seq = await session.scalar(select(StepRow.seq).where(*mine))
    return Cursor() if seq is None else Cursor(step=step, step_seq=seq)


async def _others(session: AsyncSession, job_id: str, after: int) -> Sequence[JournalRow]:
    kinds = (EvaluationDone.kind, RecoveryDone.kind)
    return await journal.entries_after(session, job_id, after, MOST_STEPS, kinds)


def _belonging(entries: Sequence[JournalRow], last_step: int | None) -> list[JournalRow]:
    """Those before the first one of a step that is still to come; all where none is (None)."""
    found: list[JournalRow] = []
    for entry in entries:
        if last_step is not None and entry.payload["step"] > last_step:
            break
        found.append(entry)
    return found


async def _recoveries_until(session: AsyncSession, job_id: str, seq: int) -> int:
    mine = (JournalRow.job_id == job_id, JournalRow.kind == RecoveryDone.kind, JournalRow.seq <= seq)
    return await session.scalar(select(func.count()).select_from(JournalRow).where(*mine)) or 0


def _notes(entries: Sequence[JournalRow], number: int) -> tuple[Note, ...]:
    return tuple(
        Note(step=entry.payload["step"], at_s=entry.at_s, number=number + index, text=_recovery(entry.payload))
        for index, entry in enumerate(entries, start=1)
    )


def _recovery(payload: Mapping[str, Any]) -> str:
    redone = payload["redone_steps"] + payload["lost_steps"]
    again = f", {redone} done again" if redone else ""
    reason = payload["reason"].rstrip(".")
    return f"{reason}; steps again from {payload['step']} after {payload['total_s']:.2f} s{again}"


def scalars_of_step(row: StepRow) -> Scalars:
    """As `GET /v1/jobs/ID/metrics` says them; what was no number is left out."""
    values = _named("train", point(row), _OF_STEPS) | ({"train/skipped": 1.0} if row.skipped else {})
    return Scalars(step=row.step, at_s=row.at_s, values=values)


def scalars_of_evaluation(row: JournalRow) -> Scalars:
    found = evaluation(row)
    return Scalars(step=found["step"], at_s=row.at_s, values=_named("eval", found, _OF_EVALUATIONS))


def _named(group: str, found: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    return {f"{group}/{name}": float(found[name]) for name in names if found[name] is not None}


def flat(spec: Mapping[str, Any], path: str = "") -> dict[str, str | bool | int | float]:
    """A job's fields by their dotted paths, as trackers take parameters. What is not set is left out, and lists are
    JSON."""
    found: dict[str, str | bool | int | float] = {}
    for name, value in spec.items():
        at = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            found |= flat(value, at)
        elif isinstance(value, str | bool | int | float):
            found[at] = value
        elif value is not None:
            found[at] = json.dumps(value)
    return found
