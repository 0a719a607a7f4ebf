"""Two nodes with 200 Mbit/s between them: ways in which replicas add up their gradients, in the same run.

As in `slow_links`: eight replicas of the whole model as 2 nodes x 4, each node a network namespace of its own, joined
by a link that the kernel holds to its rate; within a node ranks exchange through memory. All layouts run the same job
on the same engine, one micro-batch a step, so that the exchange of gradients and weights is most of it; only the
algorithm differs. `ratio.NAME` are the seconds of a step in which everybody serves all others at once over those of
that algorithm, the median over rounds; `crossing.NAME` is what either node sends the other in a step, in multiples of
the model. Without root, `ip` and `tc` the results are null.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.reporting import answer
from benchmarks.slow_links import measure, missing, request
from shoal_planner.algorithms import DIRECT
from shoal_planner.groups import Group
from shoal_planner.parameters import num_parameters

AT_ONCE = "parameter_server"
OTHERS = {
    "direct": DIRECT,
    "ring": "ring",
    "halving_doubling": "halving_doubling",
    "parameter_server_4x2": "parameter_server 4x2",
    "tree_of_rings": "tree: ring 4 > ring 2",
}
WEIGHT_BYTES = 4  # and as many of a gradient


def main() -> None:
    if why := missing():
        answer("slow_collectives", dict.fromkeys(f"ratio.{name}" for name in OTHERS), {"missing": why})
        return
    names = {AT_ONCE: AT_ONCE, **OTHERS}
    runs = measure(
        {name: request(1, groups=(Group(layers=(0, 4), collective=algorithm),)) for name, algorithm in names.items()}
    )
    answer("slow_collectives", results(runs), {"steps": runs})


def results(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios of steps per second, round by round."""
    model_bytes = WEIGHT_BYTES * num_parameters(request(1).job.model)
    seconds: dict[str, list[float]] = {name: [] for name in (AT_ONCE, *OTHERS)}
    crossing: dict[str, float] = {}
    for run in runs:
        seconds[run["name"]].append(statistics.median(step["step_s"] for step in run["steps"]))
        sent_bytes = max(max(step["between_nodes_bytes"]) for step in run["steps"])
        crossing[f"crossing.{run['name']}"] = sent_bytes / model_bytes
    ratios = {
        f"ratio.{name}": statistics.median(
            theirs_s / ours_s for theirs_s, ours_s in zip(seconds[AT_ONCE], seconds[name], strict=True)
        )
        for name in OTHERS
    }
    return ratios | crossing


if __name__ == "__main__":
    main()
