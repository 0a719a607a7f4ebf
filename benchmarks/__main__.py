"""Runs every benchmark and leaves what it printed in benchmarks/results/NAME.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# What several benchmarks share, or a benchmark starts.
NOT_RUN = frozenset(
    {
        "reporting",
        "baselines",
        "cores",
        "duel",
        "overhead",
        "measured_runs",
        "planner_cases",
        "planner_child",
        "planner_clusters",
        "rescore",
        "slow_links_rank",
    }
)


def main() -> int:
    failed = 0
    for module in sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem not in NOT_RUN):
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", "--json"], stdout=subprocess.PIPE, text=True
        )
        print(f"{module}: {'done' if done.returncode == 0 else f'exit status {done.returncode}'}", flush=True)
        failed |= done.returncode
        if done.returncode == 0:
            (HERE / "results" / f"{module}.json").write_text(done.stdout.splitlines()[-1] + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
