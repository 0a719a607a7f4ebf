"""The state of a job as a line, and as the exit status of commands that wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from shoal.cli_show import say, show_json
from shoal.errors import RequestRefused

FAILED = 1
CANCELLED = 3
TIMED_OUT = 4
_STATUSES: Mapping[str, int] = {"succeeded": 0, "failed": FAILED, "cancelled": CANCELLED}


# What to try next, by the code of what was refused.
_HINTS: Mapping[str, str] = {
    "job_not_found": "'shoal list' shows your jobs",
    "node_not_found": "'shoal nodes' shows what there is",
    "cluster_not_found": "'shoal clusters' shows what has connected",
    "project_not_found": "'shoal project list' shows yours",
    "storage_not_found": "'shoal storage list' shows what there is",
    "token_not_found": "'shoal token list' shows what there is",
    "no_cluster": "'shoal up' starts one here, 'shoal connect' offers a Ray cluster",
    "budget_spent": "'shoal limits ID --budget-usd USD' allows more",
    "deadline_passed": "'shoal limits ID --deadline TIME' allows more",
    "max_duration_passed": "'shoal limits ID --max-duration D' allows more",
    "precondition_failed": "'shoal status ID --json' has the ETag of now",
    "role": "'shoal whoami' shows your roles",
}


def hinted(error: Exception) -> str:
    """What went wrong, and what to try, where that is known."""
    hint = _HINTS.get(error.code) if isinstance(error, RequestRefused) else None
    return f"{error}; {hint}" if hint else str(error)


def show_state(job: Mapping[str, Any], as_json: bool) -> None:
    """In a line."""
    if as_json:
        show_json(job)
        return
    status = job["status"]
    wished = " (a pause is wished)" if job["wish"] == "paused" and status["state"] != "paused" else ""
    print(f"{job['id']} {status['state']}{wished}: {status['reason']}")


def exit_with(job: Mapping[str, Any]) -> None:
    """Raises typer.Exit for a job that has not succeeded, after saying why."""
    status = job["status"]
    if found := _STATUSES[status["state"]]:
        say(f"{job['id']} {status['state']}: {status['reason']}")
        raise typer.Exit(found)
