"""`shoal demo`: the main job, start to end. A small model trains over REST on an uneven local cluster; a node is killed
without notice, later another one joins; then the same job runs undisturbed in one process, and the two are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cli_show import say, show_json, table
from shoal.client import Client
from shoal.demo_report import Reference, broken_promises, plan_lines, report
from shoal.errors import ShoalError
from shoal.local_shoal import DEFAULT_CLUSTER, LocalOptions, LocalShoal

KILL_AFTER_STEP = 15
JOIN_AFTER_STEP = 25
LATE_NODE = "small-3"
_SMALL_MEMORY_GIB = 0.045
_REFERENCE_LIMIT_S = 600

# As many layers as one pipeline of all four devices could not share evenly: however fast each of them is found to be,
# two pipelines are faster.
JOB: Mapping[str, Any] = {
    "name": "demo",
    "model": {
        **{"family": "llama", "layers": 9, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 688, "vocab": 256},
        "tie_embeddings": True,
    },
    "data": {"uri": "stdlib:", "tokenizer": "bytes"},
    "train": {"global_batch": 8, "seq_len": 64, "steps": 60, "lr": 3.0e-4, "warmup_steps": 10, "seed": 0},
}


class DemoFailed(ShoalError):
    pass


def run_demo(*, as_json: bool, keep: bool) -> int:
    """0 if everything that the demo promises was seen, else 1."""
    data_dir = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    options = LocalOptions(cluster=_cluster(), data_dir=data_dir, port=0, later=(LATE_NODE,))
    try:
        with LocalShoal(options, say) as shoal, shoal.client() as client:
            figures = _run(shoal, client, data_dir)
            problems = broken_promises(figures)
            _show(figures, problems, as_json=as_json)
            if keep:
                _leave_up(shoal, client, figures["job_id"])
    finally:
        if not keep:
            shutil.rmtree(data_dir, ignore_errors=True)
    return 1 if problems else 0


def _cluster() -> dict[str, Any]:
    """The default cluster, and one more small node that joins later. No small one has room for the weights and
    gradients of the whole model: whatever is measured on a busy machine, the pipelines differ.
    """
    big, small = DEFAULT_CLUSTER["nodes"]
    return {
        **DEFAULT_CLUSTER,
        "nodes": [big, {**small, "count": small["count"] + 1}],
        "devices": {**DEFAULT_CLUSTER["devices"], small["device"]: {"memory_gib": _SMALL_MEMORY_GIB}},
    }


def _run(shoal: LocalShoal, client: Client, data_dir: Path) -> dict[str, Any]:
    spec = {**JOB, "checkpoint": {"uri": (data_dir / "checkpoints").as_uri(), "every_steps": 20}}
    job = client.submit(spec)
    url = f"{shoal.url}/jobs/{job['id']}"
    say(f"watch it       {_link(client, job['id'])}")
    events = _follow(shoal, client, job["id"])
    job = client.get(job["id"])
    if job["status"]["state"] != "succeeded":
        raise DemoFailed(f"the job ended as {job['status']['state']}: {job['status']['reason']}")
    say("the same job again, undisturbed in one process")
    figures = report(events, _reference(job["spec"]), JOB["train"]["global_batch"])
    return {**figures, "job_id": job["id"], "dashboard_url": url}


def _follow(shoal: LocalShoal, client: Client, job_id: str) -> list[dict[str, Any]]:
    """Watches the job to its end, and does the killing and the adding on the way."""
    events: list[dict[str, Any]] = []
    plan: Mapping[str, Any] = {}
    killed = joined = False
    for event in client.events(job_id, follow=True):
        events.append(event)
        _tell(event)
        if event["kind"] == "plan_adopted":
            plan = event["plan"]
        if event["kind"] == "step_done" and event["step"] >= KILL_AFTER_STEP and not killed:
            killed = True
            node = _victim(plan)
            say(f"KILL           {node}: SIGKILL to its raylet and all it started, its folders deleted")
            shoal.kill(node)
        if event["kind"] == "step_done" and event["step"] >= JOIN_AFTER_STEP and not joined:
            joined = True
            say(f"JOIN           {LATE_NODE}")
            shoal.add(LATE_NODE)
    return events


def _victim(plan: Mapping[str, Any]) -> str:
    """A node in the middle of the longest pipeline: both its neighbours have to do without it."""
    stages = max((pipeline["stages"] for pipeline in plan["pipelines"]), key=len)
    node: str = stages[len(stages) // 2]["replicas"][0]["node"]
    return node


def _tell(event: Mapping[str, Any]) -> None:
    match event["kind"]:
        case "step_done":
            if event["step"] % 5 == 0 or event["step"] == 1:
                say(f"step {event['step']:4d}      loss {event['loss']:.4f}   {event['duration_s']:.2f} s")
        case "state_changed":
            say(f"{event['state']:14s} {event['reason']}")
        case "plan_adopted":
            say(f"plan           {event['plan_id']} in epoch {event['epoch']}, from step {event['step']} on")
            for line in plan_lines(event["plan"]):
                say(f"               {line}")
        case "recovery_done":
            say(f"recovered      {event['total_s']:.2f} s after {event['cause']}; redone steps {event['redone_steps']}")
        case "node_joined":
            say(f"node ready     {event['node']} ({event['devices']} x {event['device']})")
        case "checkpoint_committed":
            say(f"checkpoint     step {event['step']}, {event['num_bytes'] / 1e6:.1f} MB")
        case "prediction_checked":
            say(f"step time      {event['measured_s']:.2f} s; {event['predicted_s']:.2f} s were predicted")
        case "checkpoint_failed":
            say(f"no checkpoint  step {event['step']}: {event['problem']}")


def _reference(spec: Mapping[str, Any]) -> Reference:
    done = subprocess.run(
        [sys.executable, "-m", "shoal_workers.reference"],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        timeout=_REFERENCE_LIMIT_S,
        check=False,
        # Its threads would spin at barriers on cores that the cluster still has work for, and take ten times as long.
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    if done.returncode:
        raise DemoFailed(f"the undisturbed run failed: {done.stderr.strip()[-500:]}")
    run = json.loads(done.stdout)
    return Reference(loss=run["losses"][-1], step_s=run["step_s"])


def _show(figures: Mapping[str, Any], problems: list[str], *, as_json: bool) -> None:
    if as_json:
        show_json(figures)
    else:
        _show_tables(figures)
    for problem in problems:
        say(f"NOT AS PROMISED: {problem}")


def _show_tables(figures: Mapping[str, Any]) -> None:
    print()
    table(
        ("CHANGE OF PLAN", "NODE", "FROM STEP", "REDONE", "LOST", "DETECT", "DECIDE", "RESTORE", "REBUILD", "TOTAL"),
        (
            (
                recovery["cause"],
                ", ".join([*recovery["nodes_lost"], *recovery["nodes_joined"]]),
                recovery["step"],
                recovery["redone_steps"],
                recovery["lost_steps"],
                *(
                    f"{recovery[phase]:.2f} s"
                    for phase in ("detect_s", "decide_s", "restore_s", "rebuild_s", "total_s")
                ),
            )
            for recovery in figures["recoveries"]
        ),
    )
    print()
    table(
        ("BYTES FROM", *(recovery["cause"] for recovery in figures["recoveries"])),
        (
            (source, *(f"{recovery['bytes'][source] / 1e6:.1f} MB" for recovery in figures["recoveries"]))
            for source in ("own", "node", "peer", "store")
        ),
    )
    print()
    rows = (
        ("steps", figures["steps"]),
        ("lost steps", figures["lost_steps"]),
        ("redone steps", figures["redone_steps"]),
        ("samples repeated / skipped", f"{figures['samples_repeated']} / {figures['samples_skipped']}"),
        ("final loss", f"{figures['final_loss']:.6f}"),
        ("the same, undisturbed", f"{figures['reference_loss']:.6f}"),
        ("relative difference", f"{figures['relative_difference']:.1e}"),
        ("dashboard", figures["dashboard_url"]),
    )
    table(("RESULT", ""), rows)


def _link(client: Client, job_id: str) -> str:
    """Signs one browser in, once, and leads to the job."""
    return f"{client.login_link()['url']}&next=/jobs/{job_id}"


def _leave_up(shoal: LocalShoal, client: Client, job_id: str) -> None:
    say(f"the page stays up; sign in (once)  {_link(client, job_id)}")
    say("Ctrl-C stops all of it")
    try:
        shoal.wait()
    except KeyboardInterrupt:
        say("stopping")
