"""The state of a job as a line, and as the exit status of commands that wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from shoal.cli_show import say, show_json

FAILED = 1
CANCELLED = 3
TIMED_OUT = 4
_STATUSES: Mapping[str, int] = {"succeeded": 0, "failed": FAILED, "cancelled": CANCELLED}


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
