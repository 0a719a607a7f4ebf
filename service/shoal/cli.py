"""The command line: `shoal`. Exit status 0 done, 1 failed (or a job that failed), 2 wrong usage or bad input; more of
them, for commands that wait for a job, in `cli_state`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import signal
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import (
    cli_calibrate,
    cli_checkpoints,
    cli_clusters,
    cli_debug,
    cli_first,
    cli_generate,
    cli_history,
    cli_limits,
    cli_logs,
    cli_people,
    cli_plan,
    cli_pools,
    cli_rent,
    cli_schema,
    cli_storages,
    cli_users,
    cli_verbs,
    cli_watch,
    cli_webhooks,
)
from shoal.cli_again import Watched, show_list
from shoal.cli_complete import JobId, complete_node
from shoal.cli_input import BadUsage, read_submission
from shoal.cli_nodes import show_nodes
from shoal.cli_show import event_line, say, show_job, show_jobs, show_json
from shoal.cli_state import TIMED_OUT, exit_with, hinted, show_state
from shoal.client import Client
from shoal.errors import InvalidRequest, NotAServer, NotFound, RequestRefused, ShoalError, WaitTimeout

app = typer.Typer(
    name="shoal",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.registered_commands.extend(cli_plan.app.registered_commands)
app.registered_commands.extend(cli_rent.app.registered_commands)
app.registered_commands.extend(cli_calibrate.app.registered_commands)
app.registered_commands.extend(cli_checkpoints.app.registered_commands)
app.registered_commands.extend(cli_generate.app.registered_commands)
app.registered_commands.extend(cli_people.app.registered_commands)
app.add_typer(cli_people.token_app, name="token")
app.add_typer(cli_people.project_app, name="project")
app.add_typer(cli_webhooks.app, name="webhooks")
app.registered_commands.extend(cli_history.app.registered_commands)
app.registered_commands.extend(cli_logs.app.registered_commands)
app.registered_commands.extend(cli_schema.app.registered_commands)
app.registered_commands.extend(cli_verbs.app.registered_commands)
app.registered_commands.extend(cli_watch.app.registered_commands)
app.registered_commands.extend(cli_limits.app.registered_commands)
app.registered_commands.extend(cli_clusters.app.registered_commands)
app.registered_commands.extend(cli_pools.app.registered_commands)
app.registered_commands.extend(cli_debug.app.registered_commands)
app.add_typer(cli_users.user_app, name="user")
app.add_typer(cli_storages.storage_app, name="storage")
AsJson = cli_plan.AsJson
_UsageError: Any = typer.BadParameter.__mro__[1]  # typer carries a click of its own and does not export this class
IfMatch = Annotated[
    str | None, typer.Option(metavar="ETAG", help="Only if the job is as it was when 'status' showed this ETag.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {metadata.version('shoal')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def first(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Trains one large model on machines that may vanish. SHOAL_SERVER and SHOAL_TOKEN say where and as whom."""
    if context.invoked_subcommand is None:
        cli_first.welcome()


@app.command()
def submit(
    job: cli_plan.Job,
    follow: Annotated[bool, typer.Option("--follow", help="Print its events until it has ended.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Watch it until it has ended, as 'shoal watch' does.")] = False,
    project: Annotated[str | None, typer.Option(help="Whose it is (default SHOAL_PROJECT, or your only one).")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would come of it, and what it costs.")
    ] = False,
    key: Annotated[
        str | None, typer.Option("--idempotency-key", metavar="KEY", help="Sent again under it, it is the same job.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a job."""
    spec = read_submission(job)
    if dry_run:
        with Client() as client:
            found = client.dry_run(spec, project=project)
        (show_json if as_json else cli_verbs.show_dry_run)(found)
        return
    with Client() as client:
        created = client.submit(spec, project=project, idempotency_key=key)
        if not as_json:
            print(created["id"])
        if watch:
            created = cli_watch.look_on(client, created["id"], quiet=as_json)
        elif follow:
            say(f"{created['id']} was created; {created['status']['reason']}")
            created = _follow(client, created["id"], quiet=as_json)
    if as_json:
        show_json(created)
    if follow or watch:
        exit_with(created)


@app.command("list")
def list_jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Only jobs with this in the name.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only jobs with this label.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only jobs created since: 2h, 1d, or a time.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only jobs created until then.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 50,
    project: Annotated[str | None, typer.Option(help="Only jobs of this project.")] = None,
    created_by: Annotated[
        str | None, typer.Option("--by", metavar="WHO", help="Only jobs that they created: me, admin, a user's id.")
    ] = None,
    watch: Watched = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with Client() as client:
        now = datetime.now(UTC)
        created = {
            "created_since": since and cli_logs.moment("--since", since, now),
            "created_until": until and cli_logs.moment("--until", until, now),
        }
        wanted = {"state": state, "name": name, "project": project, "created_by": created_by, **created}
        ask = functools.partial(client.list, **wanted, labels=label or (), limit=limit)
        show_list(lambda: list(ask()), show_jobs, as_json=as_json, watch=watch)


@app.command()
def status(job_id: JobId, as_json: AsJson = False) -> None:
    """Show a job: state, reason, progress, cost, what a loss of many nodes would cost."""
    with Client() as client:
        job = client.get(job_id)
        job["cost"] = client.cost(job_id)
        job["bulk_losses"] = client.bulk_losses(job_id)
        job["etag"] = client.etag(job_id)
    if as_json:
        show_json(job)
    else:
        show_job(job)


@app.command()
def events(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only entries after this number.")] = 0,
    kind: Annotated[list[str] | None, typer.Option(help="Only entries of this kind, as in recovery_done.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a job's journal, after what was asked of pools for it."""
    seen: list[dict[str, Any]] = []
    rented: list[dict[str, Any]] = []
    with Client() as client:
        if after == 0 and not kind:
            with contextlib.suppress(RequestRefused):  # of a server before this one, or by who may see journals alone
                rented = client.pool_events(job_id=job_id)
        for asked in () if as_json else rented:
            print(cli_pools.pool_event_line(asked), flush=True)
        live = follow and not (as_json or kind or after)
        with cli_pools.PoolEventLines(client, job_id, rented) if live else contextlib.nullcontext():
            for event in client.events(job_id, after=after, follow=follow, kinds=kind or ()):
                if as_json:
                    seen.append(event)
                else:
                    print(event_line(event), flush=True)
    if as_json:
        show_json({"items": seen, "pool_events": rented})


@app.command()
def cancel(job_id: JobId, if_match: IfMatch = None, as_json: AsJson = False) -> None:
    """Ask a job to stop."""
    with Client() as client:
        show_state(client.cancel(job_id, if_match=if_match), as_json)


@app.command()
def pause(job_id: JobId, if_match: IfMatch = None, as_json: AsJson = False) -> None:
    """Ask a job to rest in its object store, which frees its nodes."""
    with Client() as client:
        show_state(client.pause(job_id, if_match=if_match), as_json)


@app.command()
def resume(job_id: JobId, if_match: IfMatch = None, as_json: AsJson = False) -> None:
    """Let a paused job go on, on the nodes that there are now."""
    with Client() as client:
        show_state(client.resume(job_id, if_match=if_match), as_json)


@app.command()
def nodes(watch: Watched = False, as_json: AsJson = False) -> None:
    """List the nodes of all clusters that have connected."""
    with Client() as client:
        show_list(client.nodes, show_nodes, as_json=as_json, watch=watch)


@app.command()
def preempt(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name.", autocompletion=complete_node)],
    notice: Annotated[
        float, typer.Option("--notice", "--grace", metavar="S", min=0, max=86400, help="Seconds until it goes away.")
    ] = 120.0,
    cluster_id: Annotated[str | None, typer.Option(metavar="ID", help="Whose, where several have such a node.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell a node that it goes away, as a drill: jobs leave it before that, and nothing ends it."""
    with Client() as client:
        drill = client.preempt(node, notice_s=notice, cluster_id=cluster_id)
    if as_json:
        show_json(drill)
    else:
        print(f"{drill['node']} of cluster {drill['cluster_id']} is told that it goes away at {drill['ends_at']}")


@app.command("sign-in")
def sign_in(as_json: AsJson = False) -> None:
    """Make a link that signs one browser in, once."""
    with Client() as client:
        link = client.login_link()
    if as_json:
        show_json(link)
    else:
        print(link["url"])


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on (default 8700).")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="postgresql://... or sqlite:///FILE (default: a file in the data dir).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where token and database are (default ~/.shoal).")] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain to serve HTTPS with.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key.")] = None,
    behind_proxy: Annotated[
        bool | None, typer.Option("--behind-proxy", help="A proxy in front of this speaks TLS.")
    ] = None,
    file_roots: Annotated[
        str | None, typer.Option(metavar="DIR[:DIR]", help="Below which folders jobs may name places (default none).")
    ] = None,
) -> None:
    """Run the control plane alone. SHOAL_ variables set what options do not."""
    server = _optional("shoal_service.server", "serve", "server")
    settings = _optional("shoal_service.settings", "serve", "server")
    given = {"host": host, "port": port, "database_url": database_url, "data_dir": data_dir}
    given |= {"tls_cert": tls_cert, "tls_key": tls_key, "behind_proxy": behind_proxy, "file_roots": file_roots}
    try:
        server.run(settings.Settings(**{name: value for name, value in given.items() if value is not None}))
    except ValueError as error:
        raise BadUsage(str(error)) from error


@app.command()
def migrate(
    database_url: Annotated[
        str | None, typer.Option(help="postgresql://... or sqlite:///FILE (default: a file in the data dir).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the default database is (default ~/.shoal).")] = None,
) -> None:
    """Bring the control plane's database to this version before one of this version serves."""
    server = _optional("shoal_service.server", "migrate", "server")
    settings = _optional("shoal_service.settings", "migrate", "server")
    given = {"database_url": database_url, "data_dir": data_dir}
    try:
        server.run_migrations(settings.Settings(**{name: value for name, value in given.items() if value is not None}))
    except ValueError as error:
        raise BadUsage(str(error)) from error
    say("the database has the tables of this version")


@app.command()
def up(
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="The nodes to start (default: our own).")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="SHOAL_PORT", help="Port of the control plane.")] = 8700,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where token, database and state go.")] = None,
) -> None:
    """Start a local cluster of unequal nodes with a control plane; Ctrl-C stops all of it."""
    run_up = _optional("shoal.up", "up", "server,worker").run_up
    raise typer.Exit(run_up(cluster=cluster, port=port, data_dir=data_dir) or 0)


@app.command()
def connect(
    server: Annotated[str, typer.Option(metavar="URL", help="The control plane.")],
    cluster_id: Annotated[str, typer.Option(metavar="ID", help="What it shall call this cluster.")] = "ray",
    address: Annotated[str, typer.Option(help="Address of the Ray cluster.")] = "auto",
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for both, and stay to start the connector again where it has ended.")
    ] = False,
) -> None:
    """On a Ray cluster: offer it to a control plane."""
    connecting = _optional("shoal.connect", "connect", "worker")
    (connecting.stay_connected if stay else connecting.run_connect)(
        server=server, cluster_id=cluster_id, address=address
    )


@app.command("pre-stop")
def pre_stop(limit: Annotated[float, typer.Argument(metavar="SECONDS", min=0, help="The longest to wait.")]) -> None:
    """On a node that is to go away: wait until no job computes there any more."""
    _optional("shoal.connect", "pre-stop", "worker").wait_for_leave(limit)


@app.command()
def demo(
    as_json: AsJson = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the page up at the end.")] = False,
) -> None:
    """Train a small model on a local cluster, kill a node on the way, and show what happened."""
    run_demo = _optional("shoal.demo", "demo", "server,worker").run_demo
    raise typer.Exit(run_demo(as_json=as_json, keep=keep) or 0)


def _optional(module: str, command: str, extra: str) -> Any:
    """A module that needs more than the client does. Raises BadUsage where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadUsage(f"'shoal {command}' needs {error.name}: install shoal[{extra}] from its wheel") from error


def _follow(client: Client, job_id: str, *, quiet: bool) -> dict[str, Any]:
    for event in client.events(job_id, follow=True):
        print(event_line(event), file=sys.stderr if quiet else sys.stdout, flush=True)
    return client.get(job_id)


def run(arguments: list[str] | None = None) -> int:
    """The exit status of one command line."""
    try:
        return app(arguments, standalone_mode=False, prog_name="shoal") or 0
    except (BadUsage, InvalidRequest, NotAServer, NotFound) as error:
        say(hinted(error))
        return 2
    except _UsageError as error:
        of = error.ctx.command_path if error.ctx is not None else "shoal"
        say(f"{error.format_message().rstrip('.')}; '{of} --help' says what there is")
        return 2
    except ShoalError as error:
        say(hinted(error))
        return TIMED_OUT if isinstance(error, WaitTimeout) else 1
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    # Whatever a command has started ends with it, also where not a terminal but a service manager stops it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run())
