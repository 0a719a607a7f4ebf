"""What it costs to make every step safe: the engine with and without copies of its state off the node, step by step.

Usage: python -m benchmarks.protection [--json] [--pairs N]

Two ranks, each posing as a node of its own with the agent process of a node, share a model whose optimizer state is
split between them, so nobody else has a second copy of it live. Steps with protection (copy into the agent's memory,
sums, transfer to the other agent, sums there) alternate with steps without, in one run; they are made as long as to
take about three seconds, and keep both cores busy.

`overhead_share` is how much longer a protected step takes than its neighbour, the median of the pairs. Beside it, by
part, the seconds of processors that both nodes spend in a protected step, over those of all cores in a plain one: what
a machine with cores to spare would save. `overhead_share.rest` is all else that agents do, and
`overhead_share.unexplained` what processors do not account for: ranks that compute slower beside the copies, or wait.
`stall_ms_per_166mb` is the time that a rank itself waits, for the copy and before its vote. Without free cores none of
this is worth much: then it says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cores import free_cores
from benchmarks.protection_agents import PARTS, Address, Agents
from benchmarks.reporting import answer
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, RankState, ShardKey
from shoal_workers import messages as m
from shoal_workers.devices import CPU
from shoal_workers.engine import NoSnapshots, SnapshotSink, StepReport
from shoal_workers.greeting import epoch_pass
from shoal_workers.lifeline import Lifeline
from shoal_workers.live import LiveState
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Processes, Seat
from shoal_workers.rows import key_rows
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.slots import Slots
from shoal_workers.snapshots import AgentSnapshots
from shoal_workers.solo import RunRequest, build_rank
from shoal_workers.wire import connect

NODES = ("one", "other")
# 14.8 million parameters: 178 MB of optimizer state.
MODEL = ModelSpec(layers=9, hidden=384, heads=6, kv_heads=3, ffn=1024, vocab=256)
SEQ_LEN, SAMPLES = 64, 2  # of a micro-batch, on each rank
STEP_S = 3.0
NUM_PAIRS = 12
WARM_UP = 4
STALL_BYTES = 166e6
_TRIED = (1, 4)  # numbers of micro-batches that are timed to find the right one
_LEAST_FREE = 0.8  # of all cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One step of one rank: how long it took, the part of it that the rank waited for protection, and the time of
    processors that its process had beside the thread that computes: for copies, above all."""

    step_s: float
    stall_s: float
    beside_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Of two neighbouring steps, the protected one and the other; each as the slowest rank saw it."""

    protected: Lap
    plain: Lap


def job(micro_batches: int) -> JobSpec:
    train = TrainSpec(global_batch=len(NODES) * SAMPLES * micro_batches, seq_len=SEQ_LEN, steps=100_000)
    return JobSpec(name="protection", model=MODEL, data=DataSpec(uri="stdlib:"), train=train)


def plan(micro_batches: int) -> Plan:
    """Both compute the same layers and split the optimizer's state, as plans do by default."""
    replicas = tuple(Replica(node=node, devices=(0,), samples=SAMPLES) for node in NODES)
    stage = Stage(layers=((0, MODEL.layers),), replicas=replicas)
    pipeline = Pipeline(micro_batch=len(NODES) * SAMPLES, micro_batches=micro_batches, stages=(stage,))
    return Plan(pipelines=(pipeline,), copies=1)


def is_protected(step: int) -> bool:
    """Whoever comes second of a pair finds other things in the caches; and both slots have their turns."""
    return step % 4 in (0, 1)


class Alternating:
    """A SnapshotSink that makes the state safe in every other step, and watches what the rank waits for."""

    def __init__(self, inner: SnapshotSink) -> None:
        self._inner = inner
        self.stall_s: dict[int, float] = {}
        self.beside_cpu_s: dict[int, float] = {}  # when a step began, since the process did

    def begin(self, step: int, live: LiveState, *, always: bool = False) -> None:
        """The state of a step is copied while the next one is computed."""
        self.stall_s[step + 1] = 0.0
        self.beside_cpu_s[step + 1] = time.process_time() - time.thread_time()
        if is_protected(step + 1):
            began_s = time.perf_counter()
            self._inner.begin(step, live, always=always)
            self.stall_s[step + 1] = time.perf_counter() - began_s

    def wait_safe(self, step: int) -> None:
        if is_protected(step + 1):
            began_s = time.perf_counter()
            self._inner.wait_safe(step)
            self.stall_s[step + 1] += time.perf_counter() - began_s


def train(seat: Seat, micro_batches: int, steps: int, agents: Sequence[Address]) -> list[Lap]:
    """This rank's steps; where there are no agents, none of them is protected in truth."""
    spec, made = job(micro_batches), plan(micro_batches)
    exchange = seat.connect(nodes=nodes_of(made))
    inner: SnapshotSink = NoSnapshots()
    if agents:
        inner = _snapshots(shard_map(made, MODEL).ranks[seat.rank], agents[seat.rank], agents[1 - seat.rank])
    sink, reports = Alternating(inner), list[StepReport]()
    request = RunRequest(job=spec, plan=made, until_step=steps)
    engine = build_rank(request, seat.rank, exchange, sink).engine
    engine.run(until_step=steps, report=reports.append, stop_after=lambda: None)
    beside_s = sink.beside_cpu_s
    return [
        Lap(
            step_s=one.duration_s,
            stall_s=sink.stall_s[one.step],
            beside_cpu_s=beside_s[one.step + 1] - beside_s[one.step],
        )
        for one in reports
    ]


def _snapshots(state: RankState, own: Address, other: Address) -> AgentSnapshots:
    keys = _vouched(state)
    opened = m.OpenSlots(
        job="protection",
        epoch=1,
        rank=state.rank,
        layout=key_rows(keys),
        backups=[["other", *other]],
        upload_uri=None,
        upload_every=1,
        last_step=0,
    )
    lifeline = Lifeline(cut_off_s=600.0, ends_itself_s=600.0)  # nobody gives orders here
    return AgentSnapshots(
        connect(own, shown=epoch_pass("protection", 1)), (Slots(opened=opened, keys=keys),), CPU, SlotMaps(), lifeline
    )


def _vouched(state: RankState) -> tuple[ShardKey, ...]:
    return tuple(span.key(kind) for kind in OWNED_KINDS for span in state.vouches)


def micro_batches_for(processes: Processes) -> int:
    """With so many a step takes about as long as it should: two numbers are timed, and the line through them is
    taken."""
    few, many = _TRIED
    took_s: dict[int, float] = {
        count: min(
            max(lap.step_s for lap in laps)
            for laps in zip(*processes.call(len(NODES), train, count, 3, ()), strict=True)
        )
        for count in _TRIED
    }
    each_s = (took_s[many] - took_s[few]) / (many - few)
    count: int = few + round((STEP_S - took_s[few]) / each_s)
    return max(1, count)


def measure(num_pairs: int) -> tuple[list[Pair], dict[str, float], dict[str, Any]]:
    """The pairs, what agents spent on a protected step, by part, and how it was measured."""
    num_steps = WARM_UP + 2 * num_pairs
    with Processes(len(NODES), timeout_s=900.0) as processes:
        micro_batches = micro_batches_for(processes)
        with Agents(NODES) as agents:
            by_rank = processes.call(len(NODES), train, micro_batches, num_steps, agents.addresses)
            spent = agents.spent()
    laps = {number: _slowest(some) for number, some in enumerate(zip(*by_rank, strict=True), start=1)}
    # Of the last step, too: at its end every rank makes that safe.
    num_protected = sum(is_protected(step) for step in range(1, num_steps + 2))
    shown = {"micro_batches": micro_batches, "protected_steps": num_protected, "agents": spent}
    return _pairs(laps), {part: value / num_protected for part, value in spent.items()}, shown


def _slowest(laps: Sequence[Lap]) -> Lap:
    return Lap(
        step_s=max(lap.step_s for lap in laps),
        stall_s=max(lap.stall_s for lap in laps),
        beside_cpu_s=sum(lap.beside_cpu_s for lap in laps),
    )


def _pairs(laps: dict[int, Lap]) -> list[Pair]:
    """Steps 1 and 2, 3 and 4, and so on, without those that warm up."""
    found = []
    for step in range(WARM_UP + 1, len(laps), 2):
        first, second = laps[step], laps[step + 1]
        protected, plain = (first, second) if is_protected(step) else (second, first)
        found.append(Pair(protected=protected, plain=plain))
    return found


def shares(pairs: Sequence[Pair], spent: dict[str, float], state_bytes: int) -> dict[str, float]:
    """`spent` in a protected step by all agents."""
    plain_s = statistics.median(pair.plain.step_s for pair in pairs)
    cores_s = plain_s * (os.cpu_count() or 1)
    copies_s = (pair.protected.beside_cpu_s - pair.plain.beside_cpu_s for pair in pairs)
    parts = {"copy": statistics.median(copies_s)}
    parts |= {part: spent[part] for part in (*PARTS, "rest")}
    stall_s = statistics.median(pair.protected.stall_s for pair in pairs)
    share = statistics.median(pair.protected.step_s / pair.plain.step_s - 1 for pair in pairs)
    return {
        "overhead_share": share,
        **{f"overhead_share.{part}": seconds / cores_s for part, seconds in parts.items()},
        "overhead_share.unexplained": share - sum(parts.values()) / cores_s,
        "stall_ms_per_166mb": stall_s * 1e3 * STALL_BYTES / (state_bytes / len(NODES)),
        "network_bytes_per_parameter": spent["received_bytes"] / num_parameters(MODEL),
        "step_s": plain_s,
        "state_bytes": state_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    before = free_cores()
    pairs, spent, shown = measure(arguments.pairs)
    free = {"before": before, "after": free_cores()}
    if min(free.values()) < _LEAST_FREE * (os.cpu_count() or 1):
        print(f"other work had some of the cores: {free}; the shares are of that, too", file=sys.stderr)
    state_bytes = num_parameters(MODEL) * ELEMENT_BYTES * len(OWNED_KINDS)
    runs = {"pairs": [dataclasses.asdict(pair) for pair in pairs], "free_cores": free, **shown}
    answer("protection", shares(pairs, spent, state_bytes) | {"free_cores": min(free.values())}, runs)


if __name__ == "__main__":
    main()
