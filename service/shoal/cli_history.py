"""`shoal attempts`: the epochs of a job, one line each."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli_show import show_json, table
from shoal.client import Client

app = typer.Typer()


@app.command()
def attempts(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="A job's id, as in job_01J...")],
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the attempts (epochs) of a job: what each was for, what it did, and what became of it."""
    with Client() as client:
        found = list(client.attempts(job_id, limit=limit))
    if as_json:
        show_json({"items": found})
        return
    columns = ("ATTEMPT", "CLUSTER", "CAUSE", "BEGAN", "ENDED", "STEPS", "REDONE", "LOST", "NODES", "OUTCOME")
    rows = (
        (
            each["attempt"],
            each["cluster_id"],
            each["cause"],
            each["began_at"],
            each["ended_at"],
            f"{each['from_step']}-{each['last_step']}",
            each["redone_steps"],
            each["lost_steps"],
            len(each["nodes"]),
            each["outcome"],
        )
        for each in found
    )
    table(columns, rows)
