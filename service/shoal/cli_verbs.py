"""`shoal clone`, `prices` and `drills`, and what a dry run prints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shoal.cli_complete import JobId
from shoal.cli_input import BadUsage
from shoal.cli_show import show_json, table
from shoal.client import Client
from shoal_planner.documents import MalformedDocument, read_document

app = typer.Typer()
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def clone(
    job_id: JobId,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="As in train.steps=200; null takes a field away."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would come of it.")] = False,
    key: Annotated[
        str | None, typer.Option("--idempotency-key", metavar="KEY", help="Sent again under it, it is the same job.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Submit a job again, as it was or with other values."""
    overrides = overrides_of(changes or [])
    with Client() as client:
        created = client.clone(job_id, overrides, idempotency_key=key, dry_run=dry_run)
    if dry_run:
        (show_json if as_json else show_dry_run)(created)
    elif as_json:
        show_json(created)
    else:
        print(created["id"])


@app.command()
def checkpoint(
    job_id: JobId,
    if_match: Annotated[str | None, typer.Option(metavar="ETAG", help="Only if the job is as it was then.")] = None,
    as_json: _AsJson = False,
) -> None:
    """Bring the newest step of a job to its object store now."""
    with Client() as client:
        job = client.checkpoint(job_id, if_match=if_match)
    if as_json:
        show_json(job)
    else:
        print(f"{job['id']}: the newest step goes to the object store; 'shoal events {job['id']} -f' shows it come")


def overrides_of(changes: list[str]) -> dict[str, Any]:
    """The nested mapping of FIELD=VALUE pairs; values are JSON or YAML. Raises BadUsage."""
    found: dict[str, Any] = {}
    for change in changes:
        path, given, text = change.partition("=")
        if not given or not all(path.split(".")):
            raise BadUsage(f"--set = {change!r}: must be FIELD=VALUE, as in train.steps=200")
        value = _value(path, text)
        *parents, name = path.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise BadUsage(f"--set = {change!r}: {parent} is set already")
        place[name] = value
    return found


def _value(path: str, text: str) -> Any:
    with contextlib.suppress(ValueError):  # which knows 1e-3 as a number, and YAML does not
        return json.loads(text)
    try:
        found = read_document(f"value: {text}", f"--set {path}")
    except MalformedDocument as error:
        raise BadUsage(str(error)) from error
    assert isinstance(found, Mapping)
    return found["value"]


@app.command()
def spending(as_json: _AsJson = False) -> None:
    """Show what jobs have cost, by project and by who created them."""
    with Client() as client:
        found = client.spending()
    if as_json:
        show_json(found)
        return
    rows = [("project", each["project"], each) for each in found["by_project"]]
    rows += [("person", each["name"], each) for each in found["by_person"]]
    cells = ((kind, name, each["num_jobs"], each["usd"], each["usd_per_hour"]) for kind, name, each in rows)
    table(("", "NAME", "JOBS", "$", "$/H"), cells)
    print(f"of the {found['num_jobs']} newest jobs" + (", more are being added up" if found["not_counted"] else ""))


@app.command()
def prices(as_json: _AsJson = False) -> None:
    """List what nodes of the connected clusters cost an hour."""
    with Client() as client:
        found = client.prices()
    if as_json:
        show_json({"items": found})
        return
    columns = ("CLUSTER", "DEVICE", "DEVICES", "ZONE", "MARKET", "NODES", "$/H", "$/H A DEVICE", "STATED")
    rows = (
        (
            each["cluster_id"],
            each["device"],
            each["devices"],
            each["zone"],
            "spot" if each["spot"] else "on demand",
            each["num_nodes"],
            each["price_per_hour"],
            each["price_per_device_hour"],
            each["stated_at"],
        )
        for each in found
    )
    table(columns, rows)


@app.command()
def drills(
    past: Annotated[bool, typer.Option("--all", help="Those that are over, too, newest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="With --all, at most so many.")] = 50,
    as_json: _AsJson = False,
) -> None:
    """List the drills that go on, or all."""
    with Client() as client:
        found = [*client.drill_history(limit=limit)] if past else client.drills()
    if as_json:
        show_json({"items": found})
        return
    if past:
        cells = ((d["id"], d["cluster_id"], d["node"], d["at"], d["ends_at"], d["created_by"]) for d in found)
        table(("ID", "CLUSTER", "NODE", "ASKED FOR", "ENDS", "BY"), cells)
        return
    rows = ((each["id"], each["cluster_id"], each["node"], each["ends_at"]) for each in found)
    table(("ID", "CLUSTER", "NODE", "ENDS"), rows)


def show_dry_run(found: Mapping[str, Any]) -> None:
    """The answer of a dry run, for people."""
    rows: list[tuple[str, object]] = [("cluster", found["cluster_id"]), ("plan", found["reason"])]
    if (data := found["spec"].get("data")) is not None:
        rows.append(("attention within a", data.get("attention", "sequence")))
    if (expected := found["expected"]) is not None:
        missing = f" (and {expected['unpriced_nodes']} nodes of unknown price)" if expected["unpriced_nodes"] else ""
        rows += [
            ("seconds a step", expected["step_s"]),
            ("tokens/s", expected["tokens_per_s"]),
            ("hours", expected["hours"]),
            ("$/h", _money(expected["usd_per_hour"], missing)),
            ("$ in all", _money(expected["usd"], missing)),
            ("$ per million tokens", _money(expected["usd_per_million_tokens"], missing)),
        ]
    rows += [(each["code"], each["reason"]) for each in found.get("warnings", ())]
    table(("", ""), rows, header=False)
    print("nothing was created")


def _money(usd: float | None, missing: str) -> str:
    return "unknown: no node has a price" if usd is None else f"{usd:,.4g}{missing}"
