"""Commands about webhooks: addresses that are told of what happens to jobs."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

import typer

from shoal.cli_input import BadUsage
from shoal.cli_show import say, show_json, table
from shoal.client import Client

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="A webhook's id, as in hook_01J...")]
Events = Annotated[
    list[str] | None, typer.Option("--event", metavar="EVENT", help="What to tell, as job.failed (default: all).")
]
Form = Annotated[
    str | None, typer.Option("--form", metavar="FORM", help="json (default), slack, or email (URL is mailto:ADDRESS).")
]
IfMatch = Annotated[
    str | None, typer.Option(metavar="ETAG", help="Only if it still has the etag that 'list --json' showed.")
]
Overlap = Annotated[
    float,
    typer.Option(metavar="S", min=0.0, help="For so many seconds the secret before signs as well; 0: not at all."),
]

app = typer.Typer(help="Have other programs told of what happens to jobs.", no_args_is_help=True)


@app.command("list")
def list_webhooks(as_json: AsJson = False) -> None:
    """List the webhooks that you administer."""
    with Client() as client:
        found = client.webhooks.all()
    if as_json:
        show_json({"items": found})
    else:
        rows = ((each["id"], each["project"] or "(all)", each["url"], _state(each)) for each in found)
        table(("WEBHOOK", "PROJECT", "URL", "STATE"), rows)


@app.command("create")
def create(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to post to.")],
    form: Form = None,
    event: Events = None,
    project: Annotated[str | None, typer.Option(help="Whose jobs (default: your project's).")] = None,
    all_projects: Annotated[bool, typer.Option("--all-projects", help="All jobs of the server.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a webhook. The secret that signs what it is told is printed this once, alone on standard output."""
    if all_projects and project is not None:
        raise BadUsage("--project and --all-projects exclude each other")
    with Client() as client:
        made = client.webhooks.create(url, form=form, events=event or (), project=project, all_projects=all_projects)
    _show_secret(made, as_json=as_json)


@app.command("change")
def change(
    webhook_id: Id,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Where to post to.")] = None,
    form: Form = None,
    event: Events = None,
    enabled: Annotated[bool | None, typer.Option("--enable/--disable", help="Whether it is told anything.")] = None,
    if_match: IfMatch = None,
    as_json: AsJson = False,
) -> None:
    """Change what is given."""
    with Client() as client:
        changed = client.webhooks.change(
            webhook_id, url=url, form=form, events=event or (), enabled=enabled, if_match=if_match
        )
    if as_json:
        show_json(changed)
    else:
        print(f"{changed['id']} {_state(changed)}: {', '.join(changed['events'])} to {changed['url']}")


@app.command("delete")
def delete(webhook_id: Id, if_match: IfMatch = None) -> None:
    """Delete a webhook, and the record of what it was told."""
    with Client() as client:
        client.webhooks.delete(webhook_id, if_match=if_match)
    print(f"{webhook_id} is deleted")


@app.command("renew-secret")
def renew_secret(webhook_id: Id, overlap: Overlap = 86400.0, as_json: AsJson = False) -> None:
    """Sign with another secret from now on. It is printed this once, alone on standard output."""
    with Client() as client:
        made = client.webhooks.renew_secret(webhook_id, overlap_s=overlap)
    _show_secret(made, as_json=as_json)


@app.command("ping")
def ping(webhook_id: Id, as_json: AsJson = False) -> None:
    """Tell a webhook something, to see whether it hears."""
    with Client() as client:
        made = client.webhooks.ping(webhook_id)
    if as_json:
        show_json(made)
    else:
        print(f"{made['id']}; 'shoal webhooks deliveries {webhook_id}' shows what comes of it")


@app.command("deliveries")
def deliveries(
    webhook_id: Id,
    state: Annotated[str | None, typer.Option(help="Only those that are pending, delivered or failed.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List what a webhook was told, or is to be."""
    with Client() as client:
        found = list(islice(client.webhooks.deliveries(webhook_id, state=state), limit))
    if as_json:
        show_json({"items": found})
        return
    rows = ((d["id"], d["created_at"], d["event"], d["job"], d["state"], d["attempts"], d["problem"]) for d in found)
    table(("DELIVERY", "SINCE", "EVENT", "JOB", "STATE", "ATTEMPTS", "PROBLEM"), rows)


@app.command("retry")
def retry(
    webhook_id: Id,
    delivery_id: Annotated[str, typer.Argument(metavar="DELIVERY", help="A delivery's id, as in msg_01J...")],
    as_json: AsJson = False,
) -> None:
    """Make a delivery again."""
    with Client() as client:
        made = client.webhooks.retry(webhook_id, delivery_id)
    if as_json:
        show_json(made)
    else:
        print(f"{made['id']} is {made['state']}")


def _show_secret(made: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(made)
        return
    say(f"{made['id']}: {', '.join(made['events'])} to {made['url']}; nobody can find out its secret again")
    print(made["secret"])


def _state(webhook: dict[str, Any]) -> str:
    what = "enabled" if webhook["enabled"] else "disabled"
    return f"{what}: {webhook['problem']}" if webhook["problem"] else what
