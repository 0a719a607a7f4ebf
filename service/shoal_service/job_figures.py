"""What a job's journal adds up to for those who watch many jobs: a frozen Figures, and how each entry advances it.
Pure; where they are kept is job_totals.py's, how they are named for Prometheus job_metrics.py's.

They agree with goodput.py and spending.py, which add up a whole journal at once for one job's page.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal_recovery.journal import (
    TERMINAL,
    CheckpointCommitted,
    CheckpointFailed,
    EvaluationDone,
    JobState,
    NodeLost,
    NodeNoticed,
    NodeRecovered,
    NodeSlowed,
    NodeStays,
    NoticeEnded,
    PlanAdopted,
    RecoveryDone,
    StateChanged,
    StepDone,
)
from shoal_recovery.journal_scripts import CheckpointReported, ScriptReported, WorkersStarted
from shoal_service.loss_watch import LossWatch, watched
from shoal_service.presence import GONE, arrivals, departures

# Sums that stand in `Figures.states`, as versions of before keep what they do not know there: of a `StepTime`. No state
# has such a name.
_FIRST, _AGAIN, _HELD_UP = "steps done first", "steps done again", "steps held up"
STEP_KINDS = (StepDone.kind, ScriptReported.kind)
PHASES = ("detect", "decide", "restore", "rebuild", "total")
NOTICE, STORED = "notice", "stored"
BOUNDS_S: Mapping[str, tuple[float, ...]] = {
    NOTICE: (1.0, 5.0, 15.0, 25.0, 30.0, 60.0, 90.0, 120.0, 300.0, 600.0),
    STORED: (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
    "step": (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    **dict.fromkeys(PHASES, (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)),
}
_ENDED = tuple(state.value for state in TERMINAL)
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many values are at most each bound of BOUNDS_S and more than the one before; the last are beyond all."""

    counts: tuple[int, ...]
    sum_s: float = 0.0

    def with_value(self, bounds: tuple[float, ...], value_s: float) -> Histogram:
        place = bisect_left(bounds, value_s)
        counts = tuple(count + (index == place) for index, count in enumerate(self.counts))
        return Histogram(counts=counts, sum_s=self.sum_s + value_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """`tokens` are those of all steps, done again ones included; `productive_s` of steps that count, but for
    `stalled_s` in which copies of state held them up; `redone_s` of the others. `states` are the seconds in states that
    are over (and three more sums, see `step_time`), `state` is the one since `state_at_s`. `recoveries` by
    cause and outcome, `losses` by signal (was there a notice?), market, device and zone, as `counted_as` writes these;
    `restored_bytes` by source. `usd` by market until `usd_at_s`, from when on the nodes cost `usd_per_hour`. `nodes` by
    market, `leaving` and `slow` among them.
    `predicted` are step_s and mfu of the newest plan. `step_at_s`: when the newest step was done."""

    first_at_s: float
    state: str
    state_at_s: float
    states: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    productive_s: float = 0.0
    stalled_s: float = 0.0
    redone_s: float = 0.0
    evaluation_s: float = 0.0
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    recoveries: Mapping[str, int] = field(default_factory=dict)
    restored_bytes: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    checkpoints: int = 0
    checkpoints_failed: int = 0
    stored_step: int | None = None
    stored_at_s: float | None = None
    stored_bytes: int = 0
    usd: Mapping[str, float] = field(default_factory=dict)
    usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    usd_at_s: float = 0.0
    nodes: Mapping[str, int] = field(default_factory=dict)
    leaving: int = 0
    slow: int = 0
    predicted: Mapping[str, float] = field(default_factory=dict)
    step_at_s: float | None = None
    loss_watch: LossWatch = field(default_factory=LossWatch)

    def usd_until(self, at_s: float) -> dict[str, float]:
        """By market, of nodes with a price."""
        hours = max(0.0, at_s - self.usd_at_s) / _HOUR_S
        markets = {*self.usd, *self.usd_per_hour}
        return {name: self.usd.get(name, 0.0) + self.usd_per_hour.get(name, 0.0) * hours for name in sorted(markets)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The nodes of a job: since when it has each, and what is known of any that it ever had (price per hour, 0: not
    stated; market; `places`: device and zone). `recovers_from`: the cause of the recovery that goes on, if one does."""

    since_s: Mapping[str, float] = field(default_factory=dict)
    known: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    noticed: frozenset[str] = frozenset()
    slowed: frozenset[str] = frozenset()
    usd: Mapping[str, float] = field(default_factory=dict)
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    recovers_from: str = ""


def counted_as(*labels: str) -> str:
    """The name under which something with these labels is counted. One label alone stands as it is: so did all of them
    once, and versions of before read the others as names, too."""
    return labels[0] if len(labels) == 1 else json.dumps(labels)


def labels_of(name: str, num: int) -> tuple[str, ...]:
    """What `counted_as` made it of; "" for labels that nobody told."""
    found = json.loads(name) if name.startswith("[") else [name]
    return (*found, *("",) * (num - len(found)))


def fresh(created_at_s: float) -> Figures:
    return Figures(first_at_s=created_at_s, state=JobState.QUEUED.value, state_at_s=created_at_s)


def stalled_s(payload: Mapping[str, Any]) -> float:
    """Of the time of a step, as its entry tells it."""
    return min(float(payload.get("stalled_s") or 0.0), float(payload["duration_s"]))


def with_steps_undone(figures: Figures, seconds: float, stalled_s: float) -> Figures:
    """Steps of so many seconds, held up for so many of them, do not count any more: they are done again."""
    return replace(
        figures,
        productive_s=figures.productive_s - (seconds - stalled_s),
        stalled_s=figures.stalled_s - stalled_s,
        redone_s=figures.redone_s + seconds,
    )


def advance(figures: Figures, kind: str, at_s: float, payload: Mapping[str, Any]) -> Figures:
    """The figures after one more entry, but for those of nodes (`with_nodes`)."""
    figures = replace(figures, first_at_s=min(figures.first_at_s, at_s))
    match kind:
        case StateChanged.kind:
            spent = {figures.state: max(0.0, at_s - figures.state_at_s)}
            return replace(figures, states=_added(figures.states, spent), state=str(payload["state"]), state_at_s=at_s)
        case PlanAdopted.kind:
            found = payload["plan"].get("predicted") or {}
            told = {name: float(found[name]) for name in ("step_s", "mfu") if found.get(name)}
            return replace(figures, predicted=told)
        case StepDone.kind | ScriptReported.kind:
            tokens = int(payload.get("tokens", 0))
            if payload.get("loss") is not None:
                watch = watched(figures.loss_watch, int(payload["step"]), float(payload["loss"]))
                figures = replace(figures, loss_watch=watch)
            return _stepped(figures, at_s, float(payload["duration_s"]), stalled_s(payload), tokens)
        case EvaluationDone.kind:
            return replace(figures, evaluation_s=figures.evaluation_s + float(payload["duration_s"]))
        case RecoveryDone.kind:
            return _recovered(figures, payload)
        case NodeNoticed.kind:
            return replace(figures, histograms=_observed(figures.histograms, {NOTICE: float(payload["lead_s"])}))
        case CheckpointCommitted.kind | CheckpointReported.kind:
            took = {STORED: float(payload["duration_s"])} if payload.get("duration_s") else {}
            return replace(
                figures,
                histograms=_observed(figures.histograms, took),
                checkpoints=figures.checkpoints + 1,
                stored_step=int(payload["step"]),
                stored_at_s=at_s,
                stored_bytes=int(payload["num_bytes"]),
            )
        case CheckpointFailed.kind:
            return replace(figures, checkpoints_failed=figures.checkpoints_failed + 1)
        case _:
            return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of all steps so far, none of which ever falls: of those done for the `first` time, of those that
    made up for what was rolled back, and those in which copies of state held any of them up. That is where
    `productive_s` and the like get to once all is made up for."""

    first_s: float
    again_s: float
    held_up_s: float


def step_time(figures: Figures) -> StepTime:
    told = figures.states
    return StepTime(
        first_s=told.get(_FIRST, figures.productive_s),
        again_s=told.get(_AGAIN, figures.redone_s),
        held_up_s=told.get(_HELD_UP, figures.stalled_s),
    )


def _with_step_time(figures: Figures, worked_s: float, held_up_s: float) -> dict[str, float]:
    """The `states` of figures whose `redone_s` may know of what this step is to make up for."""
    before = step_time(figures)
    held_up_in_redone_s = before.held_up_s - figures.stalled_s
    again_s = min(worked_s, max(0.0, figures.redone_s - held_up_in_redone_s - before.again_s))
    more = {
        _FIRST: before.first_s + (worked_s - again_s),
        _AGAIN: before.again_s + again_s,
        _HELD_UP: before.held_up_s + held_up_s,
    }
    return {**figures.states, **more}


def _stepped(figures: Figures, at_s: float, seconds: float, held_up_s: float, tokens: int) -> Figures:
    return replace(
        figures,
        tokens=figures.tokens + tokens,
        productive_s=figures.productive_s + seconds - held_up_s,
        stalled_s=figures.stalled_s + held_up_s,
        states=_with_step_time(figures, seconds - held_up_s, held_up_s),
        histograms=_observed(figures.histograms, {"step": seconds}),
        step_at_s=at_s,
    )


def _recovered(figures: Figures, payload: Mapping[str, Any]) -> Figures:
    return replace(
        figures,
        recoveries=_added(figures.recoveries, {str(payload["cause"]): 1}),
        histograms=_observed(figures.histograms, {phase: float(payload[f"{phase}_s"]) for phase in PHASES}),
        restored_bytes=_added(figures.restored_bytes, {name: int(n) for name, n in payload["num_bytes"].items()}),
    )


def concerns_nodes(kind: str, payload: Mapping[str, Any]) -> bool:
    """Whether `with_nodes` may make a difference."""
    if kind == StateChanged.kind:
        return payload["state"] in (JobState.PAUSED, *_ENDED)
    return kind in _NODE_KINDS


def with_outcomes(figures: Figures, held: Held, kind: str, payload: Mapping[str, Any]) -> Figures:
    """What the nodes and the recovery of before this entry came to by it: to be asked before `with_nodes`."""
    match kind:
        case NodeLost.kind if not payload.get("ranks_alone"):
            return replace(figures, losses=_added(figures.losses, {_loss("sudden", payload["node"], held): 1}))
        case NoticeEnded.kind if payload["outcome"] == GONE:
            return replace(figures, losses=_added(figures.losses, {_loss("notice", payload["node"], held): 1}))
        case StateChanged.kind if held.recovers_from and (outcome := _UNDONE.get(str(payload["state"]))):
            given_up = counted_as(held.recovers_from, outcome)
            return replace(figures, recoveries=_added(figures.recoveries, {given_up: 1}))
        case _:
            return figures


_UNDONE = {JobState.WAITING.value: "waiting", JobState.FAILED.value: "failed"}  # what a recovery ended in, if not done


def _loss(signal: str, node: str, held: Held) -> str:
    _, market = held.known.get(node, (0.0, "unknown"))
    return counted_as(signal, market, *held.places.get(node, ("", "")))


def with_recovery(held: Held, kind: str, payload: Mapping[str, Any]) -> Held:
    """Whether the job recovers after this entry, and from what."""
    if kind == RecoveryDone.kind:
        return replace(held, recovers_from="")
    if kind != StateChanged.kind:
        return held
    recovers = payload["state"] == JobState.RECOVERING
    return replace(held, recovers_from=str(payload["code"]) if recovers else "")


_NODE_KINDS = frozenset(
    {PlanAdopted.kind, WorkersStarted.kind, NodeLost.kind, "node_joined", "share_taken"}
    | {NodeNoticed.kind, NoticeEnded.kind, NodeStays.kind, NodeSlowed.kind, NodeRecovered.kind}
)


def with_nodes(held: Held, kind: str, at_s: float, payload: Mapping[str, Any]) -> Held:
    """The nodes after one more entry."""
    known, since_s, places = dict(held.known), dict(held.since_s), dict(held.places)
    noticed, slowed, usd = set(held.noticed), set(held.slowed), dict(held.usd)
    for node in payload.get("snapshot", {}).get("nodes", ()):
        market = "spot" if node.get("spot") else "on_demand"
        known.setdefault(node["id"], (float(node.get("price_per_hour", 0.0)), market))
        places.setdefault(node["id"], (str(node["device"]), str(node.get("zone", "default"))))
    for name in arrivals(kind, payload):
        since_s.setdefault(name, at_s)
    for name in sorted(departures(kind, payload, since_s)):
        came_at_s, (price, market) = since_s.pop(name), known.get(name, (0.0, ""))
        if price:
            usd[market] = usd.get(market, 0.0) + price * max(0.0, at_s - came_at_s) / _HOUR_S
    if kind == NodeNoticed.kind:
        noticed.add(payload["node"])
    elif kind in (NoticeEnded.kind, NodeLost.kind):
        noticed.discard(payload["node"])
    elif kind == NodeSlowed.kind:
        slowed.add(payload["node"])
    elif kind == NodeRecovered.kind:
        slowed.discard(payload["node"])
    return replace(
        held,
        since_s=since_s,
        known=known,
        noticed=frozenset(noticed).intersection(since_s),
        slowed=frozenset(slowed).intersection(since_s),
        usd=usd,
        places=places,
    )


def with_held(figures: Figures, held: Held, at_s: float) -> Figures:
    """What follows from the nodes that the job has at this time: how many, what they have cost and cost from now on.
    One that has ended has none."""
    usd, rate, count = dict(held.usd), dict[str, float](), dict[str, int]()
    for name, came_at_s in held.since_s.items():
        price, market = held.known.get(name, (0.0, "unknown"))
        count[market] = count.get(market, 0) + 1
        if price:
            usd[market] = usd.get(market, 0.0) + price * max(0.0, at_s - came_at_s) / _HOUR_S
            rate[market] = rate.get(market, 0.0) + price
    has_ended = figures.state in _ENDED
    return replace(
        figures,
        usd=usd,
        usd_at_s=at_s,
        usd_per_hour={} if has_ended else rate,
        nodes={} if has_ended else count,
        leaving=0 if has_ended else len(held.noticed),
        slow=0 if has_ended else len(held.slowed),
    )


def _added(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}


def _observed(before: Mapping[str, Histogram], values: Mapping[str, float]) -> dict[str, Histogram]:
    found = dict(before)
    for name, value in values.items():
        bounds = BOUNDS_S[name]
        empty = Histogram(counts=(0,) * (len(bounds) + 1))
        found[name] = found.get(name, empty).with_value(bounds, value)
    return found
