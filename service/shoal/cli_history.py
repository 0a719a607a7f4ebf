"""`shoal attempts`, `recoveries`, `plans` and `metrics`: what became of a job, and by which plans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli_complete import JobId
from shoal.cli_plan import write
from shoal.cli_show import show_json, show_plan, table
from shoal.cli_sparks import show_curves
from shoal.client import Client

app = typer.Typer()
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SOURCES = ("own", "node", "peer", "store")
_MOVED = ("nodes_lost", "nodes_drained", "nodes_joined")


@app.command()
def attempts(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the attempts (epochs) of a job: what each was for, what it did, and what became of it."""
    with Client() as client:
        found = list(client.attempts(job_id, limit=limit))
    if as_json:
        show_json({"items": found})
        return
    columns = ("ATTEMPT", "CLUSTER", "CAUSE", "BEGAN", "ENDED", "STEPS", "REDONE", "LOST", "NODES", "OUTCOME")
    rows = (
        (
            each["attempt"],
            each["cluster_id"],
            each["cause"],
            each["began_at"],
            each["ended_at"],
            f"{each['from_step']}-{each['last_step']}",
            each["redone_steps"],
            each["lost_steps"],
            len(each["nodes"]),
            each["outcome"],
        )
        for each in found
    )
    table(columns, rows)


@app.command()
def recoveries(job_id: JobId, as_json: AsJson = False) -> None:
    """List the changes of plan of a job: what each was for, what it took, and where the state came from."""
    with Client() as client:
        found = client.recoveries(job_id)
    if as_json:
        show_json(found)
        return
    phases = ("detect_s", "decide_s", "restore_s", "rebuild_s", "total_s")
    heads = (phase.removesuffix("_s").upper() for phase in phases)
    columns = ("CAUSE", "NODES", "FROM STEP", "REDONE", "LOST", *heads, "STATE FROM", "PLANS")
    rows = (
        (
            each["cause"],
            ", ".join(name for moved in _MOVED for name in each.get(moved, ())),
            each["step"],
            each["redone_steps"],
            each["lost_steps"],
            *(f"{1000 * each[phase]:.0f} ms" for phase in phases),
            _brought(each),
            " to ".join(filter(None, (each.get("plan_before"), each.get("plan_after")))),
        )
        for each in found["items"]
    )
    table(columns, rows)
    for each in found["items"]:
        for known in each.get("known_by", ()):
            print(f"from step {each['step']}: {_known(known)}")
        for failed in each.get("failed_sources", ()):
            instead = ", ".join(failed["instead"]) or "nothing"
            what = f"{failed['source']} ({failed['object']}): {failed['problem']}"
            print(f"from step {each['step']}: {what}; {instead} instead")
    if len(found["items"]) < found["total"]:
        print(f"the newest {len(found['items'])} of {found['total']}")


def _known(known: Mapping[str, Any]) -> str:
    """How a node came to be known to go."""
    notice, loss = known["notice"], known["loss"]
    if notice is None:
        return (
            f"{known['node']} was lost without notice ({loss['evidence']}), seen after {1000 * loss['detect_s']:.0f} ms"
        )
    words = f"{known['node']} had a notice by {notice['source']} ({notice['why']}) of {notice['lead_s']:.0f} s"
    return words if loss is None else f"{words}, and was lost {known['loss_after_notice_s']:.0f} s after it"


def _brought(recovery: Mapping[str, Any]) -> str:
    """How much state came from where, and how fast."""
    found = []
    for source in _SOURCES:
        if num_bytes := recovery["bytes"].get(source):
            rate = recovery["bytes_per_s"].get(source)
            found.append(f"{source} {num_bytes / 1e6:.1f} MB" + (f" at {rate / 1e6:.0f} MB/s" if rate else ""))
    return ", ".join(found)


@app.command()
def plans(
    job_id: JobId,
    epoch: Annotated[int | None, typer.Option(min=0, help="That of this epoch (default: the newest).")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan there as a picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan that a job runs by, or ran by, and list all its plans."""
    with Client() as client:
        found = client.plan(job_id, epoch=epoch)
        if svg is not None:
            write(svg, client.plan_svg(job_id, epoch=epoch), "--svg")
    if as_json:
        show_json(found)
        return
    show_plan(found["plan"])
    print()
    columns = ("epoch", "plan_id", "step", "since", "reason")
    table([name.upper() for name in columns], ([each[name] for name in columns] for each in found["generations"]))


@app.command()
def metrics(
    job_id: JobId,
    max_points: Annotated[int, typer.Option(min=10, max=450, help="At most so many points.")] = 30,
    from_step: Annotated[int | None, typer.Option(min=0, help="Only from this step on.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Only up to this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the loss curve of a job, as a table and in a line: what counts, without steps that were rolled back."""
    with Client() as client:
        found = client.metrics(job_id, max_points=max_points, from_step=from_step, to_step=to_step)
    if as_json:
        show_json(found)
        return
    columns = ("step", "epoch", "at", "loss", "tokens_per_s", "lr", "grad_norm")
    there = [name for name in columns if any(name in point for point in found["points"])]
    table([name.upper() for name in there], ([point.get(name) for name in there] for point in found["points"]))
    show_curves(found["points"], [name for name in ("loss", "grad_norm", "tokens_per_s") if name in there])
    for each in found["evaluations"]:
        print(f"evaluation at step {each['step']}: loss {each['loss']}")
