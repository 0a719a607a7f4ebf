"""What somebody should look at: of a job, decided by what its row and its newest step say, and of all jobs together.
Pure; pages show it on top, and each alert has a `code` for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal_recovery.journal import AT_REST, TERMINAL, JobState
from shoal_service.enforcement import BUDGET_SPENT, DEADLINE_PASSED
from shoal_service.models import JobRow, ShareRow
from shoal_service.timeline import duration
from shoal_service.words import sentence

NO_PROGRESS_S = 600.0
STUCK_S = 300.0
_SLOWEST_STEPS = 10  # of a job whose steps take minutes, so many may be missing before anybody is told
_PASSING = (JobState.STARTING, JobState.RECOVERING, JobState.DRAINING, JobState.CANCELLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What alerts are decided by. `stepped_at_s`: when the newest step was done, None before there is one; `step_s` how
    long steps take; `warning` is what is about to run out, `spent` ("as ...") what has, so that the control plane lets
    the job rest; `odd_loss` says what is odd about its loss; `silence` what there is to say of a silent cluster."""

    state: JobState
    reason: str
    since_at_s: float
    stepped_at_s: float | None
    step_s: float | None
    odd_loss: str | None
    warning: str | None
    spent: str | None
    store_problem: str | None
    silence: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """`code` is one of failed, stuck, no_progress, budget, loss, store, cluster; `is_bad` tells what stopped the job
    from what may; `part` is the panel that says more."""

    code: str
    is_bad: bool
    text: str
    part: str


def alerts_of(job: Standing, now_s: float) -> tuple[Alert, ...]:
    """The worst first."""
    return tuple(sorted(_found(job, now_s), key=lambda alert: not alert.is_bad))


def _found(job: Standing, now_s: float) -> Iterator[Alert]:
    if job.state is JobState.FAILED:
        yield Alert(code="failed", is_bad=True, text=sentence(job.reason), part="logs")
    if job.spent is not None and job.state not in TERMINAL:
        yield Alert(code="budget", is_bad=True, text=f"Rests {job.spent}.", part="limits")
    if job.state in AT_REST:
        return
    since_s = now_s - job.since_at_s
    if job.state in _PASSING and since_s > STUCK_S:
        yield Alert(code="stuck", is_bad=True, text=f"Is {job.state} for {duration(since_s)} already.", part="events")
    if job.state is JobState.WAITING and since_s > STUCK_S:
        text = f"Waits for {duration(since_s)} already: {job.reason}"
        yield Alert(code="stuck", is_bad=False, text=text, part="nodes")
    quiet_s = now_s - max(job.since_at_s, job.stepped_at_s or 0.0)
    if job.state is JobState.RUNNING and quiet_s > max(NO_PROGRESS_S, _SLOWEST_STEPS * (job.step_s or 0.0)):
        text = f"Runs, but no step was done for {duration(quiet_s)}."
        yield Alert(code="no_progress", is_bad=True, text=text, part="curves")
    if job.warning is not None:
        yield Alert(code="budget", is_bad=False, text=sentence(job.warning), part="limits")
    if job.odd_loss is not None:
        yield Alert(code="loss", is_bad=False, text=job.odd_loss, part="curves")
    if job.store_problem is not None:
        text = f"No checkpoints at present, training goes on: {job.store_problem}"
        yield Alert(code="store", is_bad=False, text=text, part="checkpoints")
    if job.silence is not None:
        text = f"What is shown may be old: {job.silence}."
        yield Alert(code="cluster", is_bad=False, text=text, part="nodes")


def standing_of(
    row: JobRow,
    share: ShareRow | None,
    *,
    is_script: bool,
    stepped_at_s: float | None,
    silence: str | None,
    odd_loss: str = "",
) -> Standing:
    """`odd_loss` as LossWatch says it."""
    is_number = row.loss is not None or row.step == 0 or is_script
    return Standing(
        state=JobState(row.state),
        reason=row.reason,
        since_at_s=row.since_at_s,
        stepped_at_s=stepped_at_s,
        step_s=row.step_s,
        odd_loss=odd_loss or (None if is_number else "The newest loss is not a number."),
        warning=None if share is None else share.warning,
        spent=share.hold_words if share is not None and share.hold in (BUDGET_SPENT, DEADLINE_PASSED) else None,
        store_problem=row.store_problem,
        silence=silence,
    )


def by_job(found: Mapping[str, tuple[Alert, ...]]) -> list[tuple[str, Alert]]:
    """Of several jobs, what is worst first; of each the first alert alone."""
    first = [(job_id, alerts[0]) for job_id, alerts in found.items() if alerts]
    return sorted(first, key=lambda each: not each[1].is_bad)
