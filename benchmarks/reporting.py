"""The form in which benchmarks answer: name, commit, machine, results, every single run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def answer(benchmark: str, results: Mapping[str, float | None], runs: Mapping[str, Any]) -> None:
    """Prints one JSON object with `--json`, else a line per result. A peer that cannot run is None; `runs` says why."""
    if "--json" in sys.argv:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        print(
            json.dumps(
                {"benchmark": benchmark, "commit": _commit(), "machine": machine, "results": results, "runs": runs}
            )
        )
    else:
        for name, value in results.items():
            print(f"{name:40s} {'-' if value is None else f'{value:.4g}'}")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", ":!benchmarks/results"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return done.stdout.strip() + ("+changes" if dirty else "")
