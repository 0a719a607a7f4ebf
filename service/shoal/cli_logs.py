"""`shoal logs`: what a job printed, on whatever rank and node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.cli_complete import JobId
from shoal.cli_input import BadUsage
from shoal.cli_progress import view_on
from shoal.cli_show import say, show_json
from shoal.cli_watch import Looking
from shoal.client import Client

app = typer.Typer()

_AGO = re.compile(r"^(\d+(?:\.\d+)?)([smhd])$")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only of this rank.")] = None,
    node: Annotated[str | None, typer.Option(help="Only of this node.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only of this attempt (epoch).")] = None,
    level: Annotated[Level | None, typer.Option(help="Only lines at least as serious.")] = None,
    search: Annotated[str | None, typer.Option(metavar="TEXT", help="Only lines with this text.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="From then on: 10m, 2h, or a time.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Up to then.")] = None,
    event: Annotated[int | None, typer.Option(min=1, metavar="SEQ", help="30 s around this journal entry.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, max=5000, help="Only so many, the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a job printed: its ranks, or its script and workers."""
    now = datetime.now(UTC)
    wanted = {
        "rank": rank,
        "node": node,
        "attempt": attempt,
        "level": level and level.value,
        "search": search,
        "since": since and moment("--since", since, now),
        "until": until and moment("--until", until, now),
        "event": event,
        "tail": tail,
    }
    seen: list[dict[str, Any]] = []
    console = Console(highlight=False)
    with Client() as client:
        lines = client.logs(job_id, follow=follow, forgotten=_say_forgotten, **wanted)
        if follow and console.is_terminal and not as_json:
            _show_with_progress(client, job_id, lines, console)
            return
        for line in lines:
            if as_json:
                seen.append(line)
            else:
                print(log_line(line), flush=True)
    if as_json:
        show_json({"items": seen})


def _show_with_progress(client: Client, job_id: str, lines: Iterator[dict[str, Any]], console: Console) -> None:
    """How far the job is stands below what it prints."""
    with view_on(console) as view:
        view.show(client.get(job_id))
        with Looking(client, job_id, view):
            for line in lines:
                view.line(log_line(line))
        view.show(client.get(job_id))


def moment(option: str, text: str, now: datetime) -> str:
    """RFC 3339, of a time or of how long ago it was. Raises BadUsage."""
    if ago := _AGO.match(text):
        return (now - timedelta(seconds=float(ago[1]) * _UNIT_S[ago[2]])).isoformat()
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadUsage(f"{option} = {text!r}: must be like 10m, 2h, 1d or 2026-01-31T10:00:00Z") from error
    return (found if found.tzinfo is not None else found.astimezone()).isoformat()


def log_line(line: Mapping[str, Any]) -> str:
    """One line for people: when, who, how serious if that matters, what."""
    who = line["node"] or "script" if line["rank"] is None else f"rank {line['rank']}"
    serious = "" if line["level"] == "info" else f"{line['level'].upper()} "
    return f"{line['at']} {who}: {serious}{line['text']}"


def _say_forgotten(forgotten: Mapping[str, Any]) -> None:
    say(f"{forgotten['lines']} earlier lines are not kept any more: {forgotten['reason']}")
