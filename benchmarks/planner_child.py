"""One first call of `plan()` in this process, and the processor seconds inside it; started by `measured`.

Reads a request (job and cluster documents, perhaps a running plan) from standard input, and answers on standard output.
Reading documents and imports are not counted; nothing runs before the call that could warm up what it uses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
# Searches are bounded by their number of evaluations; this only ends one that has gone wrong.
TIME_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a call answered: a plan document, or why there is none."""

    cpu_s: float
    plan: dict[str, Any] | None
    error: str = ""
    truncated: bool = False
    num_candidates: int = 0


def measured(
    job: dict[str, Any],
    cluster: dict[str, Any],
    *,
    previous: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    time_limit_s: float = TIME_LIMIT_S,
) -> Call:
    """A first call in a fresh process. `previous` is the running plan, `without` the nodes lost since."""
    request = {"job": job, "cluster": cluster, "previous": previous, "without": without, "time_limit_s": time_limit_s}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner_child"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **ONE_THREAD},
        cwd=Path(__file__).resolve().parent.parent,
    )
    return Call(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    from shoal_planner.cluster import parse_cluster
    from shoal_planner.errors import InvalidField, NoPlanFits
    from shoal_planner.job import parse_job
    from shoal_planner.plan import parse_plan, plan_to_mapping
    from shoal_planner.search import plan

    request = json.loads(sys.stdin.read())
    job = parse_job(request["job"])
    snapshot = parse_cluster(request["cluster"]).without(request["without"])
    previous = None if request["previous"] is None else parse_plan(request["previous"])
    began_s = time.process_time()
    try:
        result = plan(job, snapshot, None, previous=previous, time_limit_s=request["time_limit_s"])
    except (InvalidField, NoPlanFits) as error:
        answer: dict[str, Any] = {"cpu_s": time.process_time() - began_s, "plan": None, "error": str(error)}
    else:
        answer = {"cpu_s": time.process_time() - began_s, "plan": plan_to_mapping(result.plan)}
        answer |= {"truncated": result.truncated, "num_candidates": result.num_candidates}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
