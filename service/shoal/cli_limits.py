"""`shoal limits` and `shoal resize`: what a job may cost and use, while it runs or rests."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli_complete import JobId
from shoal.cli_input import BadUsage
from shoal.cli_state import show_state
from shoal.client import Client
from shoal.client_text import given

app = typer.Typer()
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
IfMatch = Annotated[str | None, typer.Option(metavar="ETAG", help="Only if the job is as it was then.")]


@app.command()
def limits(
    job_id: JobId,
    budget_usd: Annotated[float | None, typer.Option(help="All that its nodes may cost.")] = None,
    max_price_per_hour: Annotated[float | None, typer.Option(help="Of all nodes that it has at one time.")] = None,
    max_devices: Annotated[int | None, typer.Option(help="At most so many at one time.")] = None,
    rent: Annotated[
        bool | None, typer.Option("--rent/--no-rent", help="Whether more nodes may be rented for it.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="When it rests, done or not, as in 2027-01-31T18:00Z.")] = None,
    max_duration: Annotated[
        str | None, typer.Option(help="How long after it began it rests, done or not, as in 12h.")
    ] = None,
    priority: Annotated[str | None, typer.Option(help="low, normal, high, or a whole number.")] = None,
    none: Annotated[
        list[str] | None, typer.Option("--none", metavar="LIMIT", help="Take it away, as in --none budget_usd.")
    ] = None,
    if_match: IfMatch = None,
    as_json: AsJson = False,
) -> None:
    """Change what a job may cost and use, or its priority, while it runs or rests."""
    wanted = given(
        budget_usd=budget_usd,
        max_price_per_hour=max_price_per_hour,
        max_devices=max_devices,
        rent=rent,
        deadline=deadline,
        max_duration=max_duration,
        priority=int(priority) if priority is not None and priority.lstrip("-").isdecimal() else priority,
    )
    with Client() as client:
        taken = {name.replace("-", "_"): None for name in none or ()}
        show_state(client.set_limits(job_id, if_match=if_match, **{**taken, **wanted}), as_json)


@app.command()
def resize(
    job_id: JobId,
    max_devices: Annotated[
        int | None, typer.Option("--max", min=0, help="At most so many devices at one time; 0: all that there are.")
    ] = None,
    min_devices: Annotated[
        int | None, typer.Option("--min", min=1, help="It begins with so many, or waits; not while it runs.")
    ] = None,
    if_match: IfMatch = None,
    as_json: AsJson = False,
) -> None:
    """Let a job have more devices, or fewer: one that runs leaves nodes within a step, or grows."""
    size: dict[str, int | None] = dict(given(min_devices=min_devices))
    if max_devices is not None:
        size["max_devices"] = max_devices or None
    if not size:
        raise BadUsage("say --max, --min or both: how many devices the job is to have")
    with Client() as client:
        show_state(client.resize(job_id, if_match=if_match, **size), as_json)
