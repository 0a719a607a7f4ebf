"""Jobs in the database: creating, finding, cancelling, and turning rows into resources. What a journal says of a job
is status.py; whether a job may be created is submission.py."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import structlog
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from shoal_planner.script_spec import AnyJob, any_job_to_mapping, kind_of
from shoal_recovery.journal import AT_REST, TERMINAL, JobState
from shoal_service import outbox, shares
from shoal_service.errors import BadInput, Conflict, NotFound
from shoal_service.job_filter import JobFilter
from shoal_service.models import JobRow
from shoal_service.outbox import Told
from shoal_service.shapes_jobs import Evaluation, Exchanges, Job
from shoal_service.status import Status, moved

log = structlog.get_logger()

_LARGEST_EXPONENT = 700.0  # a little less than what floats can carry

WISH_RUN = "run"
WISH_PAUSED = "paused"
WISH_CANCELLED = "cancelled"
_STATUS_FIELDS = tuple(field.name for field in dataclasses.fields(Status))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job that passed all checks. No `cluster_id` means that it waits for a cluster to connect. `created_by`: the
    `owner` of whoever asked."""

    project: str
    spec: AnyJob
    body_hash: str
    idempotency_key: str | None
    cluster_id: str | None
    created_by: str | None = None


def body_hash(spec: AnyJob) -> str:
    """Equal for equal jobs, however they were written (YAML or JSON, order of keys, defaults)."""
    return hashlib.sha256(json.dumps(any_job_to_mapping(spec), sort_keys=True).encode()).hexdigest()


def status_of(row: JobRow) -> Status:
    values = {name: getattr(row, name) for name in _STATUS_FIELDS}
    return Status(**{**values, "state": JobState(row.state)})


async def put_status(session: AsyncSession, row: JobRow, status: Status, **others: Any) -> bool:
    """Compare-and-set: writes `status`, and the `others` among the columns, if nobody changed the row since it was
    read. True if written."""
    values: dict[str, Any] = {name: getattr(status, name) for name in _STATUS_FIELDS} | others
    values |= {"state": status.state.value, "version": row.version + 1, "updated_at_s": time.time()}
    rests = status.state in AT_REST and row.state != status.state
    told = _TOLD.get(status.state) if rests else None
    before = row.state
    if rests or others.get("cluster_id", row.cluster_id) != row.cluster_id:
        await shares.give_back(session, row.id)
    changed = await session.execute(
        update(JobRow).where(JobRow.id == row.id, JobRow.version == row.version).values(values)
    )
    if changed.rowcount and before != status.state:  # type: ignore[attr-defined]
        named = {"job": row.id, "project": row.project_id, "epoch": status.epoch, "step": status.step}
        log.info("job changed its state", **named, before=before, state=status.state.value, code=status.state_code)
    if changed.rowcount and told is not None:  # type: ignore[attr-defined]
        await outbox.announce(
            session, row, told, once="", step=status.step, code=status.state_code, reason=status.reason
        )
    return bool(changed.rowcount)  # type: ignore[attr-defined]


_TOLD = {JobState.SUCCEEDED: Told.SUCCEEDED, JobState.FAILED: Told.FAILED}


def stored_key(project: str, key: str | None) -> str | None:
    """An Idempotency-Key as it is kept: another one in each project."""
    return None if key is None else f"{project}/{hashlib.sha256(key.encode()).hexdigest()}"


async def find_by_key(session: AsyncSession, project: str, key: str, wanted_hash: str) -> JobRow | None:
    """The job that was created under this Idempotency-Key. Raises Conflict if it was another job."""
    row = await session.scalar(select(JobRow).where(JobRow.idempotency_key == stored_key(project, key)))
    if row is not None and row.body_hash != wanted_hash:
        raise Conflict(
            "idempotency_key_reused", f"Idempotency-Key = {key!r}: was used for another job, {row.id}", job_id=row.id
        )
    return row


def create(session: AsyncSession, new: NewJob) -> JobRow:
    now = time.time()
    waits = "waits for a cluster to connect" if new.cluster_id is None else f"waits for cluster {new.cluster_id}"
    row = JobRow(
        id=f"job_{ULID()}",
        project_id=new.project,
        name=new.spec.name,
        spec=any_job_to_mapping(new.spec),
        wish=WISH_RUN,
        cluster_id=new.cluster_id,
        idempotency_key=stored_key(new.project, new.idempotency_key),
        body_hash=new.body_hash,
        saves=0,
        created_by=new.created_by,
        created_at_s=now,
        updated_at_s=now,
        version=1,
    )
    fresh = Status(
        state=JobState.QUEUED,
        state_code="no_cluster" if new.cluster_id is None else "submitted",
        reason=waits,
        since_at_s=now,
    )
    for name in _STATUS_FIELDS:
        setattr(row, name, getattr(fresh, name))
    row.state = fresh.state.value
    session.add(row)
    shares.create(session, row.id, new.spec)
    return row


async def get(session: AsyncSession, job_id: str, *, to_change: bool = False) -> JobRow:
    """`to_change` holds others up who are to change it, until the transaction ends. Raises NotFound."""
    row = await session.get(JobRow, job_id, populate_existing=True, with_for_update=to_change or None)
    if row is None:
        raise NotFound("job_not_found", f"id = {job_id!r}: there is no such job", "id")
    return row


async def of_ids(session: AsyncSession, job_ids: Sequence[str]) -> Sequence[JobRow]:
    return (await session.scalars(select(JobRow).where(JobRow.id.in_(job_ids)))).all()


async def cancel(session: AsyncSession, job_id: str) -> JobRow:
    """Writes the wish. A job that no cluster has is cancelled at once, another one when its cluster says so."""
    row = await get(session, job_id, to_change=True)
    status = status_of(row)
    if row.wish == WISH_CANCELLED and status.state in (JobState.CANCELLING, JobState.CANCELLED):
        return row
    if status.terminal:
        raise Conflict("job_ended", f"{job_id} has already {status.state}: it cannot be cancelled", state=status.state)
    if row.cluster_id is None or status.state is JobState.PAUSED:
        how = "while it was paused" if status.state is JobState.PAUSED else "while no cluster had it"
        status = moved(status, JobState.CANCELLED, "cancelled_by_user", f"cancelled {how}", time.time())
    else:
        reason = f"cancel was asked for; waits for cluster {row.cluster_id} to stop it"
        status = moved(status, JobState.CANCELLING, "cancelled_by_user", reason, time.time())
    return await _wish(session, row, status, WISH_CANCELLED)


async def pause(session: AsyncSession, job_id: str) -> JobRow:
    """Writes the wish. A job that no cluster has begun rests at once, another one when its state stands in the store.
    Raises Conflict where that is not possible, or wished already."""
    row = await get(session, job_id, to_change=True)
    status = status_of(row)
    _check_open(row, status, "paused")
    if row.wish == WISH_PAUSED:
        how = "is paused already" if status.state is JobState.PAUSED else "is being paused already"
        raise Conflict("already_paused", f"{job_id} {how}", state=status.state)
    if not has_store(row):
        problem = "checkpoint.uri is not set, and a job rests in its object store: it can only run on or be cancelled"
        raise Conflict("no_store", f"{job_id} cannot be paused: {problem}")
    if status.state is JobState.QUEUED:
        status = moved(status, JobState.PAUSED, "paused_by_user", "Paused on request before it began.", time.time())
    return await _wish(session, row, status, WISH_PAUSED)


async def checkpoint(session: AsyncSession, job_id: str) -> JobRow:
    """Wishes the newest step into the object store. Raises Conflict where that is not possible."""
    row = await get(session, job_id, to_change=True)
    status = status_of(row)
    _check_open(row, status, "checkpointed")
    if is_script(row):
        raise Conflict("script_stores", f"{job_id} runs a script, which stores what it reports when it reports it")
    if not has_store(row):
        raise Conflict("no_store", f"{job_id} has no checkpoint.uri: there is no place for a checkpoint")
    if row.wish != WISH_RUN or status.state is JobState.PAUSED:
        raise Conflict("already_paused", f"{job_id} is to rest: its newest step goes to the store anyway")
    if not await put_status(session, row, status, saves=row.saves + 1):
        raise Conflict("changed_meanwhile", f"{row.id} changed meanwhile; ask again")
    return await get(session, row.id)


async def let_rest(session: AsyncSession, row: JobRow, why: shares.Held) -> JobRow:
    """As `pause`, wished by the control plane itself. Raises Conflict where the row has changed since it was read."""
    status = status_of(row)
    if status.state is JobState.QUEUED:
        status = moved(status, JobState.PAUSED, why.code, f"Paused {why.words}.", time.time())
    await shares.hold(session, row.id, why.code, why.words)
    return await _wish(session, row, status, WISH_PAUSED)


async def resume(session: AsyncSession, job_id: str, cluster_id: str | None) -> JobRow:
    """Calls a pause off. A job that rests goes to this cluster, or, with none, to the first that connects. Raises
    Conflict where it is not wished to rest."""
    row = await get(session, job_id, to_change=True)
    status = status_of(row)
    _check_open(row, status, "resumed")
    if row.wish != WISH_PAUSED:
        raise Conflict("not_paused", f"{job_id} is {status.state}, not paused: there is nothing to resume")
    await shares.hold(session, job_id, None)
    if status.state is JobState.PAUSED:
        status = resumed(status, cluster_id)
        return await _wish(session, row, status, WISH_RUN, cluster_id=cluster_id)
    return await _wish(session, row, status, WISH_RUN)


def resumed(status: Status, cluster_id: str | None) -> Status:
    """Of a job that rests, to go on there, or on whatever cluster connects."""
    where = "a cluster to connect" if cluster_id is None else f"cluster {cluster_id}"
    return moved(status, JobState.QUEUED, "resumed", f"resumed from step {status.step}; waits for {where}", time.time())


def _check_open(row: JobRow, status: Status, what: str) -> None:
    if status.terminal:
        raise Conflict("job_ended", f"{row.id} has already {status.state}: it cannot be {what}", state=status.state)
    if row.wish == WISH_CANCELLED:
        raise Conflict("job_cancelling", f"{row.id} is being cancelled: it cannot be {what}", state=status.state)


async def _wish(session: AsyncSession, row: JobRow, status: Status, wish: str, **values: Any) -> JobRow:
    if not await put_status(session, row, status, wish=wish, **values):
        raise Conflict("changed_meanwhile", f"{row.id} changed meanwhile; ask again")
    return await get(session, row.id)


async def list_page(
    session: AsyncSession, wanted: JobFilter, *, limit: int, cursor: str | None
) -> tuple[Sequence[JobRow], str | None]:
    """Newest first, and the cursor of the next page if there is one. Raises BadInput."""
    query = select(JobRow).where(*wanted.conditions()).order_by(JobRow.id.desc()).limit(limit + 1)
    if cursor is not None:
        query = query.where(JobRow.id < _read_cursor(cursor))
    rows = (await session.scalars(query)).all()
    more = len(rows) > limit
    return rows[:limit], cursor_after(rows[limit - 1].id) if more else None


def cursor_after(job_id: str) -> str:
    """Of the page that begins behind this job."""
    return base64.urlsafe_b64encode(job_id.encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> str:
    try:
        job_id = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        job_id = ""
    if not job_id.startswith("job_"):
        raise BadInput("invalid_field", f"cursor = {cursor!r}: is not a cursor of this list", "cursor")
    return job_id


def rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_script(row: JobRow) -> bool:
    """Of kind `ray_train`: its steps are what its script reports."""
    return kind_of(row.spec) == "ray_train"


async def scripts_among(session: AsyncSession, job_ids: Sequence[str]) -> frozenset[str]:
    """Which of these jobs are scripts; no row is read for it."""
    kind = JobRow.spec["kind"].as_string()
    return frozenset(await session.scalars(select(JobRow.id).where(JobRow.id.in_(job_ids), kind == "ray_train")))


def num_steps(row: JobRow) -> int | None:
    """None where nobody but the job's script knows."""
    return None if is_script(row) else int(row.spec["train"]["steps"])


def num_tokens(row: JobRow) -> int:
    """Of all steps so far that count; none of a script is known."""
    if is_script(row):
        return 0
    train = row.spec["train"]
    return row.step * int(train["global_batch"]) * int(train["seq_len"])


def eta_s(row: JobRow) -> float | None:
    """Seconds to the last step and the last evaluation at the pace of the last few; None unless the job is running."""
    steps = num_steps(row)
    if row.state != JobState.RUNNING or row.step_s is None or steps is None:
        return None
    to_go_s = _evaluations_to_go(row, steps) * _evaluation_s(row, row.step_s)
    return max(0, steps - row.step) * row.step_s + to_go_s


def _evaluations_to_go(row: JobRow, steps: int) -> int:
    done, every = row.eval_step or 0, row.spec["train"].get("eval_every")
    return 0 if every is None or done >= steps else -(-steps // int(every)) - done // int(every)


def _evaluation_s(row: JobRow, step_s: float) -> float:
    """Before the first one: a forward takes about a third of a step."""
    return row.eval_s if row.eval_s is not None else row.spec["train"]["eval_batches"] * step_s / 3


def evaluation(row: JobRow) -> Evaluation | None:
    """The newest one; None where there was none yet."""
    if row.eval_step is None:
        return None
    return {"step": row.eval_step, "loss": row.eval_loss, "perplexity": perplexity(row.eval_loss)}


def perplexity(loss: float | None) -> float | None:
    """None where it is no number that JSON can carry."""
    return None if loss is None or loss > _LARGEST_EXPONENT else math.exp(loss)


def has_store(row: JobRow) -> bool:
    return (row.spec.get("checkpoint") or {}).get("uri") is not None


def can_checkpoint(row: JobRow) -> bool:
    """Whether `checkpoint` would not be refused."""
    rests = row.wish != WISH_RUN or row.state == JobState.PAUSED
    return has_store(row) and not (ended(row) or is_script(row) or rests)


def ended(row: JobRow) -> bool:
    return JobState(row.state) in TERMINAL


def resource(row: JobRow) -> Job:
    """The job as REST shows it: `spec` and `wish` are the user's, `status` is ours."""
    return {
        "id": row.id,
        "project": row.project_id,
        "name": row.name,
        "kind": kind_of(row.spec),
        "spec": row.spec,
        "wish": row.wish,
        "cluster_id": row.cluster_id,
        "created_at": rfc3339(row.created_at_s),
        "created_by": row.created_by,
        "updated_at": rfc3339(row.updated_at_s),
        "status": {
            "state": row.state,
            "code": row.state_code,
            "reason": row.reason,
            "since": rfc3339(row.since_at_s),
            "step": row.step,
            "steps": num_steps(row),
            "epoch": row.epoch,
            "loss": row.loss,
            "evaluation": evaluation(row),
            "plan_id": row.plan_id,
            "tokens_per_s": row.tokens_per_s,
            "step_s": row.step_s,
            "eta_s": eta_s(row),
            "recoveries": row.num_recoveries,
            "redone_steps": row.redone_steps,
            "lost_steps": row.lost_steps,
            "skipped_steps": row.skipped_steps,
            "store_problem": row.store_problem,
            "exchanges": cast(Exchanges | None, row.exchanges),  # a column of JSON, which status.py writes
            "last_seq": row.last_seq,
        },
    }
