"""What a kill costs a job whose state lies on a GPU: seconds from the blow to the next done step, beside a step's own.

Usage: python -m benchmarks.gpu_recovery [--json] [--kills N] [--layers N] [--hidden N] [--device-type NAME]

Four nodes of one device each, all of which share the GPU that is there, train a Llama with hidden size 2048 in bf16;
one that computes is killed with all its processes, the others go on, and it comes back. `kill_s` is the median from
SIGKILL to the next step that was not done before, `kill_steps` the same in steps, `restore_s` what bringing the state
back took of it; what the return of the node cost is to be read from each run's `story`. There is no peer: none of those
compared elsewhere runs several nodes on one GPU. Without a CUDA device all of it is null.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from benchmarks.reporting import answer
from shoal_planner.job import DataSpec, JobSpec, LimitsSpec, ModelSpec, TrainSpec
from shoal_recovery.journal import NodeJoined, RecoveryDone, StepDone
from shoal_workers.devices import num_shown

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # no package: the processes of nodes are those of tests

RESULTS = ("kill_s", "kill_steps", "restore_s", "step_s")
_NODES = "abcd"
_HOST_BYTES = 48 << 30
_WAIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--device-type", default="H100-80G")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # the answer alone goes to the output
    if not arguments.device_type.startswith("cpu") and not num_shown():
        answer("gpu_recovery", dict.fromkeys(RESULTS), {"why": "no CUDA device is at hand"})
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shoal-gpu-recovery-") as folder:
        runs = _run(Path(folder), job(arguments.layers, arguments.hidden), arguments.device_type, arguments.kills)
    kills = runs["kills"]
    results = {
        "kill_s": statistics.median(kill["kill_s"] for kill in kills),
        "kill_steps": statistics.median(kill["kill_s"] / kill["step_s"] for kill in kills),
        "restore_s": statistics.median(kill["restore_s"] for kill in kills),
        "step_s": statistics.median(kill["step_s"] for kill in kills),
    }
    answer("gpu_recovery", results, runs)


def job(layers: int, hidden: int) -> JobSpec:
    heads = hidden // 64
    return JobSpec(
        name="gpu-recovery",
        model=ModelSpec(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=32_000, tie_embeddings=False),
        data=DataSpec(uri="stdlib:"),
        train=TrainSpec(global_batch=6, seq_len=256, steps=100_000, precision="bf16"),
        limits=LimitsSpec(min_devices=3),
    )


def _run(folder: Path, spec: JobSpec, device: str, num_kills: int) -> dict[str, Any]:
    from process_cluster import ProcessCluster
    from supervised import supervised

    cluster = ProcessCluster(folder, dict.fromkeys(_NODES, (device, 1)), host_memory_bytes=_HOST_BYTES)
    kills: list[dict[str, Any]] = []
    try:
        with supervised(cluster, "job", spec) as running:
            running.reaches(8)
            for _ in range(num_kills):
                known, joined = len(running.events(RecoveryDone)), len(running.events(NodeJoined))
                step_s = _step_s(running, running.step - 4)
                victim = min(running.devices())
                at_s = time.time()
                cluster.kill_node(victim)
                done = running.recovers(known)
                running.eventually(lambda: running.step > done.step + 3, _WAIT_S)  # noqa: B023
                next_s = _first(running, done.step + 1, done.epoch)
                cluster.bring_back(victim)
                running.eventually(lambda: len(running.events(NodeJoined)) > joined, _WAIT_S)  # noqa: B023
                running.steps_on(8)
                kills.append(
                    {
                        "victim": victim,
                        "kill_s": next_s - at_s,
                        "step_s": step_s,
                        "redone_steps": done.redone_steps,
                        "lost_steps": done.lost_steps,
                        "detect_s": done.detect_s,
                        "decide_s": done.decide_s,
                        "restore_s": done.restore_s,
                        "rebuild_s": done.rebuild_s,
                        "total_s": done.total_s,
                        "num_bytes": done.num_bytes,
                        "source_s": done.source_s,
                        "story": running.story().splitlines()[-60:],
                    }
                )
            plan = running.epoch.plan
    finally:
        cluster.close()
    return {"device": device, "plan": plan, "kills": kills}


def _first(running: Any, step: int, epoch: int) -> float:
    """When a step was told first in this epoch or later."""
    told = [
        entry.at_s
        for entry in running.supervisor.entries_after(0, 0.0)
        if isinstance(entry.event, StepDone) and entry.event.step >= step and entry.event.epoch >= epoch
    ]
    return float(min(told))


def _step_s(running: Any, after_step: int) -> float:
    """The median of the seconds from one step to the next, all after this one."""
    told = [
        entry.at_s
        for entry in running.supervisor.entries_after(0, 0.0)
        if isinstance(entry.event, StepDone) and entry.event.step > after_step
    ]
    return float(statistics.median(later - earlier for earlier, later in itertools.pairwise(told)))


if __name__ == "__main__":
    main()
