"""Where the wall time of a job went, and the time of its devices: steps that count, what copies of state held them up,
steps done again, recoveries by phase, waiting. Pure; what it is made of are the job's journal and the sums of its
steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_recovery.journal import JobState, PlanAdopted, RecoveryDone, StateChanged
from shoal_service.step_sums import EpochSteps
from shoal_service.timeline import PHASES, Event, node_spans

PRODUCTIVE = "productive"
STALLED = "checkpoint"
REDONE = "redone"
_WAITS = frozenset({JobState.QUEUED, JobState.WAITING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """`parts` add up to `elapsed_s` (but for clocks that differ). `ratio` is productive time by elapsed time without
    the user's own pauses; None before any time has passed. `held_device_s` and `productive_device_s` count each device
    that the job had; None of a job without plans. `bubble_s` is how much of the productive time devices waited for
    each other, as plans predict it."""

    elapsed_s: float
    parts: Mapping[str, float]
    ratio: float | None
    held_device_s: float | None
    productive_device_s: float | None
    redone_device_s: float | None
    bubble_s: float


def goodput(
    events: Sequence[Event],
    steps: Sequence[EpochSteps],
    *,
    created_at_s: float,
    end_at_s: float,
    evaluation_s: float = 0.0,
    since_s: float | None = None,
) -> Goodput:
    """`events` in order, `end_at_s` now or when the job ended; only what was after `since_s` counts, if given, and
    then `steps` and `evaluation_s` are those of after it."""
    first_s = min(created_at_s, events[0].at_s) if events else created_at_s
    end_at_s = max(end_at_s, events[-1].at_s) if events else end_at_s
    first_s = first_s if since_s is None else max(first_s, since_s)
    elapsed_s = max(0.0, end_at_s - first_s)
    states = _states(events, created_at_s, first_s, end_at_s)
    parts = {PRODUCTIVE: sum(found.worked_s for found in steps if not found.rolled_back)}
    parts[STALLED] = sum(found.seconds - found.worked_s for found in steps if not found.rolled_back)
    parts[REDONE] = sum(found.seconds for found in steps if found.rolled_back)
    recent = [event for event in events if event.at_s >= first_s]
    parts["evaluation"] = evaluation_s
    parts |= _recoveries([event for event in recent if event.kind == RecoveryDone.kind])
    parts["starting"] = states.get(JobState.STARTING, 0.0)
    parts["waiting"] = sum(states.get(state, 0.0) for state in _WAITS)
    parts["paused"] = states.get(JobState.PAUSED, 0.0)
    parts["other"] = max(0.0, elapsed_s - sum(parts.values()))
    worked_s = elapsed_s - parts["paused"]
    devices, bubbles = _plans(events)
    return Goodput(
        elapsed_s=elapsed_s,
        parts=parts,
        ratio=min(1.0, parts[PRODUCTIVE] / worked_s) if worked_s > 0 else None,
        held_device_s=_held(events, first_s, end_at_s) if devices else None,
        productive_device_s=_weighted(steps, devices, rolled_back=False) if devices else None,
        redone_device_s=_weighted(steps, devices, rolled_back=True) if devices else None,
        bubble_s=_weighted(steps, bubbles, rolled_back=False),
    )


def _weighted(steps: Sequence[EpochSteps], weights: Mapping[int, float], *, rolled_back: bool) -> float:
    """Of those that count, the time in which nothing held them up."""
    return sum(
        (found.seconds if rolled_back else found.worked_s) * weights.get(found.epoch, 0.0)
        for found in steps
        if found.rolled_back is rolled_back
    )


def _states(events: Sequence[Event], created_at_s: float, first_s: float, end_at_s: float) -> dict[str, float]:
    """Seconds in each state, from `first_s` on."""
    changes = [(created_at_s, str(JobState.QUEUED))]
    changes += [(event.at_s, str(event.payload["state"])) for event in events if event.kind == StateChanged.kind]
    ends = [*(at_s for at_s, _ in changes[1:]), end_at_s]
    found: dict[str, float] = {}
    for (at_s, state), until_s in zip(changes, ends, strict=True):
        found[state] = found.get(state, 0.0) + max(0.0, until_s - max(at_s, first_s))
    return found


def _recoveries(found: Sequence[Event]) -> dict[str, float]:
    parts = {phase: sum(float(event.payload[f"{phase}_s"]) for event in found) for phase in PHASES}
    whole_s = sum(float(event.payload["total_s"]) for event in found)
    return {**parts, "rest": max(0.0, whole_s - sum(parts.values()))}


def _plans(events: Sequence[Event]) -> tuple[dict[int, float], dict[int, float]]:
    """By epoch, how many devices its plan uses, and the share of a step that is predicted to be bubbles."""
    devices: dict[int, float] = {}
    bubbles: dict[int, float] = {}
    for event in events:
        if event.kind == PlanAdopted.kind:
            epoch, plan = event.payload["epoch"], event.payload["plan"]
            devices[epoch] = float(num_devices(plan))
            predicted = plan.get("predicted") or {}
            if predicted.get("step_s"):
                bubbles[epoch] = max(0.0, predicted.get("terms", {}).get("bubble_s", 0.0)) / predicted["step_s"]
    return devices, bubbles


def num_devices(plan: Mapping[str, object]) -> int:
    """Of a plan in its published form."""
    pipelines: object = plan["pipelines"]
    assert isinstance(pipelines, list)
    return sum(
        len(replica["devices"])
        for pipeline in pipelines
        for stage in pipeline["stages"]
        for replica in stage["replicas"]
    )


def _held(events: Sequence[Event], first_s: float, end_at_s: float) -> float:
    counts = {
        node["id"]: int(node["devices"])
        for event in events
        if event.kind == PlanAdopted.kind
        for node in event.payload["snapshot"]["nodes"]
    }
    return sum(
        counts.get(name, 0) * max(0.0, min(until_s, end_at_s) - max(since_s, first_s))
        for name, spans in node_spans(events, end_at_s).items()
        for since_s, until_s, _, _ in spans
    )
