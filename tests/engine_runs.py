"""Small jobs and plans for the engine's tests, and what runs in the processes of those tests."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import eventually

from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Override, Pipeline, Plan, Replica, Stage
from shoal_recovery.state import Kind, Span
from shoal_workers.engine import NoSnapshots, StepReport
from shoal_workers.errors import EpochAbandoned, PeerLost, StepRefused
from shoal_workers.exchange import Arriving, Exchange, Passing, Pending
from shoal_workers.live import LiveState
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import PlanRun, Seat
from shoal_workers.solo import RankRun, RunRequest, WholeState, build_rank, run_rank
from shoal_workers.tags import Purpose, purpose_of
from shoal_workers.tensor_parallel import TensorGroup, cross_entropy_sum, tp_groups

LAYERS = 6


def job(
    *, tied: bool = True, precision: Literal["fp32", "bf16"] = "fp32", steps: int = 20, lr: float = 3e-4
) -> JobSpec:
    return JobSpec(
        name="engine",
        model=ModelSpec(layers=LAYERS, hidden=64, heads=4, kv_heads=2, ffn=176, vocab=256, tie_embeddings=tied),
        data=DataSpec(uri="stdlib:"),
        train=TrainSpec(global_batch=8, seq_len=32, steps=steps, lr=lr, warmup_steps=10, precision=precision),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stage: how many layers, and (tp, samples) of each replica."""

    layers: int
    replicas: tuple[tuple[int, int], ...]
    shares: tuple[float, ...] | None = None


def part(layers: int, *replicas: tuple[int, int], shares: tuple[float, ...] | None = None) -> Part:
    return Part(layers=layers, replicas=replicas, shares=shares)


def plan(*pipelines: tuple[int, tuple[Part, ...]]) -> Plan:
    """From (number of micro-batches, stages) of each pipeline; every device is another."""
    devices = itertools.count()
    return Plan(pipelines=tuple(_pipeline(number, parts, devices) for number, parts in pipelines))


def on_nodes(plan: Plan, *nodes: str) -> Plan:
    """With its replicas, in the order of ranks, on these nodes."""
    names = iter(nodes)
    pipelines = tuple(
        dataclasses.replace(pipeline, stages=tuple(_on_nodes(stage, names) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return dataclasses.replace(plan, pipelines=pipelines)


def hosting(plan: Plan, *layers: tuple[int, int]) -> Plan:
    """With the optimizer state of these layers on the hosts of all stages that have them."""
    pipelines = tuple(
        dataclasses.replace(pipeline, stages=tuple(_hosting(stage, layers) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return dataclasses.replace(plan, pipelines=pipelines)


def _hosting(stage: Stage, layers: tuple[tuple[int, int], ...]) -> Stage:
    parts = ((max(first, low), min(last, high)) for first, last in layers for low, high in stage.layers)
    overrides = tuple(Override(layers=part, offload="optimizer") for part in sorted(parts) if part[0] < part[1])
    return dataclasses.replace(stage, overrides=overrides)


def _on_nodes(stage: Stage, names: Iterator[str]) -> Stage:
    replicas = tuple(dataclasses.replace(replica, node=next(names)) for replica in stage.replicas)
    return dataclasses.replace(stage, replicas=replicas)


def _pipeline(micro_batches: int, parts: tuple[Part, ...], devices: Iterator[int]) -> Pipeline:
    borders = list(itertools.accumulate((part.layers for part in parts), initial=0))
    stages = tuple(
        Stage(layers=((first, last),), replicas=_replicas(part, devices))
        for part, (first, last) in zip(parts, itertools.pairwise(borders), strict=True)
    )
    return Pipeline(micro_batch=stages[0].samples, micro_batches=micro_batches, stages=stages)


def _replicas(part: Part, devices: Iterator[int]) -> tuple[Replica, ...]:
    shares = part.shares or (1.0,) * len(part.replicas)
    return tuple(
        Replica(node="here", devices=tuple(itertools.islice(devices, tp)), tp=tp, samples=samples, state_share=share)
        for (tp, samples), share in zip(part.replicas, shares, strict=True)
    )


LAYOUTS = {
    "tp 2": plan((2, (part(6, (2, 4)),))),
    "layers 1+5": plan((4, (part(1, (1, 2)), part(5, (1, 2))))),
    "two equal pipelines": plan((2, (part(6, (1, 2)),)), (2, (part(6, (1, 2)),))),
    "3 stages beside 1": plan((3, (part(2, (2, 2)), part(2, (1, 2)), part(2, (1, 2)))), (2, (part(6, (1, 1)),))),
    "replicas of 3 and 1": plan((2, (part(3, (1, 3), (1, 1)), part(3, (1, 4))))),
    "tp 1 beside tp 2": plan((3, (part(6, (1, 2)),)), (1, (part(6, (2, 2)),))),
    "uneven state, head alone": plan(
        (2, (part(6, (1, 1), (1, 2), shares=(0.2, 1.0)), part(0, (1, 3)))), (1, (part(4, (1, 2)), part(2, (1, 2))))
    ),
}


def worst_difference(ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """Over all tensors, of max|delta| / max|w|."""
    return max(float(np.abs(ours[fqn] - tensor).max() / np.abs(tensor).max()) for fqn, tensor in reference.items())


def assert_same_bits(one: WholeState, other: WholeState) -> None:
    for kind, tensors in one.values.items():
        for fqn, tensor in tensors.items():
            assert tensor.tobytes() == other.values[kind][fqn].tobytes(), (kind, fqn)


def assert_holders_agree(run: PlanRun, job: JobSpec) -> None:
    """Every weight that any rank keeps is, to the bit, the owners' master in the job's precision."""
    for rank in run.ranks:
        for key, values in rank.kept.items():
            master = torch.from_numpy(run.state.values[Kind.MASTER][key.fqn].reshape(-1)[key.first : key.last])
            if job.train.precision == "bf16":
                master = master.bfloat16().float()
            assert values.tobytes() == master.numpy().tobytes(), (key, rank)


class Wrapped:
    """An exchange that counts votes, and through which a test meddles with one rank."""

    def __init__(self, exchange: Exchange) -> None:
        self.inner = exchange
        self.rank, self.size, self.epoch = exchange.rank, exchange.size, exchange.epoch
        self.on_device = exchange.on_device
        self.num_votes = 0

    def connect(self) -> None:
        self.inner.connect()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        return self.inner.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        return self.inner.irecv(tensor, peer, tag)

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return self.inner.room(numel, dtype, peers)

    def all_gather(self, vector: Tensor) -> Tensor:
        self.num_votes += 1
        return self.inner.all_gather(vector)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self.inner.all_reduce_sum(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        self.inner.all_reduce_max(tensor)

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        return self.inner.start_all_reduce_sum(tensor)

    def commit(self) -> AbstractContextManager[None]:
        return self.inner.commit()

    def abandon(self) -> None:
        self.inner.abandon()


class StopsItself(Wrapped):
    """Sends SIGSTOP to its own process in front of the first message of a purpose after so many votes."""

    def __init__(self, exchange: Exchange, purpose: Purpose, after_votes: int) -> None:
        super().__init__(exchange)
        self._purpose = purpose
        self._after_votes = after_votes

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        if self.num_votes == self._after_votes and purpose_of(tag) is self._purpose:
            self._after_votes = -1
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().isend(tensor, peer, tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """What a rank has after its epoch ended in the middle of a step."""

    error: str
    tag: int | None
    held: dict[tuple[str, int, int], np.ndarray]
    reported: int


def run_beside_stopped(seat: Seat, request: RunRequest, victim: int, purpose: Purpose, after_votes: int) -> Interrupted:
    """The engine, with a `victim` that stops itself; ends when this rank's epoch does."""
    exchange = seat.connect(tp_groups(request.plan), nodes=nodes_of(request.plan))
    if seat.rank == victim:
        exchange = StopsItself(exchange, purpose, after_votes)
    built = build_rank(request, seat.rank, exchange)
    reports: list[StepReport] = []
    try:
        built.engine.run(until_step=request.until_step, report=reports.append, stop_after=lambda: None)
    except (EpochAbandoned, PeerLost) as error:
        return Interrupted(error=type(error).__name__, tag=built.live.tag, held=held(built.live), reported=len(reports))
    raise AssertionError("the epoch did not end")


def held(live: LiveState) -> dict[tuple[str, int, int], np.ndarray]:
    keys = (*live.kept_keys(), *live.owned_keys())
    return {(f"{key.kind}:{key.fqn}", key.first, key.last): live.view(key).float().numpy().copy() for key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    reason: str
    tag: int | None
    num_votes: int
    changed: bool


def run_poisoned(seat: Seat, request: RunRequest, poisoned_rank: int) -> Refusal:
    """The engine, with one weight of one rank not a number."""
    exchange = Wrapped(seat.connect(tp_groups(request.plan), nodes=nodes_of(request.plan)))
    built = build_rank(request, seat.rank, exchange)
    if seat.rank == poisoned_rank:
        span = next(span for span in built.live.state.keeps if span.fqn.endswith(".attention_norm.weight"))
        built.live.weight(Span(fqn=span.fqn, first=span.first, last=span.first + 1)).fill_(float("nan"))
    before = held(built.live)
    try:
        built.engine.run(until_step=request.until_step, report=lambda report: None, stop_after=lambda: None)
    except StepRefused as error:
        after = held(built.live)
        changed = any(before[key].tobytes() != after[key].tobytes() for key in before)
        return Refusal(reason=str(error), tag=built.live.tag, num_votes=exchange.num_votes, changed=changed)
    raise AssertionError("the step was not refused")


class PoisonedOnce:
    """A SnapshotSink of one rank that makes a weight no number for as long as one step lasts."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._whole = torch.zeros(1)

    def begin(self, step: int, live: LiveState, *, always: bool = False) -> None:
        weight = live.weight(next(span for span in live.state.holds if span.fqn == "layers.0.attention_norm.weight"))
        if step == self._step - 1:
            self._whole = weight.clone()
            weight.fill_(float("nan"))
        if step == self._step:
            weight.copy_(self._whole)

    def wait_safe(self, step: int) -> None:
        pass


def run_poisoned_once(seat: Seat, request: RunRequest, poisoned_rank: int, step: int) -> RankRun:
    """The engine, with one weight of one rank not a number during one step."""
    sink = PoisonedOnce(step) if seat.rank == poisoned_rank else NoSnapshots()
    built = build_rank(request, seat.rank, seat.connect(tp_groups(request.plan)), sink)
    reports: list[StepReport] = []
    outcome = built.engine.run(until_step=request.until_step, report=reports.append, stop_after=lambda: None)
    return built.finish(outcome, reports)


class SpoilsOnce(Wrapped):
    """The first gradients that leave after so many votes are no numbers."""

    def __init__(self, exchange: Exchange, after_votes: int) -> None:
        super().__init__(exchange)
        self._after_votes = after_votes

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        if self.num_votes == self._after_votes and purpose_of(tag) is Purpose.REDUCE:
            self._after_votes = -1
            tensor.fill_(float("nan"))
        return super().isend(tensor, peer, tag)


def run_spoilt_once(seat: Seat, request: RunRequest, spoilt_rank: int, step: int) -> tuple[RankRun, int]:
    """The engine, with gradients of one rank that break on their way in one attempt at a step. And how often the ranks
    voted."""
    exchange = seat.connect(tp_groups(request.plan), nodes=nodes_of(request.plan))
    wrapped = SpoilsOnce(exchange, step - 1) if seat.rank == spoilt_rank else Wrapped(exchange)
    built = build_rank(request, seat.rank, wrapped)
    reports: list[StepReport] = []
    outcome = built.engine.run(until_step=request.until_step, report=reports.append, stop_after=lambda: None)
    return built.finish(outcome, reports), wrapped.num_votes


class UnsafeOnce:
    """A SnapshotSink that holds one step back until it is released, and writes down what it was asked."""

    def __init__(self, step: int) -> None:
        self.asked: list[tuple[str, int]] = []
        self.released = threading.Event()
        self.waiting = threading.Event()
        self._step = step

    def begin(self, step: int, live: LiveState, *, always: bool = False) -> None:
        assert live.tag == step
        self.asked.append(("begin", step))

    def wait_safe(self, step: int) -> None:
        self.asked.append(("wait_safe", step))
        if step == self._step:
            self.waiting.set()
            assert self.released.wait(timeout=30.0)


def receive_until_abandoned(seat: Seat, nodes: tuple[str, ...], asked: bool) -> tuple[str, float]:
    """Waits for what the other rank never sends, perhaps after having asked whether it is here; the error, and the
    seconds from abandoning to waking."""
    exchange = seat.connect(nodes=nodes)
    exchange.all_gather(torch.zeros(1))
    pending = exchange.irecv(torch.zeros(4), 1 - seat.rank, 1)
    assert not (asked and pending.has_passed())
    began_s: list[float] = []

    def abandon() -> None:
        began_s.append(time.perf_counter())
        exchange.abandon()

    threading.Timer(0.1, abandon).start()
    try:
        pending.wait()
    except PeerLost:  # the other rank was quicker: its sockets are gone
        return "abandoned by the peer", 0.0
    except EpochAbandoned as error:
        return str(error), time.perf_counter() - began_s[0]
    raise AssertionError("nothing was sent, yet something arrived")


def receive_part_of_a_message(seat: Seat) -> float:
    """Rank 1 stops in the middle of sending; rank 0 waits for the rest, and returns how long waking took."""
    exchange = seat.connect(nodes=("a", "b"))
    big = torch.zeros(1 << 24)  # 64 MiB, far more than any socket buffers
    pending = exchange.irecv(big, 1, 1) if seat.rank == 0 else None
    exchange.all_gather(torch.zeros(1))
    if pending is None:
        sending = exchange.isend(big.fill_(1.0), 0, 1)
        os.kill(os.getpid(), signal.SIGSTOP)
        sending.wait()
        return 0.0
    eventually(lambda: bool(big[0]))  # its first bytes are here
    began_s: list[float] = []

    def abandon() -> None:
        began_s.append(time.perf_counter())
        exchange.abandon()

    threading.Timer(0.2, abandon).start()
    try:
        pending.wait()
    except EpochAbandoned:
        return time.perf_counter() - began_s[0]
    raise AssertionError("the message came whole from a stopped process")


def fail_on_rank(seat: Seat, nodes: tuple[str, ...], failing: int) -> None:
    """One rank raises; the others wait for it."""
    exchange = seat.connect(nodes=nodes)
    exchange.all_gather(torch.zeros(1))
    if seat.rank == failing:
        raise ZeroDivisionError
    exchange.irecv(torch.zeros(1), failing, 1).wait()


def die_on_rank(seat: Seat, dying: int) -> None:
    if seat.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)


def reduce_in_groups(
    seat: Seat, nodes: tuple[str, ...], groups: tuple[tuple[int, ...], ...], numel: int
) -> tuple[set[float], set[float]]:
    """Sums and maxima of the ranks of this rank's group, several in a row."""
    exchange = seat.connect(groups, nodes=nodes)
    for _ in range(4):
        total, top = torch.full((numel,), float(seat.rank)), torch.full((numel,), float(seat.rank))
        exchange.all_reduce_sum(total)
        exchange.all_reduce_max(top)
    exchange.all_gather(torch.zeros(1))
    return set(total.tolist()), set(top.tolist())


def run_noting_logits(seat: Seat, request: RunRequest) -> list[tuple[int, np.ndarray]]:
    """One step; what this rank found of the logits in its forwards, in their order: the first row of the vocabulary and
    [tokens, rows]."""
    found: list[tuple[int, np.ndarray]] = []

    def noting(slices_TV: Sequence[Tensor], targets_T: Tensor, first_rows: Sequence[int], group: TensorGroup) -> Tensor:
        for slice_TV, first_row in zip(slices_TV, first_rows, strict=True):
            found.append((first_row, slice_TV.detach().float().numpy()))
        return cross_entropy_sum(slices_TV, targets_T, first_rows, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal_workers.model.cross_entropy_sum", noting)
        run_rank(request, seat.rank, seat.connect(tp_groups(request.plan), nodes=nodes_of(request.plan)))
    return found
