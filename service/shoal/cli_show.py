"""What the command line prints: tables and lines for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 300  # without a terminal nothing may be cut off for want of room


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def say(text: str) -> None:
    """A sentence on standard error, where it cannot disturb what programs read."""
    print(f"shoal: {text}", file=sys.stderr)


def show_json(value: object) -> None:
    print(json.dumps(value), flush=True)


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], *, header: bool = True) -> None:
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=header)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    _console().print(made)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("[", "\\[")


def show_jobs(jobs: Iterable[Mapping[str, Any]]) -> None:
    table(
        ("ID", "NAME", "STATE", "STEP", "LOSS", "TOKENS/S", "RECOVERIES", "REASON"),
        (
            (
                job["id"],
                job["name"],
                status["state"],
                _progress(status, "/"),
                status["loss"],
                status["tokens_per_s"],
                status["recoveries"],
                _reason(job),
            )
            for job in jobs
            for status in (job["status"],)
        ),
    )


def _reason(job: Mapping[str, Any]) -> str:
    """Of a server of before no problem is told."""
    problem = job.get("problem")
    return str(job["status"]["reason"] if problem is None else f"{problem['code']}: {problem['reason']}")


def show_job(job: Mapping[str, Any]) -> None:
    status = job["status"]
    rows = [
        ("id", job["id"]),
        ("name", job["name"]),
        ("created by", job.get("created_by")),
        ("state", f"{status['state']} ({status['code']}{_wished(job)})"),
        ("reason", status["reason"]),
        *([("problem", f"{job['problem']['code']}: {job['problem']['reason']}")] if job.get("problem") else []),
        ("since", status["since"]),
        ("step", _progress(status, " of ")),
        ("loss", status["loss"]),
        *([("evaluation", _evaluation(status["evaluation"]))] if status["evaluation"] else []),
        *([("skipped", f"{status['skipped_steps']} steps, done without an update")] if status["skipped_steps"] else []),
        *([("checkpoints", f"none at present: {status['store_problem']}")] if status["store_problem"] else []),
        ("tokens/s", status["tokens_per_s"]),
        ("seconds to go", status["eta_s"]),
        *_exchanges(status["exchanges"]),
        ("recoveries", f"{status['recoveries']} ({status['redone_steps']} steps redone, {status['lost_steps']} lost)"),
        ("plan", None if status["plan_id"] is None else f"{status['plan_id']}, epoch {status['epoch']}"),
        ("cluster", _cluster(job)),
        *_share(job.get("share")),
        *([("if its head dies", job["cluster"]["if_head_dies"])] if job.get("cluster") else []),
        *((tracker["tool"], _tracker(tracker)) for tracker in job.get("trackers", ())),
        *_bulk_losses(job["bulk_losses"]),
        *_cost(job["cost"]),
    ]
    table(("", ""), rows)


def _progress(status: Mapping[str, Any], of: str) -> str:
    """How many steps there are of a script only the script knows."""
    return str(status["step"]) if status["steps"] is None else f"{status['step']}{of}{status['steps']}"


def _cluster(job: Mapping[str, Any]) -> str | None:
    found = job.get("cluster")
    if found is None:
        return str(job["cluster_id"]) if job["cluster_id"] else None
    return f"{found['id']}, {'' if found['connected'] else 'not '}connected"


def _tracker(found: Mapping[str, Any]) -> str:
    far = f"up to step {found['step']}" if found["step"] else "nothing yet"
    if found["complete"]:
        far = f"all {found['step']} steps"
    where = f", {found['url']}" if found["url"] else ""
    failing = f"; nothing since {found['problem_since']}: {found['problem']}" if found["problem"] else ""
    return f"{far}{where}{failing}"


def _wished(job: Mapping[str, Any]) -> str:
    return "; a pause is wished" if job["wish"] == "paused" and job["status"]["state"] != "paused" else ""


def _evaluation(found: Mapping[str, Any]) -> str:
    """A loss that is no number is null."""
    if found["loss"] is None:
        return f"not a number, at step {found['step']}"
    return f"loss {found['loss']:.4f}, perplexity {_cell(found['perplexity'])}, at step {found['step']}"


def _exchanges(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What took time from computing in the newest step, and what was sent."""
    if found is None:
        return []
    kinds = ", ".join(f"{kind} {_seconds(both['mean'])}" for kind, both in found["waited_s"].items())
    shares = f"{found['exposed_share']:.1%} of the step, at most {found['most_exposed_share']:.1%} on a rank"
    sent = ", ".join(f"{link} {count / 1e6:,.3g} MB" for link, count in found["moved_bytes"].items())
    return [
        ("exposed communication", f"{shares} ({kinds})" if kinds else shares),
        ("sent in a step", sent or "nothing"),
    ]


def _bulk_losses(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The costliest of each kind of domain; those that cost nothing are one line."""
    if not found["items"]:
        return []
    worst: dict[str, Mapping[str, Any]] = {}
    for loss in found["items"]:
        worst.setdefault(loss["domain"], loss)
    step = found["stored_step"]
    stands = "nothing stands there yet" if step is None else f"step {step} stands there"
    lines = [
        f"{domain} {loss['name']} ({len(loss['nodes'])} of the nodes): {_megabytes(loss['store_bytes'])}"
        for domain, loss in sorted(worst.items())
    ]
    return [
        ("only in the store after the loss of", "\n".join([*lines, f"of {_megabytes(found['state_bytes'])}; {stands}"]))
    ]


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.3g} MB" if count else "nothing"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _cost(cost: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """What nodes without a price cost is said to be unknown, never nothing."""
    now = sum(charge["num_nodes_now"] for charge in cost["charges"])
    rate = f"{now} {'nodes' if now > 1 else 'node'}: {_usd(cost['usd_per_hour'], cost['unpriced_nodes_now'])}"
    per_million = cost["usd_per_million_tokens"]
    return [
        ("spent so far", _usd(cost["usd"], cost["unpriced_node_hours"]) if cost["charges"] else None),
        ("of it beside plans", _usd(beside) if (beside := cost.get("beside_plans_usd")) else None),
        ("per hour now", rate if now else None),
        ("per million tokens", None if per_million is None else _usd(per_million, cost["unpriced_node_hours"])),
        ("spent on", "\n".join(map(_charge, cost["charges"]))),
        ("all alike", _alike(cost["on_demand_plan"])),
    ]


def _alike(found: Mapping[str, Any] | None) -> str | None:
    """What the job's tokens would have cost on nodes of one kind on demand."""
    if found is None:
        return None
    nodes = f"{found['num_nodes']} x {found['devices']} {found['device']} on demand"
    speed = "as fast" if found["as_fast"] else "slower"
    saved = "" if found["saved_usd"] is None else f", {_usd(abs(found['saved_usd']))} {_direction(found['saved_usd'])}"
    return f"{_usd(found['usd'])} on {nodes}, predicted to be {speed}{saved}"


def _direction(saved_usd: float) -> str:
    return "more" if saved_usd >= 0 else "less"


def _charge(charge: Mapping[str, Any]) -> str:
    nodes = f"{charge['num_nodes']} x {charge['devices']} {charge['device']}{' spot' if charge['spot'] else ''}"
    cost = "cost unknown: no price stated" if charge["usd"] is None else _usd(charge["usd"])
    return f"{nodes}, {charge['node_hours']:.3g} node-hours: {cost}"


def _usd(value: float | None, unknown: float = 0) -> str:
    """With `unknown`, hours or nodes without a price come on top."""
    if value is None:
        return "unknown: no node has a price"
    # Of less than a cent, two figures that mean something.
    amount = f"{value:,.2f}" if value >= 0.01 or not value else f"{value:.2g}"
    return f"at least {amount} USD (some nodes have no price)" if unknown else f"{amount} USD"


def show_plan(plan: Mapping[str, Any]) -> None:
    table(
        ("PIPELINE", "STAGE", "LAYERS", "DEVICES", "TP", "SAMPLES"),
        (
            (
                f"{p} ({pipeline['micro_batches']} x {pipeline['micro_batch']})",
                s,
                ", ".join(f"{first}-{last}" for first, last in stage["layers"]),
                f"{replica['node']}:{','.join(map(str, replica['devices']))}",
                replica["tp"],
                replica["samples"],
            )
            for p, pipeline in enumerate(plan["pipelines"])
            for s, stage in enumerate(pipeline["stages"])
            for replica in stage["replicas"]
        ),
    )
    predicted = plan.get("predicted")
    if predicted:
        print(f"predicted: {predicted['step_s']:.4g} s a step, {predicted['tokens_per_s']:,.0f} tokens per second")
    if plan.get("goodput"):
        print(_expected(plan["goodput"]))
    if plan.get("unused"):
        print(f"not used: {', '.join(plan['unused'])}")
    if plan.get("reason"):
        print(plan["reason"])


def calibrated_by(profile: Mapping[str, Any]) -> str:
    """A sentence: where the figures of a plan came from."""
    found = profile["calibration"]
    if found is None:
        return f"costs: what was measured according to {profile['file']}"
    return (
        f"costs: calibrated on {found['source']} ({profile['file']}), which it fits to {found['error']:.1%} on average"
    )


def _expected(goodput: Mapping[str, Any]) -> str:
    return (
        f"expected with {goodput['interruptions_per_h']:.3g} interruptions an hour: "
        f"{goodput['tokens_per_s']:,.0f} tokens per second, {goodput['share']:.1%} of that; "
        f"copies of the state: {goodput['copies']}, for which each step sends "
        f"{goodput['network_bytes_per_parameter']:.3g} bytes per parameter"
    )


def _loss(value: object) -> str:
    """A loss that is no number travels as text."""
    return f"{value:.4f}" if isinstance(value, int | float) else str(value)


def event_line(event: Mapping[str, Any]) -> str:
    """One journal entry as a line."""
    said = dict(event)
    head = f"{said['at']}  {said['seq']:>6}  {said['kind']:<22}"
    match said["kind"]:
        case "state_changed":
            rest = f"{said['state']}: {said['reason']}"
        case "step_done":
            rest = f"step {said['step']}, loss {_loss(said['loss'])}, {said['duration_s']:.3g} s, epoch {said['epoch']}"
        case "evaluation_done":
            rest = f"step {said['step']}, loss {_loss(said['loss'])} over {said['tokens']:,} held-out tokens"
        case "step_skipped":
            rest = f"step {said['step']} is done without an update: {said['problem']}"
        case "plan_adopted":
            rest = f"plan {said['plan_id']} from step {said['step']}, epoch {said['epoch']}: {said['reason']}"
        case "node_lost":
            rest = f"{said['node']}: {said['evidence']}, noticed after {said['detect_s']:.3g} s"
        case "node_noticed":
            rest = f"{said['node']} is to go away in {said['lead_s']:.3g} s ({said['source']}: {said['why']})"
        case "node_stays" | "node_slowed" | "node_recovered":
            rest = f"{said['node']}: {said['reason']}"
        case "notice_ended":
            rest = f"{said['node']}: the notice of its end ({said['source']}) is over: {said['outcome']}"
        case "node_joined":
            rest = f"{said['node']}: {said['devices']} x {said['device']}"
        case "recovery_done":
            reason = said["reason"].rstrip(".")
            rest = f"{reason}; again from step {said['step']} after {said['total_s']:.3g} s"
            rest += f"; bytes from {_moved(said)}" if said["num_bytes"] else ""
            for failed in said.get("failed_sources", ()):
                what = f"{failed['num_bytes'] / 1e6:.1f} MB of step {failed['step']} in {failed['object']}"
                instead = ", ".join(failed["instead"])
                rest += f"; not used: {what}, {failed['source']}: {failed['problem']}; instead {instead}"
        case "checkpoint_committed":
            rest = f"step {said['step']}, {said['num_bytes'] / 1e6:.1f} MB in {said['duration_s']:.3g} s, {said['uri']}"
        case "checkpoint_failed":
            rest = f"step {said['step']} was not stored in {said['uri']}: {said['problem']}"
        case "store_failed":
            rest = f"{said['uri']} does not take step {said['step']}: {said['problem']}; training goes on"
        case "store_recovered":
            rest = f"{said['uri']} works again after {said['duration_s']:.3g} s: step {said['step']} stands there"
        case "room_short":
            where = "they lie on its disk" if said["on_disk"] else "nor has its disk: plans will keep less there"
            rest = f"{said['node']} has no room in memory for {said['num_bytes'] / 1e6:.1f} MB of snapshots; {where}"
        case "figures_measured":
            profile = said["profile"]
            counts = {
                "layers": len(profile["layers"]),
                "updates": len(profile["updates"]),
                "links": len(profile["links"]) + len(profile["kind_links"]),
            }
            found = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
            rest = f"figures: {found}; {said['num_bytes'] / 1e6:.1f} MB sent for it in {said['duration_s']:.3g} s"
        case "model_seen":
            shape = said["model"]["module"]["shape"]
            entrypoint = said["model"]["module"]["entrypoint"]
            rest = f"the modules of {entrypoint}: {shape['layers']} blocks, {shape['hidden']} wide"
        case "prediction_checked":
            times = said["measured_s"] / said["predicted_s"]
            rest = (
                f"a step takes {said['measured_s']:.3g} s, predicted were {said['predicted_s']:.3g} s "
                f"({times:.2f} times), epoch {said['epoch']}"
            )
        case "script_started":
            rest = f"start {said['attempt']} on {said['node']}: {said['reason']}"
        case "trainer_adjusted":
            rest = "; ".join(f"{name}: {value}" for name, value in said["settings"].items())
        case "workers_started":
            origin = said["checkpoint"] or "nothing stored"
            rest = (
                f"{len(said['nodes'])} on {', '.join(said['nodes'])}, epoch {said['epoch']}, from step {said['step']}"
            )
            rest += f" ({origin})"
        case "script_reported":
            rest = (
                f"step {said['step']}, {', '.join(f'{name} {_cell(value)}' for name, value in said['metrics'].items())}"
            )
        case "checkpoint_reported":
            rest = f"step {said['step']}, {said['num_bytes'] / 1e6:.1f} MB, {said['uri']}"
        case "script_printed":
            rest = "\n    ".join(printed_lines(said))
        case "script_failed":
            who = "the script" if said["rank"] is None else f"worker {said['rank']}"
            rest = f"{who} on {said['node']}: {said['problem']}\n{said['traceback'].rstrip()}"
        case _:
            known = ("seq", "at", "at_s", "kind")
            rest = ", ".join(f"{name} {value}" for name, value in said.items() if name not in known)
    return f"{head}{rest}"


def printed_lines(said: Mapping[str, Any]) -> list[str]:
    """What a script printed, and where lines of it were not kept."""
    left_out = [f"... {said['left_out']} lines were not kept ..."] if said["left_out"] else []
    return [*left_out, *said["lines"]]


def _moved(recovery: Mapping[str, Any]) -> str:
    """Bytes by source, and how fast they came."""
    took_s = recovery.get("source_s", {})
    return ", ".join(
        f"{name} {count / 1e6:.1f} MB"
        + (f" at {count / took_s[name] / 1e6:.0f} MB/s" if count and took_s.get(name) else "")
        for name, count in recovery["num_bytes"].items()
    )


def _share(share: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Of the cluster, beside other jobs; and what is about to run out."""
    if share is None:
        return []
    rows = [("warning", share["warning"])] if share["warning"] else []
    if share["queue_position"] is not None:
        rows.append(("in the queue", f"number {share['queue_position']}"))
    if share["nodes"]:
        leaving = f"; leaves {', '.join(share['leaving'])}" if share["leaving"] else ""
        rows.append(("share", f"{', '.join(share['nodes'])}{leaving}: {share['reason']}"))
    return rows
