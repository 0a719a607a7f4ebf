"""What is known of checkpoints beside their own entries in the journal: for how long training was held up for each, and
when its bytes were last found to be right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import CheckpointCommitted, RecoveryDone
from shoal_service import journal
from shoal_service.job_history import event_of
from shoal_service.models import JournalRow, StepRow
from shoal_service.timeline import Event

_RECOVERIES = 200
Saved = tuple[int, int]  # epoch and step


class Look(StrEnum):
    """`MANIFEST`: what names all shards was read back once it was written, after each shard had come whole; `BYTES`: a
    recovery read from there and found the checksums that state was sealed with."""

    MANIFEST = "manifest"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    at_s: float
    by: Look
    seq: int  # of the journal's entry that tells of it


def verified(step: int, committed: Event | None, recoveries: Sequence[Event]) -> Verified | None:
    """The last time; None where nothing tells. `recoveries` are those of the job."""
    found = [] if committed is None else [Verified(at_s=committed.at_s, by=Look.MANIFEST, seq=committed.seq)]
    read = (event for event in recoveries if event.kind == RecoveryDone.kind and _read_store(event.payload, step))
    found += [Verified(at_s=event.at_s, by=Look.BYTES, seq=event.seq) for event in read]
    return max(found, key=lambda each: each.seq, default=None)


def _read_store(said: Mapping[str, Any], step: int) -> bool:
    spoilt = any(each["source"] == "object store" for each in said.get("failed_sources", ()))
    return said["step"] == step and said["num_bytes"].get("store", 0) > 0 and not spoilt


def is_commit(event: Event) -> bool:
    return event.kind == CheckpointCommitted.kind


async def held_up_s(session: AsyncSession, job_id: str, saved: Iterable[Saved]) -> dict[Saved, float]:
    """For how long the step after each was held up until the copies of this one stood; those that nobody tells of, as
    the last of an epoch, are not in it."""
    wanted = {(epoch, step + 1): (epoch, step) for epoch, step in saved}
    if not wanted:
        return {}
    rows = await session.execute(
        select(StepRow.epoch, StepRow.step, StepRow.stalled_s).where(
            StepRow.job_id == job_id,
            StepRow.rolled_back.in_((False, True)),
            StepRow.step.in_({step for _, step in wanted}),
        )
    )
    return {
        wanted[epoch, step]: stalled_s
        for epoch, step, stalled_s in rows.all()
        if (epoch, step) in wanted and stalled_s is not None
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of a job's checkpoints."""

    held_up_s: Mapping[Saved, float]
    recoveries: Sequence[Event]

    def verified(self, row: JournalRow) -> Verified | None:
        """Of the checkpoint that this entry tells of."""
        event = event_of(row)
        return verified(event.payload["step"], event, self.recoveries) if is_commit(event) else None


async def facts_of(session: AsyncSession, job_id: str, entries: Iterable[JournalRow]) -> Facts:
    """Of those that these entries tell of, as far as the journal reaches back."""
    saved = [(row.payload["epoch"], row.payload["step"]) for row in entries if row.kind == CheckpointCommitted.kind]
    rows = await journal.newest(session, job_id, _RECOVERIES, (RecoveryDone.kind,))
    return Facts(held_up_s=await held_up_s(session, job_id, saved), recoveries=tuple(map(event_of, rows)))
