"""What it costs to add up gradients of two replicas of which only one is tensor parallel.

Usage: python -m benchmarks.asymmetric_tp [--json] [--rounds N]

The reduce path is all that is between the last backward and the vote, and between the update and the next step:
packing, sending, adding, and handing weights back. With tp 2 beside tp 1 it has three processes; the same bytes go
between two of tp 1, and between four of tp 2, so what it is compared with is the mean of these. Seconds are those of
processors, summed over all processes: with more processes than cores, seconds of a clock are mostly those of whoever
waits for a core. `asymmetric_tp_cost` is the difference, over the seconds of a step; `bytes_ratio` compares what is
sent, and `relayout_copies` counts operators of the reduce path that transpose a tensor or make it contiguous.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cores import free_cores
from benchmarks.duel import Ours
from benchmarks.reporting import answer
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.schedule import sync_order
from shoal_recovery.shard_map import shard_map
from shoal_workers.collective_routes import ways
from shoal_workers.courier import Courier
from shoal_workers.exchange import Arriving, Exchange, Passing, Pending
from shoal_workers.first_values import first_values
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.processes import Processes, Seat
from shoal_workers.sharing import Sharing

NUM_ROUNDS = 15
WARM_UP = 3
NUM_STEPS = 3
MODEL = ModelSpec(layers=8, hidden=384, heads=6, kv_heads=2, ffn=1024, vocab=1024, tie_embeddings=False)
JOB = JobSpec(
    name="asymmetric-tp",
    model=MODEL,
    data=DataSpec(uri="stdlib:"),
    train=TrainSpec(global_batch=8, seq_len=256, steps=1000),
)
_RELAYOUT = ("aten::contiguous", "aten::clone", "aten::t", "aten::transpose", "aten::permute")


def plan(*degrees: int) -> Plan:
    """A pipeline of one stage for each degree of tensor parallelism; all devices on one node."""
    pipelines, device = [], 0
    for tp in degrees:
        samples = JOB.train.global_batch // len(degrees)
        replica = Replica(node="here", devices=tuple(range(device, device + tp)), tp=tp, samples=samples)
        stage = Stage(layers=((0, MODEL.layers),), replicas=(replica,))
        pipelines.append(Pipeline(micro_batch=samples, micro_batches=1, stages=(stage,)))
        device += tp
    return Plan(pipelines=tuple(pipelines), copies=0)


PLANS = {"tp1|tp1": plan(1, 1), "tp2|tp1": plan(2, 1), "tp2|tp2": plan(2, 2)}


class Counted:
    """An exchange that counts what is sent."""

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner
        self.rank, self.size, self.epoch = inner.rank, inner.size, inner.epoch
        self.on_device = inner.on_device
        self.sent_bytes = 0

    def connect(self) -> None:
        self._inner.connect()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        self.sent_bytes += tensor.nbytes
        return self._inner.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        return self._inner.irecv(tensor, peer, tag)

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return self._inner.room(numel, dtype, peers)

    def all_gather(self, vector: Tensor) -> Tensor:
        return self._inner.all_gather(vector)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._inner.all_reduce_sum(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._inner.all_reduce_max(tensor)

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        return self._inner.start_all_reduce_sum(tensor)

    def commit(self) -> AbstractContextManager[None]:
        return self._inner.commit()

    def abandon(self) -> None:
        self._inner.abandon()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the reduce path took in one process, a time, and what a step did: seconds of processors."""

    reduce_cpu_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    step_cpu_s: tuple[float, ...]
    sent_bytes: int
    relayout_copies: int


def measure(seat: Seat, chosen: Plan, num_rounds: int) -> Part:
    exchange = Counted(seat.connect())
    path, gate = _reduce_path(seat, chosen, exchange), seat.connect(name="gate")
    laps = [_lap(path, gate) for _ in range(WARM_UP + num_rounds)][WARM_UP:]
    before_bytes = exchange.sent_bytes
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        path()
    sent_bytes = exchange.sent_bytes - before_bytes
    ours = Ours(seat, JOB, chosen)
    steps = [_lap(lambda number=number: ours.step(number), gate) for number in range(1, NUM_STEPS + 2)][1:]  # type: ignore[misc]
    return Part(
        reduce_cpu_s=tuple(cpu_s for _, cpu_s in laps),
        reduce_s=tuple(lap_s for lap_s, _ in laps),
        step_cpu_s=tuple(cpu_s for _, cpu_s in steps),
        sent_bytes=sent_bytes,
        relayout_copies=sum(event.count for event in watched.key_averages() if event.key in _RELAYOUT),
    )


def _reduce_path(seat: Seat, chosen: Plan, exchange: Exchange) -> Callable[[], None]:
    shards, memory = shard_map(chosen, MODEL), DeviceMemory("here", None)
    live = LiveState.build(MODEL, shards.ranks[seat.rank], JOB.train.precision, memory)
    live.initialise(first_values(JOB))
    units = sync_order(chosen, MODEL)
    found = ways(chosen, MODEL, shards, seat.rank, {})
    sharing = Sharing(found, units, live, exchange, Courier(exchange, memory))

    def path() -> None:
        sharing.begin()
        for unit in reversed(units):
            sharing.reduce(unit)
        sharing.settle()
        for unit in units:
            sharing.gather(unit)
        sharing.settle()

    return path


def _lap(work: Callable[[], object], gate: Exchange) -> tuple[float, float]:
    gate.all_gather(torch.zeros(1))
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began_s, time.process_time() - cpu_began_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    free, found = free_cores(), {}
    with Processes(4, timeout_s=600.0) as processes:
        for name, chosen in PLANS.items():
            found[name] = processes.call(sum(1 for _ in chosen.places()), measure, chosen, arguments.rounds)
    reduce_s = {name: _median_sum([part.reduce_cpu_s for part in parts]) for name, parts in found.items()}
    step_s = _median_sum([part.step_cpu_s for part in found["tp2|tp1"]])
    sent = {name: sum(part.sent_bytes for part in parts) for name, parts in found.items()}
    symmetric = [name for name in PLANS if name != "tp2|tp1"]
    results = {
        "asymmetric_tp_cost": (reduce_s["tp2|tp1"] - statistics.mean(reduce_s[name] for name in symmetric)) / step_s,
        "bytes_ratio": sent["tp2|tp1"] / statistics.mean(sent[name] for name in symmetric),
        "relayout_copies": float(sum(part.relayout_copies for part in found["tp2|tp1"])),
    }
    runs = {
        "free_cores": {"before": free, "after": free_cores()},
        "reduce_cpu_s": reduce_s,
        "step_cpu_s": step_s,
        "sent_bytes": sent,
        "parts": {name: [asdict(part) for part in parts] for name, parts in found.items()},
    }
    answer("asymmetric_tp", results, runs)


def _median_sum(by_rank: list[tuple[float, ...]]) -> float:
    """Of all processes together, the median over rounds."""
    return statistics.median(math.fsum(parts) for parts in zip(*by_rank, strict=True))


if __name__ == "__main__":
    main()
