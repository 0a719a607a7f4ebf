"""Whether a job makes no progress, by what its journal adds up to. Pure: nobody's silence counts here, only what is
known of a time in which the journal was heard.

A job that runs is stuck when no step was done for `limit_s`, or ten times as long as its steps take where that is
longer. One that starts, recovers, leaves, waits for nodes or is being cancelled is stuck when it has been at that for
`limit_s`. One that is in the queue, paused or ended is not: it is where it should be.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_recovery.journal import JobState
from shoal_service.job_figures import Figures
from shoal_service.timeline import duration

_STEPS = 10  # so many times the usual step may be late
_DOINGS = {
    JobState.RUNNING: "runs, and no step was done",
    JobState.STARTING: "has been starting",
    JobState.RECOVERING: "has been recovering",
    JobState.DRAINING: "has been leaving nodes",
    JobState.WAITING: "has been waiting for nodes",
    JobState.CANCELLING: "has been asked to stop, and has not",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """`since_s`: when something happened for the last time. `code` is `no_steps`, or the state."""

    code: str
    reason: str
    since_s: float


def stuck(figures: Figures, state: JobState, step_s: float | None, heard_s: float, limit_s: float) -> Stuck | None:
    """None for a job that makes progress, as far as is known up to `heard_s`. `state` is that of the job, which may
    have been changed here after its journal spoke; `step_s` how long its steps take."""
    doing = _DOINGS.get(state)
    if doing is None or state != figures.state:  # one that was just changed is given its time from the next entry on
        return None
    since_s = figures.state_at_s
    if state is JobState.RUNNING:
        since_s = max(since_s, figures.step_at_s or 0.0)
        limit_s = max(limit_s, _STEPS * (step_s or 0.0))
    idle_s = heard_s - since_s
    if idle_s <= limit_s:
        return None
    code = "no_steps" if state is JobState.RUNNING else state.value
    reason = f"{doing} for {duration(round(idle_s))}; {duration(round(limit_s))} are allowed"
    return Stuck(code=code, reason=reason, since_s=since_s)
