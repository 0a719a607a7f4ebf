"""What shells complete beside commands and options: ids of jobs and names of nodes, as the control plane knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from shoal.client import Client
from shoal.errors import ShoalError

_NEWEST = 50


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Ids, each with what it is."""
    return _found(
        incomplete,
        lambda client: ((job["id"], f"{job['name']}, {job['status']['state']}") for job in client.list(limit=_NEWEST)),
    )


def complete_node(incomplete: str) -> list[tuple[str, str]]:
    return _found(
        incomplete,
        lambda client: ((node["id"], f"{node['devices']} x {node['device']}") for node in client.nodes()),
    )


def _found(incomplete: str, ask: Callable[[Client], Iterator[tuple[Any, str]]]) -> list[tuple[str, str]]:
    """Nothing where nobody answers: a shell is no place for errors."""
    try:
        with Client() as client:
            return [(str(name), what) for name, what in ask(client) if str(name).startswith(incomplete)]
    except ShoalError:
        return []


JobId = Annotated[str, typer.Argument(metavar="ID", help="A job's id, as in job_01J...", autocompletion=complete_job)]
