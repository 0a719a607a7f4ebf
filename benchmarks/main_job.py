"""The main job of `shoal demo`: how long a loss and a join hold it up, and what the uneven cluster costs a step.

The peer, in the same run, is the same job in one process with all cores of the machine. On one machine the cluster can
at best equal it: its ranks share these cores, and talk on top of it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.reporting import answer

RUNS = 3


def main() -> None:
    runs = [_run() for _ in range(RUNS)]
    results = {
        "ratio.one_process": statistics.median(run["reference_step_s"] / run["step_s"] for run in runs),
        "node_lost.total_s": _phase(runs, "node_lost", "total_s"),
        "node_lost.detect_s": _phase(runs, "node_lost", "detect_s"),
        "node_lost.decide_s": _phase(runs, "node_lost", "decide_s"),
        "node_lost.restore_s": _phase(runs, "node_lost", "restore_s"),
        "node_lost.rebuild_s": _phase(runs, "node_lost", "rebuild_s"),
        "node_joined.total_s": _phase(runs, "node_joined", "total_s"),
        "relative_difference.max": max(run["relative_difference"] for run in runs),
        "lost_steps.max": max(run["lost_steps"] for run in runs),
    }
    answer("main_job", results, {"demo": runs})


def _run() -> dict[str, Any]:
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "demo", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _phase(runs: list[dict[str, Any]], cause: str, phase: str) -> float | None:
    found = [recovery[phase] for run in runs for recovery in run["recoveries"] if recovery["cause"] == cause]
    return statistics.median(found) if found else None


if __name__ == "__main__":
    main()
