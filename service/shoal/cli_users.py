"""`shoal user`: people who have signed in or are invited, for administrators of the server."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli_show import show_json, table
from shoal.client import Client

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
UserId = Annotated[str, typer.Argument(metavar="ID", help="As in user_01J...")]
IfMatch = Annotated[
    str | None, typer.Option(metavar="ETAG", help="Only if it still has the etag that 'list --json' showed.")
]

user_app = typer.Typer(help="Users of the server.", no_args_is_help=True)


@user_app.command("list")
def list_users(as_json: AsJson = False) -> None:
    """List all users."""
    with Client() as client:
        found = list(client.people.users())
    if as_json:
        show_json({"items": found})
        return
    columns = ("id", "name", "email", "server_admin", "created_at", "seen_at")
    table([name.upper() for name in columns], ([each[name] for name in columns] for each in found))


@user_app.command("admin")
def make_admin(
    user_id: UserId,
    off: Annotated[bool, typer.Option("--off", help="No more.")] = False,
    if_match: IfMatch = None,
    as_json: AsJson = False,
) -> None:
    """Make a user an administrator of the server, or no more."""
    with Client() as client:
        changed = client.people.change_user(user_id, server_admin=not off, if_match=if_match)
    if as_json:
        show_json(changed)
    else:
        does = "administers" if changed["server_admin"] else "no longer administers"
        print(f"{changed['name']} ({changed['id']}) {does} the server")


@user_app.command("delete")
def delete_user(user_id: UserId, if_match: IfMatch = None, as_json: AsJson = False) -> None:
    """Delete a user with roles, sessions and tokens."""
    with Client() as client:
        client.people.delete_user(user_id, if_match=if_match)
    if as_json:
        show_json({"id": user_id, "deleted": True})
    else:
        print(f"{user_id} is deleted")
