"""The journals of jobs in the database: appending what supervisors send, reading it back.

Owns that nothing is lost or doubled: entries join only where the last one ended, in one transaction with the status.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, func, insert, not_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.answers import plan_of_answer
from shoal_planner.architecture import ModelSpec
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.errors import InvalidField
from shoal_planner.own_model import with_seen_model
from shoal_planner.profile import profile_from_mapping
from shoal_planner.strict import read
from shoal_recovery.journal import (
    Entry,
    Event,
    FiguresMeasured,
    JobState,
    ModelSeen,
    PlanAdopted,
    RecoveryDone,
    StateChanged,
    StepDone,
    entry_to_mapping,
)
from shoal_recovery.journal import entry_from_mapping as _entry_from_mapping
from shoal_recovery.journal_scripts import ScriptReported, WorkersStarted
from shoal_recovery.storage_access import without_access
from shoal_service import curve_levels, job_totals, jobs, outbox, shares, timeline
from shoal_service.errors import BadInput, Conflict, invalid_field
from shoal_service.known_by import Tellings
from shoal_service.loss_watch import LossWatch
from shoal_service.models import JobRow, JournalRow, StepRow
from shoal_service.outbox import Told
from shoal_service.status import Status, advance, finite, moved

_NUMBERS = {"seq": "a whole number", "at_s": "a number"}
MAX_HISTORY = 5000  # entries other than steps that pages and sums look at


def parse_entries(values: Sequence[dict[str, Any]]) -> tuple[Entry, ...]:
    """How the job's stores are reached is nobody's matter who reads its history. Raises BadInput, naming entry and
    field."""
    return tuple(_parse_entry(without_access(value), f"entries[{index}]") for index, value in enumerate(values))


def _parse_entry(value: dict[str, Any], path: str) -> Entry:
    for name, kinds in (("seq", int), ("at_s", int | float)):
        if name in value and (not isinstance(value[name], kinds) or isinstance(value[name], bool)):
            raise invalid_field(InvalidField(f"{path}.{name}", value[name], f"must be {_NUMBERS[name]}"))
    try:
        entry = _entry_from_mapping(value)
        _check_documents(entry.event)
    except InvalidField as error:
        field = f"{path}.{error.field}"
        raise BadInput("invalid_field", str(InvalidField(field, error.value, error.problem)), field) from error
    except KeyError as error:
        missing = str(error.args[0])
        known = missing in ("seq", "at_s", "kind")
        field = f"{path}.{missing}" if known else f"{path}.kind"
        problem = "is required" if known else f"{missing!r} is not a kind of entry"
        raise BadInput("invalid_field", f"{field}: {problem}", field) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInput("invalid_field", f"{path}: {error}", path) from error
    if entry.seq < 1 or not math.isfinite(entry.at_s):
        raise BadInput("invalid_field", f"{path}.seq = {entry.seq}: must be at least 1, and at_s a number", path)
    return entry


def _check_documents(event: Event) -> None:
    """What others read of an entry later, and would stumble over. Raises InvalidField, and ValueError for a state that
    does not exist."""
    match event:
        case StateChanged():
            JobState(event.state)
        case PlanAdopted():
            _of_field("plan", plan_of_answer, event.plan)
            _of_field("snapshot", snapshot_from_mapping, event.snapshot)
        case WorkersStarted():
            _of_field("snapshot", snapshot_from_mapping, event.snapshot)
        case FiguresMeasured():
            _of_field("profile", profile_from_mapping, event.profile)
        case ModelSeen():
            read(ModelSpec, event.model, "model")
        case _:
            pass


def _of_field(name: str, reader: Callable[[dict[str, Any]], object], value: dict[str, Any]) -> None:
    try:
        reader(value)
    except InvalidField as error:
        raise InvalidField(f"{name}.{error.field}", error.value, error.problem) from error


async def append(session: AsyncSession, row: JobRow, entries: Sequence[Entry]) -> int:
    """Adds the entries that are new and returns the last number that is recorded.

    Known ones are skipped, so a sender may repeat itself. Raises Conflict at a gap, with the number expected next, and
    Conflict if another writer came between (the sender repeats).
    """
    fresh = [entry for entry in entries if entry.seq > row.last_seq]
    for expected, entry in enumerate(fresh, start=row.last_seq + 1):
        if entry.seq != expected:
            raise Conflict("journal_gap", f"seq = {entry.seq}: entry {expected} must come first", expected_seq=expected)
    if not fresh:
        return row.last_seq
    figures = await job_totals.add(session, row, fresh)
    status = jobs.status_of(row)
    for entry in fresh:
        status = advance(status, entry)
    if status.state is JobState.PAUSED:
        status = await _rested(session, row, status)
    if not await jobs.put_status(session, row, status):
        raise Conflict("changed_meanwhile", f"{row.id} changed meanwhile; send again", expected_seq=row.last_seq + 1)
    await shares.confirm(session, row.id, fresh)
    await session.execute(insert(JournalRow), [_journal_values(row.id, entry) for entry in fresh])
    await _add_points(session, row.id, row.step, fresh)
    await _announce_loss(session, row, figures.loss_watch, fresh)
    for entry in fresh:
        if isinstance(entry.event, RecoveryDone):
            await _announce(session, row, entry.seq, entry.event)
        if isinstance(entry.event, ModelSeen):
            seen = with_seen_model(row.spec, entry.event.model, entry.event.packages)
            await session.execute(update(JobRow).where(JobRow.id == row.id).values(spec=seen))
    return status.last_seq


@functools.cache  # to build it takes longer than to ask
def begun() -> ColumnElement[bool]:
    """Of a job: somebody has told more of it than what its model is, and that it waits elsewhere."""
    mine = (JournalRow.job_id == JobRow.id, JournalRow.kind != ModelSeen.kind, _told())
    return select(JournalRow.seq).where(*mine).exists()


async def has_begun(session: AsyncSession, job_id: str) -> bool:
    return await session.scalar(select(JobRow.id).where(JobRow.id == job_id, begun())) is not None


async def first_at_s(session: AsyncSession, job_id: str) -> float | None:
    """When somebody told of it for the first time, which is when it first had nodes; None: not yet."""
    mine = select(JournalRow.at_s).where(JournalRow.job_id == job_id, _told())
    return await session.scalar(mine.order_by(JournalRow.seq).limit(1))


@functools.cache
def _told() -> ColumnElement[bool]:
    """Of an entry: by a cluster, not by us when the job went to another queue."""
    queued = JournalRow.payload["state"].as_string() == JobState.QUEUED.value
    return not_(and_(JournalRow.kind == StateChanged.kind, queued))


async def _announce(session: AsyncSession, row: JobRow, seq: int, done: RecoveryDone) -> None:
    """Nobody need be woken because a job has grown."""
    if done.nodes_joined and not done.nodes_lost and not done.nodes_drained:
        return
    named = ("cause", "reason", "step", "redone_steps", "lost_steps", "total_s", "nodes_lost", "nodes_drained")
    more = {name: getattr(done, name) for name in named}
    await outbox.announce(session, row, Told.RECOVERED, once=str(seq), seq=seq, **more)


async def _announce_loss(session: AsyncSession, row: JobRow, watch: LossWatch, fresh: Sequence[Entry]) -> None:
    """Once for each time that it becomes odd; what is no more is nobody's matter."""
    steps = {entry.event.step for entry in fresh if isinstance(entry.event, StepDone | ScriptReported)}
    if watch.odd and watch.step in steps:
        more = {"code": watch.odd, "reason": watch.sentence, "loss": watch.loss, "usual_loss": watch.usual}
        await outbox.announce(session, row, Told.LOSS, once=str(watch.alarms), at_step=watch.step, **more)


async def _rested(session: AsyncSession, row: JobRow, status: Status) -> Status:
    """A job that rests although its user wants it to run was to make room for another one, and waits for its turn; or
    the pause was called off, but too late."""
    why = await shares.held(session, row.id)
    if row.wish == jobs.WISH_PAUSED and why is not None:
        return dataclasses.replace(status, state_code=why.code)
    if row.wish != jobs.WISH_RUN:
        return status
    await shares.give_back(session, row.id)
    if why is None:
        return jobs.resumed(status, row.cluster_id)
    await shares.hold(session, row.id, None)
    reason = f"gave its nodes away {why.words}; step {status.step} stands in its store, from where it goes on"
    return moved(status, JobState.QUEUED, why.code, reason, time.time())


def _journal_values(job_id: str, entry: Entry) -> dict[str, Any]:
    payload = {key: item for key, item in entry_to_mapping(entry).items() if key not in ("seq", "at_s", "kind")}
    return {
        "job_id": job_id,
        "seq": entry.seq,
        "at_s": entry.at_s,
        "kind": entry.event.kind,
        "payload": {key: _jsonable(item) for key, item in payload.items()},
    }


def _jsonable(value: Any) -> Any:
    # JSON has no NaN; as text it reads back as the same float.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


async def _add_points(session: AsyncSession, job_id: str, newest_step: int, entries: Sequence[Entry]) -> None:
    """Points of the curve; a step that is done again turns the older points from it on into rolled-back ones."""
    pending: list[dict[str, Any]] = []
    redone_from: int | None = None
    any_steps = False
    for entry in entries:
        event = entry.event
        if not isinstance(event, StepDone | ScriptReported):
            continue
        if event.step <= newest_step:
            redone_from = event.step if redone_from is None else min(redone_from, event.step)
            await _flush(session, pending)
            await session.execute(
                update(StepRow)
                .where(StepRow.job_id == job_id, StepRow.rolled_back.is_(False), StepRow.step >= event.step)
                .values(rolled_back=True)
            )
        newest_step, any_steps = event.step, True
        pending.append(_point_values(job_id, entry, event))
    await _flush(session, pending)
    if any_steps:
        await curve_levels.keep_up(session, job_id, redone_from=redone_from, newest_step=newest_step)
    if redone_from is not None:
        mine = (StepRow.job_id == job_id, StepRow.rolled_back.is_(False), StepRow.skipped.is_(True))
        left = select(func.count()).select_from(StepRow).where(*mine).scalar_subquery()
        await session.execute(update(JobRow).where(JobRow.id == job_id).values(skipped_steps=left))


async def _flush(session: AsyncSession, pending: list[dict[str, Any]]) -> None:
    if pending:
        await session.execute(insert(StepRow), list(pending))
        pending.clear()


def _point_values(job_id: str, entry: Entry, event: StepDone | ScriptReported) -> dict[str, Any]:
    point = {
        "job_id": job_id,
        "seq": entry.seq,
        "epoch": event.epoch,
        "step": event.step,
        "at_s": entry.at_s,
        "duration_s": event.duration_s,
        "rolled_back": False,
    }
    if isinstance(event, ScriptReported):  # what else it reports stands in the journal, under the script's own names
        return point | {
            "loss": event.loss,
            "grad_norm": None,
            "lr": None,
            "tokens": 0,
            "skipped": False,
            "stalled_s": None,
        }
    return point | {
        "loss": finite(event.loss),
        "grad_norm": finite(event.grad_norm),
        "lr": finite(event.lr),
        "tokens": event.tokens,
        "skipped": event.skipped,
        "stalled_s": None if event.stalled_s is None else min(event.stalled_s, event.duration_s),
    }


async def entries_after(
    session: AsyncSession, job_id: str, after: int, limit: int, kinds: Sequence[str] = ()
) -> Sequence[JournalRow]:
    query = select(JournalRow).where(JournalRow.job_id == job_id, JournalRow.seq > after)
    if kinds:
        query = query.where(JournalRow.kind.in_(kinds))
    return (await session.scalars(query.order_by(JournalRow.seq).limit(limit))).all()


async def newest(
    session: AsyncSession, job_id: str, limit: int, kinds: Sequence[str], after: int = 0, before: int | None = None
) -> Sequence[JournalRow]:
    """The newest entries of these kinds, newest first, of those with a number above `after` and below `before`."""
    query = select(JournalRow).where(JournalRow.job_id == job_id, JournalRow.kind.in_(kinds))
    if after:
        query = query.where(JournalRow.seq > after)
    if before is not None:
        query = query.where(JournalRow.seq < before)
    return (await session.scalars(query.order_by(JournalRow.seq.desc()).limit(limit))).all()


async def at_stake(session: AsyncSession, job_id: str) -> tuple[dict[str, Any] | None, int | None]:
    """The newest plan of a job, and its newest step in the object store."""
    plans = await newest(session, job_id, 1, (PLAN_KIND,))
    stored = await newest(session, job_id, 1, ("checkpoint_committed",))
    return (plans[0].payload if plans else None), (stored[0].payload["step"] if stored else None)


async def history(session: AsyncSession, job_id: str) -> tuple[timeline.Event, ...]:
    """What happened to a job, oldest first: its newest entries of the kinds that a timeline shows."""
    return as_told(await newest(session, job_id, MAX_HISTORY, timeline.KINDS))


def as_told(newest_first: Sequence[JournalRow]) -> tuple[timeline.Event, ...]:
    """Oldest first."""
    return tuple(
        timeline.Event(seq=row.seq, at_s=row.at_s, kind=row.kind, payload=row.payload) for row in reversed(newest_first)
    )


def event_resource(row: JournalRow) -> dict[str, Any]:
    """One entry as REST shows it."""
    return {"seq": row.seq, "at": jobs.rfc3339(row.at_s), "at_s": row.at_s, "kind": row.kind, **row.payload}


def recovery_resource(row: JournalRow, tellings: Tellings) -> dict[str, Any]:
    payload = row.payload
    event = timeline.Event(seq=row.seq, at_s=row.at_s, kind=row.kind, payload=payload)
    return {
        "seq": row.seq,
        "at": jobs.rfc3339(row.at_s),
        "at_s": row.at_s,
        "bytes": payload["num_bytes"],
        "bytes_per_s": timeline.bytes_per_s(payload),
        "known_by": [known.resource() for known in tellings.of(event)],
        **{key: value for key, value in payload.items() if key != "num_bytes"},
    }


def plan_resource(row: JournalRow) -> dict[str, Any]:
    return {"seq": row.seq, "since": jobs.rfc3339(row.at_s), "since_at_s": row.at_s, **row.payload}


def plan_nodes(plan: Mapping[str, Any]) -> set[str]:
    return {
        replica["node"]
        for pipeline in plan["pipelines"]
        for stage in pipeline["stages"]
        for replica in stage["replicas"]
    }


PLAN_KIND = PlanAdopted.kind
RECOVERY_KIND = RecoveryDone.kind
