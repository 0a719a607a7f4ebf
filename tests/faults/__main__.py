"""PYTHONPATH=tests:tests/planner python -m faults --seeds A-B --out DIR

runs the drills of these seeds that DIR does not hold yet for these sources, and of the next ones until so many faults
as `--least-faults` have fallen on Ray, and says what came of each. Exit code 1 where one failed."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from pathlib import Path

from faults.campaign import Campaign, summary


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-49", help="a seed, or the first and the last as A-B")
    parser.add_argument("--out", type=Path, default=Path("build/faults"))
    parser.add_argument("--least-faults", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of each job")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="MINUTES", help="begin none that would not end"
    )
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends it leaves no processes and no disks behind
    first, _, last = given.seeds.partition("-")

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    seeds = range(int(first), int(last or first) + 1)
    lines = Campaign(given.out, say).run(seeds, given.least_faults, given.steps, given.within * 60)
    found = summary(lines)
    say(json.dumps(found, indent=1))
    return int(bool(found["drills_failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
