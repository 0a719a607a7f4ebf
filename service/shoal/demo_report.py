"""What the demo found out, from a job's journal alone. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PHASES = ("detect_s", "decide_s", "restore_s", "rebuild_s", "total_s")
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The same job in one process: its last loss, and the median seconds of its steps."""

    loss: float
    step_s: float


def report(events: Iterable[Mapping[str, Any]], reference: Reference, batch: int) -> dict[str, Any]:
    """The figures of a run that ended. `batch` is the number of samples that each step must have fed."""
    events = list(events)
    steps = counting_steps(events)
    recoveries = [_recovery(event) for event in events if event["kind"] == "recovery_done"]
    fed = Counter(number for step in steps for first, last in step["samples"] for number in range(first, last))
    expected = range(len(steps) * batch)
    final_loss = steps[-1]["loss"]
    return {
        "plan_ids": [event["plan_id"] for event in events if event["kind"] == "plan_adopted"],
        "plans": [event["plan"]["pipelines"] for event in events if event["kind"] == "plan_adopted"],
        "devices": {event["node"]: event["device"] for event in events if event["kind"] == "node_joined"},
        "steps": len(steps),
        "lost_steps": sum(recovery["lost_steps"] for recovery in recoveries),
        "redone_steps": sum(recovery["redone_steps"] for recovery in recoveries),
        "recoveries": recoveries,
        "samples_repeated": sum(count - 1 for count in fed.values()),
        "samples_skipped": sum(1 for number in expected if number not in fed),
        "final_loss": final_loss,
        "reference_loss": reference.loss,
        "relative_difference": abs(final_loss - reference.loss) / abs(reference.loss),
        "step_s": statistics.median(step["duration_s"] for step in steps),
        "reference_step_s": reference.step_s,
    }


def counting_steps(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The sequence of steps that counts: of a step that was done again, the last time."""
    found: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event["kind"] == "step_done":
            found[event["step"]] = event
    return [found[step] for step in sorted(found)]


def broken_promises(figures: Mapping[str, Any]) -> list[str]:
    """What the demo was to show and did not, as sentences."""
    recoveries: Sequence[Mapping[str, Any]] = figures["recoveries"]
    problems = [
        (figures["lost_steps"] != 0, f"{figures['lost_steps']} safe steps had to be done again"),
        (
            any(recovery["redone_steps"] > 1 for recovery in recoveries),
            f"{figures['redone_steps']} steps were redone, more than one in a change of plan",
        ),
        (not _asymmetric(figures["plans"][0], figures["devices"]), "the first plan has no two pipelines that differ"),
        (figures["samples_repeated"] != 0, f"{figures['samples_repeated']} samples were repeated"),
        (figures["samples_skipped"] != 0, f"{figures['samples_skipped']} samples were skipped"),
        (any(recovery["bytes"]["store"] for recovery in recoveries), "the object store had to be read"),
        (len(recoveries) < 2, f"{len(recoveries)} changes of plan instead of a loss and a join"),
        (
            figures["relative_difference"] > _TOLERANCE,
            f"the loss differs from the undisturbed run by {figures['relative_difference']:.2e}",
        ),
    ]
    return [text for broken, text in problems if broken]


def _asymmetric(pipelines: Sequence[Mapping[str, Any]], devices: Mapping[str, str]) -> bool:
    """At least two pipelines that differ in their stages, layers or types of devices."""
    shapes = {
        str([(stage["layers"], [devices[one["node"]] for one in stage["replicas"]]) for stage in pipeline["stages"]])
        for pipeline in pipelines
    }
    return len(shapes) > 1


def _recovery(event: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("cause", "epoch", "step", "reason", "nodes_lost", "nodes_joined", "redone_steps", "lost_steps", *_PHASES)
    return {**{key: event[key] for key in kept}, "bytes": event["num_bytes"]}


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """One line a pipeline: which device runs which layers."""
    lines = []
    for number, pipeline in enumerate(plan["pipelines"]):
        stages = " -> ".join(_stage(stage) for stage in pipeline["stages"])
        shares = f"{pipeline['micro_batches']} x {pipeline['micro_batch']} samples"
        lines.append(f"pipeline {number}: {stages}   ({shares})")
    return lines


def _stage(stage: Mapping[str, Any]) -> str:
    first, last = stage["layers"][0]
    devices = itertools.chain.from_iterable(
        (f"{replica['node']}:{index}" for index in replica["devices"]) for replica in stage["replicas"]
    )
    layers = f"layers {first}-{last - 1}" if last > first else "no layer"
    return f"{' '.join(devices)} [{layers}]"
