"""Commands about people: signing in on this machine, projects and their members, tokens, and what was done by whom."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from shoal.cli_input import BadUsage
from shoal.cli_show import say, show_json, table
from shoal.client import Client
from shoal.credentials import read_credentials, write_credentials
from shoal.settings import ClientSettings

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Project = Annotated[str, typer.Argument(metavar="PROJECT", help="A project, as in default.")]
Role = Annotated[str, typer.Option(help="viewer, member or admin.")]
IfMatch = Annotated[
    str | None, typer.Option(metavar="ETAG", help="Only if it still has the etag that 'members --json' showed.")
]
_DAY_S = 86400.0

app = typer.Typer()
token_app = typer.Typer(help="Make, list and revoke tokens.", no_args_is_help=True)
project_app = typer.Typer(help="Projects, and who has which role in them.", no_args_is_help=True)


@app.command()
def login(
    server: Annotated[str | None, typer.Option(metavar="URL", help="The control plane.")] = None,
    token_stdin: Annotated[bool, typer.Option("--token-stdin", help="Read the token from standard input.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a token for a control plane on this machine; other commands use it from then on."""
    token = sys.stdin.readline() if token_stdin else typer.prompt("token", hide_input=True, err=True)
    settings = ClientSettings()
    with Client(server, token.strip()) as client:
        me = client.people.me()
        path = settings.credentials_path
        write_credentials(path, read_credentials(path).with_token(client.server, token.strip()))
    if as_json:
        show_json(me)
    else:
        print(f"signed in to {client.server} as {me['name']}")


@app.command()
def logout(as_json: AsJson = False) -> None:
    """Forget the token for the control plane that commands use now. It stays valid: see 'shoal token revoke'."""
    settings = ClientSettings()
    server, path = settings.find_server(), settings.credentials_path
    write_credentials(path, read_credentials(path).without(server))
    if as_json:
        show_json({"server": server})
    else:
        print(f"no token is kept for {server}")


@app.command()
def whoami(as_json: AsJson = False) -> None:
    """Show who the control plane takes you for, and your roles."""
    with Client() as client:
        me = client.people.me()
    if as_json:
        show_json(me)
        return
    print(f"{me['name']} ({me['id']}, {me['kind']}){', administers the server' if me['server_admin'] else ''}")
    table(("PROJECT", "ROLE"), ((project["id"], project["role"]) for project in me["projects"]))


@app.command()
def audit(
    project: Annotated[str | None, typer.Option(help="Only what concerns this project.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this action, as in job.cancel.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List what was done by whom, and what was refused."""
    with Client() as client:
        found = [
            event
            for event, _ in zip(client.people.audit_events(project=project, action=action), range(limit), strict=False)
        ]
    if as_json:
        show_json({"items": found})
        return
    columns = ("at", "actor_name", "action", "target", "project", "address", "outcome")
    table([name.upper() for name in columns], ([event[name] for name in columns] for event in found))


@token_app.command("create")
def create_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for.")],
    role: Annotated[str, typer.Option(help="viewer, member, admin, connector, metrics or server_admin.")] = "member",
    project: Annotated[str | None, typer.Option(help="Of which project (default: yours).")] = None,
    cluster_id: Annotated[str | None, typer.Option(metavar="ID", help="Of which cluster, for a connector.")] = None,
    days: Annotated[float | None, typer.Option(min=0, help="Valid for so long (default 90; 0: for ever).")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token. Its secret is printed this once, alone on standard output."""
    with Client() as client:
        made = client.people.create_token(
            name,
            role=role,
            project=project,
            cluster_id=cluster_id,
            expires_in_s=days * _DAY_S if days else None,
            lasting=days == 0,
        )
    if as_json:
        show_json(made)
        return
    say(f"{made['id']}: {made['role']} {_of(made)}, {_until(made)}; nobody can find out its secret again")
    print(made["secret"])


@token_app.command("list")
def list_tokens(as_json: AsJson = False) -> None:
    """List tokens, without their secrets."""
    with Client() as client:
        found = list(client.people.tokens())
    if as_json:
        show_json({"items": found})
        return
    rows = ((each["id"], each["name"], each["role"], _of(each), _until(each), each["last_used_at"]) for each in found)
    table(("ID", "NAME", "ROLE", "OF", "VALID", "LAST USED"), rows)


@token_app.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As in tok_01J...")], as_json: AsJson = False
) -> None:
    """Refuse a token from now on."""
    with Client() as client:
        ended = client.people.revoke_token(token_id)
    if as_json:
        show_json(ended)
    else:
        print(f"{ended['id']} ({ended['name']}) is revoked")


@project_app.command("list")
def list_projects(as_json: AsJson = False) -> None:
    """List the projects in which you have a role."""
    with Client() as client:
        found = client.people.projects()
    if as_json:
        show_json({"items": found})
    else:
        table(("PROJECT", "ROLE", "SINCE"), ((each["id"], each["role"], each["created_at"]) for each in found))


@project_app.command("show")
def show_project(project: Project, as_json: AsJson = False) -> None:
    """Show a project, and who has which role in it."""
    with Client() as client:
        found = {**client.people.project(project), "members": client.people.members(project)}
    if as_json:
        show_json(found)
        return
    table(("PROJECT", "ROLE", "SINCE"), [(found["id"], found["role"], found["created_at"])])
    table(("MEMBER", "NAME", "ROLE"), ((each["user_id"], each["name"], each["role"]) for each in found["members"]))


@project_app.command("create")
def create_project(project: Project, as_json: AsJson = False) -> None:
    """Create a project."""
    with Client() as client:
        made = client.people.create_project(project)
    if as_json:
        show_json(made)
    else:
        print(made["id"])


@project_app.command("delete")
def delete_project(project: Project, as_json: AsJson = False) -> None:
    """Delete a project that has had no jobs."""
    with Client() as client:
        client.people.delete_project(project)
    if as_json:
        show_json({"id": project, "deleted": True})
    else:
        print(f"{project} is deleted")


@project_app.command("members")
def members(project: Project, as_json: AsJson = False) -> None:
    """List who has which role in a project."""
    with Client() as client:
        found = client.people.members(project)
    if as_json:
        show_json({"items": found})
    else:
        columns = ("user_id", "name", "email", "role", "since")
        table([name.upper() for name in columns], ([each[name] for name in columns] for each in found))


@project_app.command("add")
def add_member(
    project: Project,
    who: Annotated[str, typer.Argument(metavar="WHO", help="A user's id, or an e-mail address.")],
    role: Role = "member",
    if_match: IfMatch = None,
    as_json: AsJson = False,
) -> None:
    """Give somebody a role in a project, instead of the one that they have."""
    with Client() as client:
        if if_match is None:
            added = client.people.add_member(project, who, role)
        else:
            added = client.people.set_role(project, _user_id(client, project, who), role, if_match=if_match)
    if as_json:
        show_json(added)
    else:
        print(f"{added['name']} ({added['user_id']}) is {added['role']} of {project}")


@project_app.command("remove")
def remove_member(
    project: Project,
    who: Annotated[str, typer.Argument(metavar="WHO", help="A user's id, or an e-mail address.")],
    if_match: IfMatch = None,
    as_json: AsJson = False,
) -> None:
    """Take somebody's role in a project away."""
    with Client() as client:
        user_id = _user_id(client, project, who)
        client.people.remove_member(project, user_id, if_match=if_match)
    if as_json:
        show_json({"project": project, "user_id": user_id, "role": None})
    else:
        print(f"{who} has no role in {project}")


def _user_id(client: Client, project: str, who: str) -> str:
    if who.startswith("user_"):
        return who
    found = [each["user_id"] for each in client.people.members(project) if each["email"] == who.lower()]
    if not found:
        raise BadUsage(f"{who} is no member of project {project}")
    return str(found[0])


def _of(token: dict[str, Any]) -> str:
    if token["project"] is not None:
        return f"of project {token['project']}"
    return f"of cluster {token['cluster_id']}" if token["cluster_id"] else "of the server"


def _until(token: dict[str, Any]) -> str:
    if token["revoked_at"] is not None:
        return f"revoked at {token['revoked_at']}"
    return "for ever" if token["expires_at"] is None else f"until {token['expires_at']}"
