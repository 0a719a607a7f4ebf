"""`shoal watch` and `shoal wait`: a job until it has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.cli_complete import JobId, complete_job
from shoal.cli_input import BadUsage
from shoal.cli_progress import View, view_on
from shoal.cli_show import event_line, show_json
from shoal.cli_state import exit_with
from shoal.client import ENDED, Client
from shoal.errors import RequestRefused, ServerUnreachable

app = typer.Typer()
_LOOK_S = 1.0
# Of use to those who look into something, not to those who look on.
_UNTOLD = frozenset(
    {
        "figures_measured",
        "prediction_checked",
        "cluster_entered",
        "share_changed",
        "share_taken",
        "script_printed",
    }
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def watch(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A job's id; default: your newest.", autocompletion=complete_job),
    ] = None,
    until_step: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only until it has done this step.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch a job until it has ended: a bar, time to go and the reason; plain lines where this is no terminal."""
    with Client() as client:
        job = look_on(client, job_id or _newest(client), until_step=until_step, quiet=as_json)
    if as_json:
        show_json(job)
    if job["status"]["state"] in ENDED:
        exit_with(job)


@app.command()
def wait(
    job_id: JobId,
    timeout: Annotated[float | None, typer.Option(min=0, help="Give up after so many seconds.")] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a job has ended. Exit status 0 if it succeeded, 1 if it failed, 3 if it was cancelled, 4 when the
    timeout was over."""
    with Client() as client:
        job = client.wait(job_id, timeout_s=timeout)
    if as_json:
        show_json(job)
    else:
        print(f"{job['id']} {job['status']['state']}: {job['status']['reason']}")
    exit_with(job)


def look_on(client: Client, job_id: str, *, until_step: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Shows the job until it has ended, or has done a step; on standard error where `quiet`. The job then."""
    job = client.get(job_id)
    with view_on(Console(stderr=quiet, highlight=False)) as view:
        view.show(job)
        if job["status"]["state"] not in ENDED and not _is_done(job["status"]["step"], until_step):
            with Looking(client, job_id, view):
                _follow(client, job, view, until_step)
        job = client.get(job_id)
        view.show(job)
    return job


def _follow(client: Client, job: Mapping[str, Any], view: View, until_step: int | None) -> None:
    for event in client.events(job["id"], after=job["status"]["last_seq"], follow=True):
        if event["kind"] in ("step_done", "script_reported"):
            view.step(event["step"], event.get("loss"))
            if _is_done(event["step"], until_step):
                return
        elif event["kind"] not in _UNTOLD:
            view.line(event_line(event))
            if event["kind"] == "state_changed":  # what is said of steps from here on goes by that
                _show(client, job["id"], view)


def _is_done(step: int, until_step: int | None) -> bool:
    return until_step is not None and step >= until_step


class Looking:
    """A context in which a view is shown its job again and again: events say what happened, but not how long it will
    take from there. A server that is away for a while is no reason to stop; who follows the events finds that out."""

    def __init__(self, client: Client, job_id: str, view: View) -> None:
        self._client = client
        self._job_id = job_id
        self._view = view
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            _show(self._client, self._job_id, self._view)


def _show(client: Client, job_id: str, view: View) -> None:
    with contextlib.suppress(RequestRefused, ServerUnreachable):
        view.show(client.get(job_id))


def _newest(client: Client) -> str:
    for job in client.list(limit=1):
        return str(job["id"])
    raise BadUsage("there is no job to watch: 'shoal submit JOB' sends one")
