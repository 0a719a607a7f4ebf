"""`shoal pools`: what nodes clusters can get, what is asked of each pool, and what came of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from shoal.cli_show import show_json, table
from shoal.client import Client
from shoal.errors import RequestRefused, ServerUnreachable

app = typer.Typer()
_LOOK_S = 2.0


@app.command()
def pools(
    events: Annotated[bool, typer.Option("--events", help="What was asked of them, and what came of it.")] = False,
    cluster: Annotated[str | None, typer.Option(metavar="ID", help="Only those of this cluster.")] = None,
    job: Annotated[str | None, typer.Option(metavar="ID", help="With --events: only for this job.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the pools that clusters can get nodes of, with what is asked of each, or what came of that."""
    with Client() as client:
        if events or job is not None:
            found = client.pool_events(job_id=job, cluster_id=cluster)
        else:
            found = [each for each in client.pools() if cluster in (None, each["cluster_id"])]
    if as_json:
        show_json({"items": found})
    elif events or job is not None:
        for event in found:
            print(pool_event_line(event))
    else:
        _show(found)


def pool_event_line(event: Mapping[str, Any]) -> str:
    """As a line beside those of a journal, of which it has no number."""
    return f"{event['at']}  {'':>6}  {event['kind']:<22}{event['reason']}"


class PoolEventLines:
    """A context in which what is asked of pools for a job is printed as it comes: it stands in no journal, and a job
    that waits for its first node has none. `told` are known already. A server that is away for a while ends nothing."""

    def __init__(self, client: Client, job_id: str, told: Sequence[Mapping[str, Any]]) -> None:
        self._client = client
        self._job_id = job_id
        self._after = int(told[-1]["id"]) if told else 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            with contextlib.suppress(RequestRefused, ServerUnreachable):
                for event in self._client.pool_events(job_id=self._job_id, after=self._after):
                    self._after = event["id"]
                    print(pool_event_line(event), flush=True)


def _show(found: list[dict[str, Any]]) -> None:
    columns = ("CLUSTER", "POOL", "NODES OF", "MARKET", "ZONES", "THERE", "STARTING", "ASKED FOR", "MAX", "$/H", "SAYS")
    table(
        columns,
        (
            (
                each["cluster_id"],
                each["name"],
                f"{each['devices']} x {each['device']}",
                "spot" if each["spot"] else "on demand",
                ", ".join(each["zones"]),
                len(each["nodes"]),
                each["starting"],
                each["target"],
                each["max"],
                each["price_per_hour"],
                _says(each),
            )
            for each in found
        ),
    )


def _says(pool: Mapping[str, Any]) -> str:
    short = None if pool["asked_again_at"] is None else f"short, asked again at {pool['asked_again_at']}"
    return "; ".join(text for text in (short, pool["problem"]) if text)
