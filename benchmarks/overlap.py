"""Two processes with a slow link between them: each kind of exchange one after the other, and beside computing.

Each process has a network namespace of its own, joined by a link that the kernel holds to `LINK_MBIT_PER_S` in each
direction, and exchanges over gloo, tensor parallelism too: what replicas of one node are to each other on a cluster,
these are for once over a network. Both ways alternate, on the same job and from the same weights; a ratio is the median
over rounds. Needs root, `ip` and `tc`; without them the results are null.

`ratio.*` is how many times shorter a step is with the overlap. `exposed_fall.*` is the part of the exposed seconds (of
the rank that computes most, in exchanges other than the vote) that it hides.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.reporting import answer
from benchmarks.slow_links import HOSTS, NODES, linked_namespaces, missing
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.levels import Sharding
from shoal_planner.overlap import NOTHING, Overlap
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_workers.solo import RunRequest

LINK_MBIT_PER_S = 1000
ROUNDS = 5
STEPS = 3  # of each way in each round; the first one is not counted
MODEL = ModelSpec(layers=4, hidden=512, heads=8, ffn=1376, vocab=512, tie_embeddings=False)
TRAIN = TrainSpec(global_batch=8, seq_len=128, steps=STEPS, lr=1e-3)

_ZERO_3 = Sharding(weights="cluster", gradients="cluster")
KINDS = {
    "stages": Overlap(stages=True),
    "shards": Overlap(shards=True),
    "gradients": Overlap(gradients=True),
    "tensor_chunks": Overlap(tensor_chunks=8),
}


def plan_of(kind: str, overlap: Overlap) -> Plan:
    """Of two devices, one on each node; tensor parallelism knows of one node only."""
    if kind == "stages":
        parts = (_stage(0, 2, _replica(NODES[0], 2)), _stage(2, 4, _replica(NODES[1], 2)))
        return Plan(pipelines=(Pipeline(micro_batch=2, micro_batches=4, stages=parts),), overlap=overlap)
    if kind == "tensor_chunks":
        both = Replica(node=NODES[0], devices=(0, 1), tp=2, samples=8)
        return Plan(
            pipelines=(Pipeline(micro_batch=8, micro_batches=1, stages=(_stage(0, 4, both),)),), overlap=overlap
        )
    replicas = tuple(_replica(node, 4 if kind == "gradients" else 2) for node in NODES)
    micro_batch = sum(replica.samples for replica in replicas)
    pipeline = Pipeline(
        micro_batch=micro_batch, micro_batches=TRAIN.global_batch // micro_batch, stages=(_stage(0, 4, *replicas),)
    )
    sharding = _ZERO_3 if kind == "shards" else Sharding()
    return Plan(pipelines=(pipeline,), sharding=sharding, overlap=overlap)


def _stage(first: int, last: int, *replicas: Replica) -> Stage:
    return Stage(layers=((first, last),), replicas=replicas)


def _replica(node: str, samples: int) -> Replica:
    return Replica(node=node, devices=(0,), samples=samples)


def main() -> None:
    if why := missing():
        names = [f"{figure}.{kind}" for kind in KINDS for figure in ("ratio", "exposed_fall")]
        answer("overlap", dict.fromkeys(names), {"missing": why})
        return
    runs = measure()
    answer("overlap", results(runs), {"steps": runs})


def measure(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Of each run, in order: its kind, whether it overlapped, and per step its seconds and those in exchanges."""
    job = JobSpec(name="overlap", model=MODEL, data=DataSpec(uri="stdlib:"), train=TRAIN)
    ways = [(kind, overlap) for kind, on in KINDS.items() for overlap in (NOTHING, on)]
    turns = [
        (kind, RunRequest(job=job, plan=plan_of(kind, overlap), until_step=STEPS))
        for _ in range(rounds)
        for kind, overlap in ways
    ]
    with tempfile.TemporaryDirectory() as name, linked_namespaces(LINK_MBIT_PER_S) as namespaces:
        folder = Path(name)
        (folder / "requests").write_bytes(pickle.dumps(turns))
        _run(folder, namespaces)
        ranks = [json.loads((folder / f"seen-{rank}").read_text("utf-8")) for rank in range(len(NODES))]
    return [
        {
            "kind": kind,
            "overlaps": request.plan.overlap != NOTHING,
            "steps": [_busiest([rank[turn][step] for rank in ranks]) for step in range(STEPS - 1)],
        }
        for turn, (kind, request) in enumerate(turns)
    ]


def results(runs: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        pairs = [
            tuple(run for run in runs[first : first + 2 * len(KINDS)] if run["kind"] == kind)
            for first in range(0, len(runs), 2 * len(KINDS))
        ]
        found[f"ratio.{kind}"] = statistics.median(_of(one, "step_s") / _of(other, "step_s") for one, other in pairs)
        found[f"exposed_fall.{kind}"] = statistics.median(
            1 - _of(other, "exposed_s") / _of(one, "exposed_s") for one, other in pairs
        )
    return found


def _of(run: Mapping[str, Any], figure: str) -> float:
    return statistics.median(float(step[figure]) for step in run["steps"])


def _busiest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """One step, as the rank saw it that was in exchanges for the least time: the other waits for it, too."""
    return min(ranks, key=lambda rank: rank["exposed_s"])


def _run(folder: Path, namespaces: tuple[str, ...]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank, (namespace, host) in enumerate(zip(namespaces, HOSTS, strict=True)):
        command = [sys.executable, "-m", "benchmarks.overlap_rank", str(folder), str(rank), host]
        ranks.append(subprocess.Popen(["ip", "netns", "exec", namespace, *command], env=environment))
    try:
        failed = [rank for rank, process in enumerate(ranks) if process.wait()]
    finally:
        for process in ranks:
            process.kill()
    if failed:
        raise RuntimeError(f"ranks {failed} failed")


if __name__ == "__main__":
    main()
