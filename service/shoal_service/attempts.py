"""The attempts of a job: its epochs, one after the other, by its journal. `attempts_of` is pure, `read` finds what it
needs without opening the plans, which are large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sqlalchemy import Integer, String, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import AT_REST, ClusterEntered, PlanAdopted, RecoveryDone, StateChanged
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service import jobs
from shoal_service.models import JournalRow, StepRow

_BEGINNINGS = (PlanAdopted.kind, WorkersStarted.kind)
_OTHERS = (ClusterEntered.kind, RecoveryDone.kind, StateChanged.kind)
_MOST = 20_000  # entries that are looked at
_RESTING = frozenset(state.value for state in AT_REST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What an entry of the journal says of attempts. `code` and `reason` are those of a state, `cause` and `reason`
    those of a recovery; `what` is the cluster, or the id of the plan."""

    seq: int
    at_s: float
    kind: str
    epoch: int = 0
    step: int = 0
    what: str | None = None
    cause: str | None = None
    reason: str | None = None
    state: str | None = None
    redone_steps: int = 0
    lost_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Of one epoch: how many were done, how many of these do not count any more, and the newest."""

    done: int
    rolled_back: int
    last: int


def attempts_of(seen: Sequence[Seen], steps: Mapping[int, Steps], state: str) -> list[dict[str, Any]]:
    """Oldest first, without their nodes. `seen` in order; `state` is the job's now."""
    found: list[dict[str, Any]] = []
    cluster: str | None = None
    code, reason = "submitted", ""
    for entry in seen:
        if entry.kind == ClusterEntered.kind:
            cluster = entry.what
        elif entry.kind == StateChanged.kind:
            code, reason = entry.cause or code, entry.reason or reason
            if entry.state in _RESTING and found and found[-1]["ended_at"] is None:
                found[-1] |= {"ended_at": jobs.rfc3339(entry.at_s), "outcome": entry.state}
        elif entry.kind == RecoveryDone.kind:
            if found and found[-1]["attempt"] == entry.epoch:
                found[-1] |= {
                    "cause": entry.cause,
                    "reason": entry.reason,
                    "redone_steps": entry.redone_steps,
                    "lost_steps": entry.lost_steps,
                }
        else:
            found.append(_attempt(entry, cluster, code if found else "submitted", reason, steps.get(entry.epoch)))
    for before, after in pairwise(found):
        if before["ended_at"] is None:
            before |= {"ended_at": after["began_at"], "outcome": after["cause"]}
    if found and found[-1]["ended_at"] is None:
        found[-1]["outcome"] = state
    return found


def _attempt(entry: Seen, cluster: str | None, cause: str, reason: str, steps: Steps | None) -> dict[str, Any]:
    done = steps or Steps(done=0, rolled_back=0, last=entry.step)
    return {
        "attempt": entry.epoch,
        "seq": entry.seq,
        "cluster_id": cluster,
        "plan_id": entry.what,
        "cause": cause,
        "reason": reason,
        "began_at": jobs.rfc3339(entry.at_s),
        "ended_at": None,
        "outcome": None,
        "from_step": entry.step,
        "last_step": done.last,
        "steps_done": done.done,
        "steps_rolled_back": done.rolled_back,
        "redone_steps": 0,
        "lost_steps": 0,
    }


async def read(session: AsyncSession, job_id: str, state: str, before: int | None, limit: int) -> list[dict[str, Any]]:
    """At most `limit`, newest first, with their nodes; only those older than attempt `before`."""
    found = attempts_of(await _seen(session, job_id), await _steps(session, job_id), state)
    page = [each for each in reversed(found) if before is None or each["attempt"] < before][:limit]
    beginnings = select(JournalRow).where(
        JournalRow.job_id == job_id, JournalRow.seq.in_([each["seq"] for each in page])
    )
    nodes = {row.seq: _nodes(row) for row in (await session.scalars(beginnings)).all()}
    return [{**each, "nodes": nodes[each["seq"]]} for each in page]


def _nodes(row: JournalRow) -> list[str]:
    if row.kind == WorkersStarted.kind:
        return sorted(set(row.payload["nodes"]))
    stages = (stage for pipeline in row.payload["plan"]["pipelines"] for stage in pipeline["stages"])
    return sorted({replica["node"] for stage in stages for replica in stage["replicas"]})


async def _seen(session: AsyncSession, job_id: str) -> list[Seen]:
    payload = JournalRow.payload

    def text(name: str) -> Any:
        return payload[name].as_string().cast(String)

    def number(name: str) -> Any:
        return func.coalesce(payload[name].as_integer().cast(Integer), 0)

    query = select(
        JournalRow.seq,
        JournalRow.at_s,
        JournalRow.kind,
        number("epoch"),
        number("step"),
        case((JournalRow.kind == ClusterEntered.kind, text("cluster")), else_=text("plan_id")),
        case((JournalRow.kind == StateChanged.kind, text("code")), else_=text("cause")),
        text("reason"),
        text("state"),
        number("redone_steps"),
        number("lost_steps"),
    ).where(JournalRow.job_id == job_id, JournalRow.kind.in_((*_BEGINNINGS, *_OTHERS)))
    rows = (await session.execute(query.order_by(JournalRow.seq.desc()).limit(_MOST))).all()
    names = Seen.__slots__
    return [Seen(**dict(zip(names, row, strict=True))) for row in reversed(rows)]


async def _steps(session: AsyncSession, job_id: str) -> dict[int, Steps]:
    rolled_back = func.sum(case((StepRow.rolled_back.is_(True), 1), else_=0))
    query = select(StepRow.epoch, func.count(), rolled_back, func.max(StepRow.step)).where(StepRow.job_id == job_id)
    rows = (await session.execute(query.group_by(StepRow.epoch))).all()
    return {epoch: Steps(done=done, rolled_back=int(void), last=last) for epoch, done, void, last in rows}
