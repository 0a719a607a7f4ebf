"""Runs every benchmark and leaves what it printed in benchmarks/results/NAME.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# A benchmark answers; what several of them share, or one of them starts, does not.
_ANSWERS = "from benchmarks.reporting import answer"


def main() -> int:
    failed = 0
    for module in sorted(path.stem for path in HERE.glob("[a-z]*.py") if _ANSWERS in path.read_text(encoding="utf-8")):
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
