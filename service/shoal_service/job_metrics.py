"""Names what the database knows for Prometheus: jobs by state, clusters, duties, and figures of each job. Pure: from
values to families of samples. One label set for each job that runs or has ended just now, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from shoal_recovery.journal import JobState
from shoal_service.job_figures import (
    BOUNDS_S,
    NOTICE,
    PHASES,
    STORED,
    Figures,
    Histogram,
    labels_of,
    step_time,
)

_JOB = ("job_id", "project")  # `job` is Prometheus' own name of what is scraped, and would be renamed by it
_WAITS = (JobState.QUEUED.value, JobState.WAITING.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """A job as its row and its figures say. `at_s` is now, or when it ended. `budget_usd`: None where it has none."""

    id: str
    project: str
    name: str
    model: str
    state: str
    cluster: str
    at_s: float
    step: int
    steps: int | None
    loss: float | None
    step_s: float | None
    tokens_per_s: float | None
    redone_steps: int
    lost_steps: int
    skipped_steps: int
    store_fails: bool
    budget_usd: float | None
    is_stuck: bool
    figures: Figures | None


def job_families(jobs: Sequence[WatchedJob], now_s: float) -> Iterable[Metric]:
    """The figures of these jobs."""
    info = _gauge("shoal_job_info", "A job that runs, or has ended just now.", ("name", "model", "state", "cluster"))
    for job in jobs:
        info.add_metric([job.id, job.project, job.name, job.model, job.state, job.cluster], 1)
    yield info
    for name, words, value in _ROW_GAUGES:
        yield _each(_gauge(name, words), jobs, value)
    for name, words, count in _ROW_COUNTERS:
        yield _each(_counter(name, words), jobs, count)
    counted = [(job, job.figures) for job in jobs if job.figures is not None]
    yield from _training(counted)
    yield from _recoveries(counted)
    yield from _stored(counted, now_s)
    yield from _nodes(counted)


_ROW_GAUGES: tuple[tuple[str, str, Any], ...] = (
    ("shoal_job_step", "The newest step that is done and counts.", lambda job: job.step),
    ("shoal_job_steps_planned", "After which step the job has succeeded.", lambda job: job.steps),
    ("shoal_job_loss", "The loss of the newest step.", lambda job: job.loss),
    ("shoal_job_step_seconds", "How long a step takes, smoothed.", lambda job: job.step_s),
    ("shoal_job_tokens_per_second", "Tokens in a step by how long it takes.", lambda job: job.tokens_per_s),
    ("shoal_job_skipped_steps", "Steps that brought no update (train.on_nan).", lambda job: job.skipped_steps),
    ("shoal_job_store_failing", "1 while the object store takes no checkpoints.", lambda job: int(job.store_fails)),
    ("shoal_job_stuck", "1 while the job makes no progress.", lambda job: int(job.is_stuck)),
    ("shoal_job_budget_dollars", "What the job may cost (limits.budget_usd).", lambda job: job.budget_usd),
)
_ROW_COUNTERS: tuple[tuple[str, str, Any], ...] = (
    ("shoal_job_redone_steps", "Steps done again after a loss, which were not safe yet.", lambda job: job.redone_steps),
    ("shoal_job_lost_steps", "Steps done again although they were safe.", lambda job: job.lost_steps),
)
_Counted = Sequence[tuple[WatchedJob, Figures]]


def _training(jobs: _Counted) -> Iterable[Metric]:
    tokens = _counter("shoal_job_tokens", "Tokens of all steps, those that were done again included.")
    over = _counter("shoal_job_time_seconds", "Where time went that is over: steps done, states left.", ("kind",))
    times = _gauge("shoal_job_elapsed_seconds", "Where the wall time of a job went until now.", ("kind",))
    ratio = _gauge("shoal_job_goodput_ratio", "Time in steps that count, by all time in which it was not paused.")
    steps = _histogram("shoal_step_duration_seconds", "How long steps took.")
    mfu = _gauge("shoal_job_mfu_ratio", "Model FLOP/s by those of its devices, as the plan counts them.")
    predicted = _gauge("shoal_plan_predicted_step_seconds", "How long a step should take, as its plan predicts.")
    for job, found in jobs:
        name = [job.id, job.project]
        for kind, seconds in time_over(found).items():
            over.add_metric([*name, kind], seconds)
        parts = time_parts(found, job.at_s)
        for kind, seconds in parts.items():
            times.add_metric([*name, kind], seconds)
        elapsed_s = max(0.0, job.at_s - found.first_at_s) - parts["paused"]
        if elapsed_s > 0:
            ratio.add_metric(name, min(1.0, parts["productive"] / elapsed_s))
        tokens.add_metric(name, found.tokens)
        _put(steps, name, "step", found.histograms)
        if "step_s" in found.predicted:
            predicted.add_metric(name, found.predicted["step_s"])
            if job.step_s and "mfu" in found.predicted:
                mfu.add_metric(name, found.predicted["mfu"] * found.predicted["step_s"] / job.step_s)
    return (tokens, over, times, ratio, steps, mfu, predicted)


def time_parts(found: Figures, at_s: float) -> dict[str, float]:
    """Seconds, as goodput.py tells them apart, with all phases of recoveries as one."""
    states = {**found.states}
    states[found.state] = states.get(found.state, 0.0) + max(0.0, at_s - found.state_at_s)
    parts = {
        "productive": found.productive_s,
        "checkpoint": found.stalled_s,
        "redone": found.redone_s,
        "evaluation": found.evaluation_s,
        "recovery": _recovery_s(found),
        "starting": states.get(JobState.STARTING.value, 0.0),
        "waiting": sum(states.get(state, 0.0) for state in _WAITS),
        "paused": states.get(JobState.PAUSED.value, 0.0),
    }
    return parts | {"other": max(0.0, max(0.0, at_s - found.first_at_s) - sum(parts.values()))}


def time_over(found: Figures) -> dict[str, float]:
    """Seconds that are over and told: none of them ever falls, as what is rolled back does in `time_parts`. A step that
    is done again counts as such when it is, not when the first one stops to count."""
    steps = step_time(found)
    return {
        "productive": steps.first_s,
        "checkpoint": steps.held_up_s,
        "redone": steps.again_s,
        "evaluation": found.evaluation_s,
        "recovery": _recovery_s(found),
        "startup": found.states.get(JobState.STARTING.value, 0.0),
        "waiting": sum(found.states.get(state, 0.0) for state in _WAITS),
        "paused": found.states.get(JobState.PAUSED.value, 0.0),
    }


def _recovery_s(found: Figures) -> float:
    whole, known = (sum(found.histograms[name].sum_s for name in names if name in found.histograms) for names in _SUMS)
    return max(whole, known)


_SUMS = (("total",), tuple(phase for phase in PHASES if phase != "total"))


_LOSS = ("signal", "market", "device", "zone")
_SOURCES = {"own": "local", "node": "local", "peer": "peer", "store": "object_store"}


def _recoveries(jobs: _Counted) -> Iterable[Metric]:
    count = _counter("shoal_recoveries", "Changes of plan in flight, by what for.", ("cause", "outcome"))
    phases = _histogram("shoal_recovery_duration_seconds", "How long the phases of recoveries took.", ("phase",))
    restored = _counter("shoal_recovery_bytes", "Where state came from in recoveries.", ("source", "tier"))
    losses = _counter("shoal_node_preemptions", "Nodes that went away, with a notice or suddenly.", _LOSS)
    notices = _histogram("shoal_preemption_notice_seconds", "How long before a node goes away the job was told.")
    for job, found in jobs:
        name = [job.id, job.project]
        for counted, number in found.recoveries.items():
            cause, outcome = labels_of(counted, 2)
            count.add_metric([*name, cause, outcome or "done"], number)
        for phase in PHASES:
            _put(phases, [*name, phase], phase, found.histograms)
        for tier, num_bytes in found.restored_bytes.items():
            restored.add_metric([*name, _SOURCES.get(tier, tier), tier], num_bytes)
        for counted, number in found.losses.items():
            losses.add_metric([*name, *labels_of(counted, len(_LOSS))], number)
        _put(notices, name, NOTICE, found.histograms)
    return (count, phases, restored, losses, notices)


def _stored(jobs: _Counted, now_s: float) -> Iterable[Metric]:
    count = _counter("shoal_job_checkpoints", "Steps that were brought to the object store, or failed.", ("outcome",))
    step = _gauge("shoal_job_checkpoint_step", "The newest step in the object store.")
    age = _gauge("shoal_checkpoint_age_seconds", "How long ago that step was stored.")
    size = _gauge("shoal_job_checkpoint_bytes", "How large it is.")
    took = _histogram("shoal_checkpoint_duration_seconds", "How long it took to bring steps there.", ("tier",))
    for job, found in jobs:
        name = [job.id, job.project]
        count.add_metric([*name, "stored"], found.checkpoints)
        count.add_metric([*name, "failed"], found.checkpoints_failed)
        _put(took, [*name, "store"], STORED, found.histograms)
        if found.stored_step is not None and found.stored_at_s is not None:
            step.add_metric(name, found.stored_step)
            age.add_metric(name, max(0.0, now_s - found.stored_at_s))
            size.add_metric(name, found.stored_bytes)
    return (count, step, age, size, took)


def _nodes(jobs: _Counted) -> Iterable[Metric]:
    nodes = _gauge("shoal_job_nodes", "Nodes that a job has.", ("market",))
    leaving = _gauge("shoal_job_nodes_leaving", "Those of its nodes of which somebody said that they go away.")
    slow = _gauge("shoal_job_nodes_slow", "Those of its nodes that count as stragglers.")
    cost = _counter("shoal_job_cost_dollars", "What its nodes have cost, of those with a stated price.", ("market",))
    rate = _gauge("shoal_job_cost_dollars_per_hour", "What its nodes cost now.", ("market",))
    for job, found in jobs:
        name = [job.id, job.project]
        for market, number in found.nodes.items():
            nodes.add_metric([*name, market], number)
        leaving.add_metric(name, found.leaving)
        slow.add_metric(name, found.slow)
        for market, usd in found.usd_until(job.at_s).items():
            cost.add_metric([*name, market], usd)
        for market, usd in found.usd_per_hour.items():
            rate.add_metric([*name, market], usd)
    return (nodes, leaving, slow, cost, rate)


def _gauge(name: str, words: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, words, labels=(*_JOB, *labels))


def _counter(name: str, words: str, labels: tuple[str, ...] = ()) -> CounterMetricFamily:
    return CounterMetricFamily(name, words, labels=(*_JOB, *labels))


def _histogram(name: str, words: str, labels: tuple[str, ...] = ()) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, words, labels=(*_JOB, *labels))


def _each(family: Any, jobs: Sequence[WatchedJob], value: Any) -> Metric:
    for job in jobs:
        if (found := value(job)) is not None:
            family.add_metric([job.id, job.project], found)
    assert isinstance(family, Metric)
    return family


def _put(family: HistogramMetricFamily, labels: list[str], kind: str, found: Mapping[str, Histogram]) -> None:
    """Prometheus adds up from the smallest bound on."""
    if kind in found:
        bounds = [*map(str, BOUNDS_S[kind]), "+Inf"]
        buckets = list(zip(bounds, accumulate(found[kind].counts), strict=True))
        family.add_metric(labels, buckets, found[kind].sum_s)
