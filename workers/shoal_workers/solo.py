"""Runs one rank of a plan to its end, and a whole job as a single rank: the reference that plans are compared with.

Owns no processes: `run_rank` runs wherever it is called, given an exchange with the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shoal_planner.job import JobSpec
from shoal_planner.parameters import parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import OWNED_KINDS, Kind, ShardKey, Span
from shoal_workers.data import evaluation_samples, training_samples
from shoal_workers.engine import Engine, NoSnapshots, Outcome, SnapshotSink, StepReport
from shoal_workers.evaluation import EvaluationReport
from shoal_workers.exchange import Exchange, SoloExchange
from shoal_workers.first_values import first_values
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory

Array = npt.NDArray[np.float32]
_TOKENS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeState:
    """All of step `step`, unsharded: per kind and parameter the stored shape. For small models and references."""

    step: int
    values: Mapping[Kind, Mapping[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What one rank did, and what it holds at the end: `owned` master and moments, `kept` and `frozen` weights, all as
    fp32."""

    outcome: Outcome
    reports: tuple[StepReport, ...]
    evaluations: tuple[EvaluationReport, ...]
    peak_bytes: int
    breakdown: Mapping[str, int]
    host_breakdown: Mapping[str, int]
    owned: Mapping[ShardKey, Array]
    kept: Mapping[ShardKey, Array]
    frozen: Mapping[Span, Array]

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(report.loss for report in self.reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Step to `until_step`, from `start` or else from the seed's step 0. No limit where `limit_bytes`, or that of each
    rank's part of its host, is None."""

    job: JobSpec
    plan: Plan
    until_step: int
    start: WholeState | None = None
    limit_bytes: int | None = None
    host_limit_bytes: int | None = None
    stop_after: Mapping[int, int] | None = None  # rank -> the step after which it is told to stop
    device: str = "cpu"  # or "cuda": of each rank the one of its device's number; or one for all, "cuda:0"

    def device_of(self, rank: int) -> torch.device:
        if self.device != "cuda":
            return torch.device(self.device)
        place = next(place for place in self.plan.places() if place.rank == rank)
        return torch.device("cuda", place.device.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRank:
    """One rank with its state in place, before its first step."""

    engine: Engine
    live: LiveState
    memory: DeviceMemory

    def finish(
        self, outcome: Outcome, reports: Iterable[StepReport], evaluations: Iterable[EvaluationReport] = ()
    ) -> RankRun:
        return RankRun(
            outcome=outcome,
            reports=tuple(reports),
            evaluations=tuple(evaluations),
            peak_bytes=self.memory.peak_bytes,
            breakdown=self.memory.breakdown,
            host_breakdown=self.memory.host.breakdown,
            owned=_copy(self.live, self.live.owned_keys()),
            kept=_copy(self.live, self.live.kept_keys()),
            frozen={span: values.numpy() for span, values in self.live.frozen.copies().items()},
        )


_NO_SNAPSHOTS = NoSnapshots()


def build_rank(
    request: RunRequest,
    rank: int,
    exchange: Exchange,
    snapshots: SnapshotSink = _NO_SNAPSHOTS,
    clock: Callable[[], float] = time.perf_counter,
) -> BuiltRank:
    job, plan = request.job, request.plan
    shards = shard_map(plan, job.model)
    memory = DeviceMemory(str(shards.ranks[rank].device), request.limit_bytes, request.host_limit_bytes)
    live = LiveState.build(job.model, shards.ranks[rank], job.train.precision, memory, device=request.device_of(rank))
    if request.start is None:
        live.initialise(first_values(job))
    else:
        live.frozen.fill(lambda: first_values(job))
        _load(live, request.start)
    samples, held_out = training_samples(job), evaluation_samples(job)
    engine = Engine(job, plan, rank, shards, live, exchange, samples, snapshots, memory, clock, held_out)
    return BuiltRank(engine=engine, live=live, memory=memory)


def run_rank(request: RunRequest, rank: int, exchange: Exchange) -> RankRun:
    built = build_rank(request, rank, exchange)
    reports: list[StepReport] = []
    stop = (request.stop_after or {}).get(rank)
    evaluations: list[EvaluationReport] = []
    outcome = built.engine.run(
        until_step=request.until_step,
        report=reports.append,
        stop_after=lambda: stop,
        evaluated=evaluations.append,
    )
    return built.finish(outcome, reports, evaluations)


def solo_plan(job: JobSpec) -> Plan:
    """Everything on one device, in micro-batches of few samples, so that activations stay small."""
    batch = job.train.global_batch
    most = max(1, _TOKENS_AT_ONCE // job.train.seq_len)
    micro_batch = next(size for size in range(min(most, batch), 0, -1) if batch % size == 0)
    replica = Replica(node="solo", devices=(0,), samples=micro_batch)
    stage = Stage(layers=((0, job.model.layers),), replicas=(replica,))
    pipeline = Pipeline(micro_batch=micro_batch, micro_batches=batch // micro_batch, stages=(stage,))
    return Plan(pipelines=(pipeline,), copies=0, reason="one process")


class SoloRun(NamedTuple):
    """The loss and the seconds of each step, and at the end the master weights in their stored shapes."""

    losses: tuple[float, ...]
    weights: Mapping[str, Array]
    step_s: tuple[float, ...]


def run_solo(job: JobSpec, steps: int, *, start: WholeState | None = None, device: str = "cpu") -> SoloRun:
    """The job in this process, undisturbed, up to step `steps`."""
    request = RunRequest(job=job, plan=solo_plan(job), until_step=steps, start=start, device=device)
    run = run_rank(request, 0, SoloExchange())
    weights = whole_state(job, [run]).values[Kind.MASTER]
    return SoloRun(run.losses, weights, tuple(report.duration_s for report in run.reports))


def whole_state(job: JobSpec, runs: Iterable[RankRun]) -> WholeState:
    """Puts together what all ranks of a plan own."""
    found = list(runs)
    shapes = {parameter.fqn: (parameter.numel, parameter.shape) for parameter in parameters(job.model)}
    flat: dict[Kind, dict[str, Array]] = {
        kind: {fqn: np.full(numel, np.nan, dtype=np.float32) for fqn, (numel, _) in shapes.items()}
        for kind in OWNED_KINDS
    }
    for run in found:
        for key, values in run.owned.items():
            flat[key.kind][key.fqn][key.first : key.last] = values
    whole = {
        kind: {fqn: array.reshape(shapes[fqn][1]) for fqn, array in by_name.items()} for kind, by_name in flat.items()
    }
    return WholeState(step=found[0].outcome.step, values=whole)


def _load(live: LiveState, start: WholeState) -> None:
    for key in (*live.owned_keys(), *live.kept_keys()):
        kind = Kind.MASTER if key.kind is Kind.WEIGHT else key.kind
        live.view(key).copy_(torch.from_numpy(start.values[kind][key.fqn].reshape(-1)[key.first : key.last]))
    live.tag = start.step


def _copy(live: LiveState, keys: Iterable[ShardKey]) -> dict[ShardKey, Array]:
    return {key: live.view(key).detach().float().cpu().clone().numpy() for key in keys}
