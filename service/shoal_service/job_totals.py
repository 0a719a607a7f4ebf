"""Figures of jobs in the database: added to in the transaction that adds to the journal, so that whoever reads them
never needs the journal itself, and every replica of this server says the same. How they add up is job_figures.py's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import Entry, RecoveryDone, entry_to_mapping
from shoal_service import job_figures
from shoal_service.job_figures import STEP_KINDS, Figures, Held, Histogram
from shoal_service.loss_watch import LossWatch
from shoal_service.models import JobRow, JournalRow, StepRow
from shoal_service.models_watching import JobTotalsRow
from shoal_service.step_sums import step_sums

_BATCH = 1000


async def add(session: AsyncSession, row: JobRow, entries: Sequence[Entry]) -> Figures:
    """Adds new entries, before they stand in the table of steps. The caller has locked the job."""
    kept = await session.get(JobTotalsRow, row.id)
    if kept is None:
        kept = await _of_journal(session, row)
        session.add(kept)
    figures, held = figures_of(kept.figures), _held_of(kept.held)
    undone = _Undone(session, row)
    for entry in entries:
        payload = entry_to_mapping(entry)
        kind = entry.event.kind
        if kind in STEP_KINDS:
            figures = job_figures.with_steps_undone(figures, *await undone.before(payload["step"]))
            times = float(payload["duration_s"]), job_figures.stalled_s(payload)
            undone.pending.append((payload["step"], *times))
        figures, held = _advanced(figures, held, kind, entry.at_s, payload)
        if kind == RecoveryDone.kind and kept.trace_from is None:
            kept.trace_from = entry.seq
    kept.seq, kept.figures = entries[-1].seq, dataclasses.asdict(figures)
    if (mapping := _held_mapping(held)) != kept.held:
        kept.held = mapping
    return figures


def _advanced(figures: Figures, held: Held, kind: str, at_s: float, payload: Mapping[str, Any]) -> tuple[Figures, Held]:
    figures = job_figures.with_outcomes(figures, held, kind, payload)
    figures, held = job_figures.advance(figures, kind, at_s, payload), job_figures.with_recovery(held, kind, payload)
    if job_figures.concerns_nodes(kind, payload):
        held = job_figures.with_nodes(held, kind, at_s, payload)
        figures = job_figures.with_held(figures, held, at_s)
    return figures, held


class _Undone:
    """Seconds of steps that do not count any more because the job does them again, and those that held them up."""

    def __init__(self, session: AsyncSession, row: JobRow) -> None:
        self._session = session
        self._job_id = row.id
        self._newest = row.step
        self.pending: list[tuple[int, float, float]] = []

    async def before(self, step: int) -> tuple[float, float]:
        seconds = sum(took_s for done, took_s, _ in self.pending if done >= step)
        stalled_s = sum(held_up_s for done, _, held_up_s in self.pending if done >= step)
        self.pending = [each for each in self.pending if each[0] < step]
        if step <= self._newest:
            counts = (StepRow.job_id == self._job_id, StepRow.rolled_back.is_(False))
            within = (StepRow.step >= step, StepRow.step <= self._newest)
            sums = select(func.sum(StepRow.duration_s), func.sum(StepRow.stalled_s)).where(*counts, *within)
            more_s, more_stalled_s = (await self._session.execute(sums)).one()
            seconds, stalled_s = seconds + float(more_s or 0.0), stalled_s + float(more_stalled_s or 0.0)
            self._newest = step - 1
        return seconds, stalled_s


async def _of_journal(session: AsyncSession, row: JobRow) -> JobTotalsRow:
    """From a journal that began before figures were kept: all of it but single steps, whose sums are known. How long
    each of those took is not counted."""
    figures, held, after = job_figures.fresh(row.created_at_s), Held(), 0
    query = select(JournalRow).where(JournalRow.job_id == row.id, JournalRow.kind.not_in(STEP_KINDS))
    while row.last_seq:
        rows = (await session.scalars(query.where(JournalRow.seq > after).order_by(JournalRow.seq).limit(_BATCH))).all()
        for each in rows:
            figures, held = _advanced(figures, held, each.kind, each.at_s, each.payload)
        if len(rows) < _BATCH:
            break
        after = rows[-1].seq
    for sums in await step_sums(session, row.id):
        figures = dataclasses.replace(figures, tokens=figures.tokens + sums.tokens)
        if sums.rolled_back:
            figures = dataclasses.replace(figures, redone_s=figures.redone_s + sums.seconds)
        else:
            worked_s, held_up_s = figures.productive_s + sums.worked_s, figures.stalled_s + sums.stalled_s
            figures = dataclasses.replace(figures, productive_s=worked_s, stalled_s=held_up_s)
    return JobTotalsRow(job_id=row.id, seq=row.last_seq, figures=dataclasses.asdict(figures), held=_held_mapping(held))


async def odd_losses(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, str]:
    """What is odd about the losses of those of these jobs where something is."""
    watch = JobTotalsRow.figures["loss_watch"]
    query = select(JobTotalsRow.job_id, watch).where(
        JobTotalsRow.job_id.in_(job_ids), watch["num_odd"].as_integer() > 0
    )
    return {job_id: LossWatch(**found).sentence for job_id, found in (await session.execute(query)).all()}


def figures_of(mapping: Mapping[str, Any]) -> Figures:
    """What `dataclasses.asdict` made of them, after a way through JSON."""
    found = {
        name: Histogram(counts=tuple(each["counts"]), sum_s=each["sum_s"])
        for name, each in mapping["histograms"].items()
    }
    watch = LossWatch(**mapping.get("loss_watch", {}))
    return Figures(**{**mapping, "histograms": found, "loss_watch": watch})


def _held_mapping(held: Held) -> dict[str, Any]:
    return {
        "since_s": dict(held.since_s),
        "known": {name: list(known) for name, known in held.known.items()},
        "noticed": sorted(held.noticed),
        "slowed": sorted(held.slowed),
        "usd": dict(held.usd),
        "places": {name: list(place) for name, place in held.places.items()},
        "recovers_from": held.recovers_from,
    }


def _held_of(mapping: Mapping[str, Any]) -> Held:
    return Held(
        since_s=mapping["since_s"],
        known={name: (price, market) for name, (price, market) in mapping["known"].items()},
        noticed=frozenset(mapping["noticed"]),
        slowed=frozenset(mapping["slowed"]),
        usd=mapping["usd"],
        # Versions of before neither write nor keep these.
        places={name: (device, zone) for name, (device, zone) in mapping.get("places", {}).items()},
        recovers_from=mapping.get("recovers_from", ""),
    )
