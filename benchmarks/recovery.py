"""From the death of a node to the next step that counts, of a job that runs on a local cluster of real raylets.

Usage: python -m benchmarks.recovery [--json] [--kills N]

A kill is SIGKILL to all processes of a node at once, its folders deleted; then the node comes back, and the next one
dies. `shoal` recovers as it does; `cloud_only` is the same engine, format and client without what survivors remember:
their processes are killed, too, and what starts anew has only the object store. The two take turns on one cluster and
one job. The store is a real S3 server behind a link of 400 Mbit/s.

`kill_to_commit_s` ends with the next done step, `kill_to_ready_s` where that step begins, `rejoin_s` is how long the
others stand still when the node comes back; `step_s` is a step of all nodes, and by way of recovery one of survivors.
Steps, phases and bytes are those of the job's own records. `vanish_to_commit_s` is that of `benchmarks.vanishing`:
hosts that leave the network without a packet.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import vanishing
from benchmarks.recovery_job import Blow, TrainingJob
from benchmarks.reporting import answer

NUM_KILLS = 5
_FIGURES = ("kill_to_commit_s", "kill_to_ready_s", "lost_steps", "redone_steps", "store_bytes", "rejoin_s", "step_s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=NUM_KILLS, help="of each way to recover")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-recovery-") as folder, TrainingJob(Path(folder)) as job:
        blows = [job.strike(everyone=everyone) for _ in range(arguments.kills) for everyone in (False, True)]
        step_s = job.median_step_s()
    by_way = {"shoal": blows[0::2], "cloud_only": blows[1::2]}
    results: dict[str, float | None] = {
        f"{figure}.{way}": statistics.median(getattr(blow, figure) for blow in struck)
        for way, struck in by_way.items()
        for figure in _FIGURES
    }
    results["speedup.replica_survives"] = statistics.median(
        cloud.kill_to_commit_s / ours.kill_to_commit_s for ours, cloud in zip(*by_way.values(), strict=True)
    )
    vanished, why = vanishing.measure(arguments.kills)
    results |= {"step_s": step_s, vanishing.RESULT: vanishing.median(vanished)}
    runs = {way: list(map(_shown, struck)) for way, struck in by_way.items()}
    answer("recovery", results, {**runs, "vanished": why or list(map(asdict, vanished))})


def _shown(blow: Blow) -> dict[str, Any]:
    return {figure: getattr(blow, figure) for figure in _FIGURES} | {"node": blow.node, "phases_s": dict(blow.phases_s)}


if __name__ == "__main__":
    main()
