"""`shoal storage`: how the object stores of a project are reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shoal.cli_show import show_json, table
from shoal.client import Client
from shoal.settings import ClientSettings
from shoal_recovery.storage_access import StoreAccess, located

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="As jobs name it, as in minio.")]
Project = Annotated[str | None, typer.Option(help="Whose it is (default SHOAL_PROJECT, or default).")]
IfMatch = Annotated[
    str | None, typer.Option(metavar="ETAG", help="Only if it still has the etag that 'list --json' showed.")
]

storage_app = typer.Typer(help="Storage profiles: how object stores of a project are reached.", no_args_is_help=True)


@storage_app.command("set")
def set_storage(
    name: Name,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Where the S3 protocol is spoken.")] = None,
    region: Annotated[str | None, typer.Option(help="As in eu-west-1.")] = None,
    environment: Annotated[
        str | None, typer.Option(metavar="X", help="Credentials are in SHOAL_STORAGE_X_ACCESS_KEY_ID and so on.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="X", help="Credentials are in the section shoal-X of the AWS credentials file."),
    ] = None,
    project: Project = None,
    if_match: IfMatch = None,
    as_json: AsJson = False,
) -> None:
    """Make a storage profile, or replace it."""
    with Client() as client:
        made = client.storages(_project(project)).set(
            name, endpoint=endpoint, region=region, environment=environment, profile=profile, if_match=if_match
        )
    if as_json:
        show_json(made)
    else:
        print(f"{made['name']} of project {made['project']}: {made['endpoint'] or 'Amazon S3'}, {_credentials(made)}")


@storage_app.command("list")
def list_storages(project: Project = None, as_json: AsJson = False) -> None:
    """List the storage profiles of a project."""
    with Client() as client:
        found = client.storages(_project(project)).list()
    if as_json:
        show_json({"items": found})
        return
    rows = ((each["name"], each["endpoint"], each["region"], _credentials(each), each["updated_at"]) for each in found)
    table(("NAME", "ENDPOINT", "REGION", "CREDENTIALS", "CHANGED"), rows)


@storage_app.command("delete")
def delete_storage(name: Name, project: Project = None, if_match: IfMatch = None, as_json: AsJson = False) -> None:
    """Delete a storage profile that no job needs any more."""
    with Client() as client:
        client.storages(_project(project)).delete(name, if_match=if_match)
    if as_json:
        show_json({"name": name, "project": _project(project), "deleted": True})
    else:
        print(f"{name} is deleted")


def place_of(client: Client, job: Mapping[str, Any]) -> str | None:
    """Where the job's checkpoints are, as they are opened from here. Raises ShoalError."""
    checkpoint = job["spec"].get("checkpoint") or {}
    uri, name = checkpoint.get("uri"), checkpoint.get("storage")
    if uri is None or name is None:
        return uri
    found = client.storages(job["project"]).get(name)
    credentials = found["credentials"] or {}
    access = StoreAccess(
        endpoint=found["endpoint"],
        region=found["region"],
        keys=credentials.get("environment"),
        profile=credentials.get("profile"),
    )
    return located(uri, access)


def _project(given: str | None) -> str:
    return given or ClientSettings().project or "default"


def _credentials(storage: Mapping[str, Any]) -> str:
    named = storage["credentials"] or {}
    if named.get("environment"):
        return f"credentials in SHOAL_STORAGE_{named['environment']}_..."
    return f"credentials in the section shoal-{named['profile']}" if named.get("profile") else "no credentials named"
