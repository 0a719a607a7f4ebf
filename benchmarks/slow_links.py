"""Two nodes with 200 Mbit/s between them: ZeRO-3 and ZeRO++ beside three levels, in the same run.

Eight ranks as 2 nodes x 2 device groups x 2 devices, each node a network namespace of its own, joined by a link that
the kernel holds to `LINK_MBIT_PER_S` in each direction; within a node ranks exchange through memory. All layouts run
the same job on the same engine; only the levels differ at which weights and gradients are split. They alternate, and a
ratio is the median over rounds. Needs root, `ip` and `tc`; without them the results are null.

`link_share.*` is the part of a step that the link between the nodes is busy for: bytes of the fuller direction over
what the link carries, by the bytes that ranks count. `ratio.*.inside_limited` adds to the steps of three levels, but
not to the peer's, the seconds that what they move within a node would take at `INSIDE_GBIT_PER_S` of each device.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reporting import answer
from shoal_planner.groups import Group
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.levels import OPTIMIZER_ALONE, DeviceGroups, Sharding
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_workers.solo import RunRequest

LINK_MBIT_PER_S = 200
INSIDE_GBIT_PER_S = 2
NODES = ("near", "far")
HOSTS = ("10.177.31.1", "10.177.31.2")
DEVICES = 4  # of a node
ROUNDS = 3
STEPS = 3  # of each layout in each round; the first one is not counted
MICRO_BATCHES = 4

ZERO_3 = Sharding(weights="cluster", gradients="cluster")
LAYOUTS = {
    "zero_3": ZERO_3,
    "zero_pp": replace(ZERO_3, gather="int8", scatter="int4", secondary=True),
    "three_level": Sharding(weights="group", gradients="node"),
}


def main() -> None:
    if why := missing():
        names = ("ratio.three_level_to_zero_3", "ratio.three_level_to_zero_pp", "link_share.zero_3")
        answer("slow_links", dict.fromkeys(names), {"missing": why})
        return
    runs = measure(requests())
    answer("slow_links", results(runs), {"steps": runs})


def requests() -> dict[str, RunRequest]:
    return {layout: request(MICRO_BATCHES, sharding=sharding) for layout, sharding in LAYOUTS.items()}


def measure(layouts: Mapping[str, RunRequest], rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Of each run, in order: its layout's name, and per step the seconds of the slowest rank, what ranks computed of
    it, the loss, and the bytes that each node sent to the other."""
    with tempfile.TemporaryDirectory() as name, linked_namespaces(LINK_MBIT_PER_S) as namespaces:
        folder = Path(name)
        turns = [turn for _ in range(rounds) for turn in layouts.items()]
        (folder / "requests").write_bytes(pickle.dumps(turns))
        _run(folder, namespaces)
        ranks = [json.loads((folder / f"seen-{rank}").read_text("utf-8")) for rank in range(2 * DEVICES)]
    return [
        {
            "name": layout,
            "steps": [_together([rank[turn]["steps"][step] for rank in ranks]) for step in range(STEPS - 1)],
        }
        for turn, (layout, _) in enumerate(turns)
    ]


def results(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios of steps per second, round by round."""
    rounds = [
        {run["name"]: _median(run, "step_s") for run in runs[first : first + len(LAYOUTS)]}
        for first in range(0, len(runs), len(LAYOUTS))
    ]
    inside_s = max(step["inside_s"] for run in runs if run["name"] == "three_level" for step in run["steps"])
    found = {}
    for peer in ("zero_3", "zero_pp"):
        for name, more_s in (("", 0.0), (".inside_limited", inside_s)):
            ratios = (seconds[peer] / (seconds["three_level"] + more_s) for seconds in rounds)
            found[f"ratio.three_level_to_{peer}{name}"] = statistics.median(ratios)
    for layout in LAYOUTS:
        shares = [step["link_s"] / step["step_s"] for run in runs if run["name"] == layout for step in run["steps"]]
        found[f"link_share.{layout}"] = statistics.median(shares)
    return found


def _median(run: Mapping[str, Any], figure: str) -> float:
    return statistics.median(float(step[figure]) for step in run["steps"])


def _together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One step, as eight ranks saw it; those of a node follow each other."""
    between = [
        sum(rank["sent_bytes"].get("zone", 0) for rank in ranks[first : first + DEVICES])
        for first in range(0, len(ranks), DEVICES)
    ]
    return {
        "step_s": max(rank["step_s"] for rank in ranks),
        "compute_s": max(rank["compute_s"] for rank in ranks),
        "loss": ranks[0]["loss"],
        "between_nodes_bytes": between,
        "inside_s": max(_inside(rank) for rank in ranks) * 8 / (INSIDE_GBIT_PER_S * 1e9),
        "link_s": max(between) * 8 / (LINK_MBIT_PER_S * 1e6),
    }


def _inside(rank: dict[str, Any]) -> int:
    """Bytes that it sent within its node."""
    return sum(count for link, count in rank["sent_bytes"].items() if link in ("group", "node"))


def request(micro_batches: int, *, sharding: Sharding = OPTIMIZER_ALONE, groups: tuple[Group, ...] = ()) -> RunRequest:
    model = ModelSpec(layers=4, hidden=256, heads=4, ffn=688, vocab=512, tie_embeddings=False)
    train = TrainSpec(global_batch=2 * DEVICES * micro_batches, seq_len=32, steps=STEPS, lr=1e-3)
    job = JobSpec(name="slow links", model=model, data=DataSpec(uri="stdlib:"), train=train)
    replicas = tuple(Replica(node=node, devices=(device,), samples=1) for node in NODES for device in range(DEVICES))
    stage = Stage(layers=((0, model.layers),), replicas=replicas)
    pipeline = Pipeline(micro_batch=len(replicas), micro_batches=micro_batches, stages=(stage,))
    device_groups = tuple(DeviceGroups(node=node, size=2) for node in NODES)
    plan = Plan(
        pipelines=(pipeline,),
        sharding=sharding,
        groups=groups,
        device_groups=device_groups,
        overlap=Overlap(shards=sharding != OPTIMIZER_ALONE),
    )
    return RunRequest(job=job, plan=plan, until_step=STEPS)


def _run(folder: Path, namespaces: tuple[str, ...]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(2 * DEVICES):
        node = rank // DEVICES
        command = [sys.executable, "-m", "benchmarks.slow_links_rank", str(folder), str(rank), HOSTS[node]]
        ranks.append(subprocess.Popen(["ip", "netns", "exec", namespaces[node], *command], env=environment))
    try:
        failed = [rank for rank, process in enumerate(ranks) if process.wait()]
    finally:
        for process in ranks:
            process.kill()
    if failed:
        raise RuntimeError(f"ranks {failed} failed")


@contextmanager
def linked_namespaces(mbit_per_s: int) -> Iterator[tuple[str, ...]]:
    """One for each node, with a link between them that carries so much in each direction."""
    names = tuple(f"shoal-{node}-{os.getpid()}" for node in NODES)
    ends = tuple(f"shoal{number}p{os.getpid()}"[:15] for number in range(2))
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, host in zip(names, ends, HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{host}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            limit = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "200ms")
            _call("tc", "-n", name, "qdisc", "add", "dev", end, "root", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def missing() -> str:
    """Why namespaces cannot be made; empty where they can."""
    if os.geteuid():
        return "only root makes network namespaces"
    return next((f"{tool} is not installed" for tool in ("ip", "tc") if shutil.which(tool) is None), "")


if __name__ == "__main__":
    main()
