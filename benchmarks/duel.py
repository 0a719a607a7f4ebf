"""Two ways to train the same model, side by side: their steps alternate in the same processes, so that both see the
same machine.

Owns the stop-watch. A step begins when all processes are ready for it, and has taken as long as the slowest one's part.
Memory is measured apart, in processes that run one side alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.peers.contender import Contender, process_group
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_workers.exchange import Exchange
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Processes, Seat
from shoal_workers.solo import RunRequest, build_rank
from shoal_workers.tensor_parallel import tp_groups

WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """`peer` builds the other side of the same job in each of `size` processes."""

    name: str
    size: int
    job: JobSpec
    plan: Plan
    peer: Callable[[Seat, JobSpec], Contender]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One step of one side: seconds, seconds of processors in all its processes, and the loss."""

    step_s: float
    cpu_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same step of both; the same samples, so about the same loss."""

    ours: Lap
    peer: Lap


class Ours:
    """The engine, as a contender, through an exchange that may be `observed`. Its reports are of the whole step; rank 0
    says the loss for all."""

    def __init__(
        self,
        seat: Seat,
        job: JobSpec,
        plan: Plan,
        *,
        name: str = "ours",
        observed: Callable[[Exchange], Exchange] = lambda exchange: exchange,
    ) -> None:
        self._rank = seat.rank
        request = RunRequest(job=job, plan=plan, until_step=job.train.steps)
        exchange = seat.connect(tp_groups(plan), nodes=nodes_of(plan), name=name)
        self._engine = build_rank(request, seat.rank, observed(exchange)).engine
        self._losses: list[float] = []

    def step(self, number: int) -> float:
        self._engine.run(
            until_step=number, report=lambda report: self._losses.append(report.loss), stop_after=lambda: None
        )
        return self._losses[-1] if self._rank == 0 else 0.0


def alternate(processes: Processes, duel: Duel, num_pairs: int) -> tuple[Pair, ...]:
    """The first steps of both only warm up."""
    rounds = zip(*processes.call(duel.size, _alternate, duel, num_pairs), strict=True)
    return tuple(
        Pair(ours=whole([part.ours for part in parts]), peer=whole([part.peer for part in parts])) for parts in rounds
    )


def memory_bytes(duel: Duel, *, ours: bool, steps: int = 3) -> int:
    """The most that a process took on top of what it had before the model was built; of the process with most."""
    with Processes(duel.size, timeout_s=600.0) as processes:
        return max(processes.call(duel.size, _memory_bytes, duel, ours, steps))


def ratio(pairs: tuple[Pair, ...]) -> float:
    """Of tokens per second, ours over the peer's: the median over pairs."""
    return statistics.median(pair.peer.step_s / pair.ours.step_s for pair in pairs)


def whole(parts: Sequence[Lap]) -> Lap:
    return Lap(
        step_s=max(part.step_s for part in parts),
        cpu_s=sum(part.cpu_s for part in parts),
        loss=sum(part.loss for part in parts),
    )


def _alternate(seat: Seat, duel: Duel, num_pairs: int) -> list[Pair]:
    gate = seat.connect(name="gate")
    pairs: list[Pair] = []
    with _group(seat):
        ours, peer = Ours(seat, duel.job, duel.plan), duel.peer(seat, duel.job)
        for number in range(1, WARM_UP + num_pairs + 1):
            if number % 2:  # whoever comes second finds other things in the caches
                our_lap, peer_lap = timed(ours, number, gate), timed(peer, number, gate)
            else:
                peer_lap, our_lap = timed(peer, number, gate), timed(ours, number, gate)
            pairs.append(Pair(ours=our_lap, peer=peer_lap))
    return pairs[WARM_UP:]


def timed(side: Contender, number: int, gate: Exchange) -> Lap:
    gate.all_gather(torch.zeros(1))
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    loss = side.step(number)
    return Lap(step_s=time.perf_counter() - began_s, cpu_s=time.process_time() - cpu_began_s, loss=loss)


def _memory_bytes(seat: Seat, duel: Duel, ours: bool, steps: int) -> int:
    with nullcontext() if ours else _group(seat):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _resident_bytes("VmRSS")
        side = Ours(seat, duel.job, duel.plan) if ours else duel.peer(seat, duel.job)
        for number in range(1, steps + 1):
            side.step(number)
        return _resident_bytes("VmHWM") - before


def _group(seat: Seat) -> AbstractContextManager[None]:
    return process_group(seat) if seat.size > 1 else nullcontext()


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024
