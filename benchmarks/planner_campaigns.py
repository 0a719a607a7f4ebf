"""What must hold of every plan, on thousands of random clusters: how many were judged, and how many failed.

Usage: python -m benchmarks.planner_campaigns [--json] [--only NAME,NAME] [--first N] [--state FILE] [--processes N]

`oracle` and `units` compare the search with brute force; `monotone` (up to 8 devices, strictly), `overlapping` (the
same where exchanges may overlap) and `larger` (9 to 64, within one per cent) make each cluster better and want no
worse plan; `slow` adds a device of a tenth of the speed; `memory` and, where there is little of it, `tight` recount
what plans need; `model` checks that the model rewards better clusters. Searches of `memory` end after a tenth of a
second to ten, as those of users may; one of forty goes on to its end. The judgements are those of
tests/planner/campaign.py, which repeats a seed by itself.

All of it is hours of processor time. What is done is noted in the state's file, a line for each part, and is not done
again for the same planner; the file is kept with the sources, so that a campaign goes on on another machine. `--first`
judges so many seeds of each campaign alone. `failed.*` counts seeds; `runs` names them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.reporting import answer

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
# Seeds of each campaign, and of a part of it.
SEEDS = {
    "oracle": (500, 25),
    "units": (500, 25),
    "model": (400, 50),
    "slow": (500, 20),
    "larger": (500, 5),
    "tight": (500, 10),
    "monotone": (10_000, 100),
    "overlapping": (1_000, 50),
    "memory": (10_000, 50),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(SEEDS), help="campaigns, separated by commas")
    parser.add_argument("--first", type=int, default=10_000, help="so many seeds of each at most")
    parser.add_argument("--state", type=Path, default=RESULTS / "planner_campaigns.jsonl")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := sorted(set(chosen) - set(SEEDS)):
        parser.error(f"--only {unknown[0]}: there are {', '.join(SEEDS)}")
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    version = _version()
    done = {(part["campaign"], part["seeds"]): part for part in _read(arguments.state) if part["version"] == version}
    parts = []
    for name, seeds in _parts(chosen, arguments.first):
        part = done.get((name, seeds))
        if part is None:
            part = {"version": version, **_judged(name, seeds, arguments.processes)}
            with arguments.state.open("a", encoding="utf-8") as state:
                state.write(json.dumps(part) + "\n")
            print(json.dumps(part), file=sys.stderr, flush=True)
        parts.append(part)
    results, runs = _summed(parts)
    answer("planner_campaigns", results, runs)


def _parts(chosen: list[str], first: int) -> Iterator[tuple[str, str]]:
    for name in chosen:
        number, step = SEEDS[name]
        number = min(number, first)
        for low in range(0, number, step):
            yield name, f"{low}-{min(low + step, number) - 1}"


def _judged(name: str, seeds: str, processes: int) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT / "tests" / "planner"), str(ROOT / "tests")]  # no packages
    import campaign

    low, _, high = seeds.partition("-")
    tallies = campaign.run(name, range(int(low), int(high) + 1), processes)
    cpu_s = [second for tally in tallies for second in tally.cpu_s]
    return {
        "campaign": name,
        "seeds": seeds,
        "num_seeds": len(tallies),
        "checks": sum(tally.num_checked for tally in tallies),
        "plans": len(cpu_s),
        "without": sum(tally.num_without for tally in tallies),
        "truncated": sum(tally.num_truncated for tally in tallies),
        "cpu_s": sum(cpu_s),
        "most_cpu_s": max(cpu_s, default=0.0),
        "failed": {str(tally.seed): tally.failures[0].splitlines()[0] for tally in tallies if tally.failures},
    }


def _summed(parts: list[dict[str, Any]]) -> tuple[dict[str, float | None], dict[str, Any]]:
    by_name: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for part in parts:
        by_name[part["campaign"]].append(part)
    results: dict[str, float | None] = {}
    runs: dict[str, Any] = {}
    for name, mine in by_name.items():
        failed = {seed: problem for part in mine for seed, problem in part["failed"].items()}
        results |= {f"seeds.{name}": sum(part["num_seeds"] for part in mine), f"failed.{name}": len(failed)}
        summed = {
            figure: sum(part[figure] for part in mine)
            for figure in ("checks", "plans", "without", "truncated", "cpu_s")
        }
        runs[name] = summed | {"most_cpu_s": max(part["most_cpu_s"] for part in mine), "failed": failed}
    return results, runs


def _read(state: Path) -> Iterator[dict[str, Any]]:
    if state.exists():
        yield from map(json.loads, state.read_text(encoding="utf-8").splitlines())


def _version() -> str:
    """Of whatever the campaigns judge, and judge by: the planner's files, and those of its tests that hold no tests."""
    listed = subprocess.run(
        ["git", "ls-files", "planner", "tests/planner"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sources = [name for name in sorted(listed.stdout.splitlines()) if name.endswith(".py")]
    judged = hashlib.sha256()
    for name in sources:
        if not Path(name).name.startswith("test_"):
            judged.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return judged.hexdigest()


if __name__ == "__main__":
    main()
