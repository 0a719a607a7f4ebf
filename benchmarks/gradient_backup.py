"""Two ways of making every step safe, in one run: sending the state to another node, or the gradients that made it.

Usage: python -m benchmarks.gradient_backup [--json] [--cycles N]

The ranks, agents, model and length of a step are those of `benchmarks.protection`. In turns of eight steps two are made
safe by snapshots (12 bytes a parameter copied, summed, sent), four by gradients (4 bytes copied, summed, sent; the
agent of the other node applies the same AdamW to its copy of the state, after the vote for the next step, and takes
sums of it before and after), and two not at all. The copy that gradients are applied to begins as the snapshot before
them. After each run of gradients the sums of the copies are compared with those of the ranks: `equal_shards_share`.

`cpu_s.*` are seconds of processors that both nodes spend to make one step safe, by way and part; `cpu_ratio` is that
of gradients over that of snapshots, also if nobody looked for flipped bits in copies. `overhead_share.*` is how much
longer a step takes than those of its turn without protection, the median of the turns; `rank_cpu_share.*` how much more
both rank processes themselves compute. `stall_ms_per_166mb.*` is the time that a rank itself waits, in both ways for
166 MB of state. `exact_in_bf16_share` are the elements of reduced gradients that two bytes would hold as they are.
Without free cores none of the times is worth much: then it says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from benchmarks.cores import free_cores
from benchmarks.gradient_agents import (
    CYCLE,
    GRADIENTS,
    PLAIN,
    SNAPSHOTS,
    UPDATE_PARTS,
    WAYS,
    Final,
    is_last,
    is_timed,
    serve,
    way_of,
)
from benchmarks.gradient_copies import gradient_keys
from benchmarks.protection import MODEL, NODES, STALL_BYTES, Alternating, job, micro_batches_for, plan, snapshots
from benchmarks.protection_agents import PARTS, Address, Agents
from benchmarks.reporting import answer
from shoal_planner.parameters import num_parameters
from shoal_recovery.crc import checksum
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, ShardKey, Span
from shoal_workers.engine import SnapshotSink, StepReport
from shoal_workers.live import LiveState
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Processes, Seat
from shoal_workers.shards import snapshot_name
from shoal_workers.solo import RunRequest, build_rank

NUM_CYCLES = 10
_LEAST_FREE = 0.8  # of all cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One step of one rank, or of the slowest: how long it took, what of that the rank waited for protection, and the
    seconds of processors of the copy and of the whole process, of all ranks."""

    step_s: float
    stall_s: float
    copy_cpu_s: float
    rank_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaw:
    """`laps` by the step that they make safe, which is the one before; `sums` of the live state, by step."""

    laps: dict[int, Lap]
    sums: dict[int, list[str]]
    exact_in_bf16_share: float


class _Reduced:
    """Gradients where a snapshot looks for masters. At the beginning of a step they are still those of the step before,
    summed over all ranks and clipped: what its update was made of."""

    def __init__(self, live: LiveState) -> None:
        self._live = live

    def view(self, key: ShardKey) -> Tensor:
        return self._live.gradient(Span(fqn=key.fqn, first=key.first, last=key.last))


class _Gradients:
    """A SnapshotSink that is given a live state, and copies its gradients."""

    def __init__(self, inner: SnapshotSink) -> None:
        self._inner = inner

    def begin(self, step: int, live: LiveState) -> None:
        self._inner.begin(step, cast(LiveState, _Reduced(live)))

    def wait_safe(self, step: int) -> None:
        self._inner.wait_safe(step)


class Turns:
    """A SnapshotSink that makes each step safe in the way whose turn it is."""

    def __init__(self, ways: dict[str, SnapshotSink]) -> None:
        self.ways = {way: Alternating(sink, _turn_of(way)) for way, sink in ways.items()}
        self.cpu_s: list[float] = []  # of this process, at the beginning of each step
        self.sums: dict[int, list[str]] = {}
        self.num_exact = self.num_elements = 0

    def begin(self, step: int, live: LiveState) -> None:
        self.cpu_s.append(time.process_time())
        for sink in self.ways.values():
            sink.begin(step, live)
        if is_last(step):
            keys = live.vouched_keys()
            self.sums[step] = [checksum(live.view(key).clone().numpy().data.cast("B")) for key in keys]
            self._count_exact(live)

    def wait_safe(self, step: int) -> None:
        for sink in self.ways.values():
            sink.wait_safe(step)

    def _count_exact(self, live: LiveState) -> None:
        for gradient in map(live.gradient, live.state.vouches):
            self.num_exact += int((gradient == gradient.bfloat16().float()).sum())
            self.num_elements += gradient.numel()


def _turn_of(way: str) -> Callable[[int], bool]:
    """Of a step in which the one before is brought to safety."""
    return lambda step: way_of(step - 1) == way


def train(seat: Seat, micro_batches: int, steps: int, agents: Sequence[Address]) -> RankSaw:
    made = plan(micro_batches)
    exchange = seat.connect(nodes=nodes_of(made))
    keys = shard_map(made, MODEL).ranks[seat.rank].vouched_keys
    whole = snapshots(seat.rank, keys, agents, SNAPSHOTS)
    sink = Turns(
        {SNAPSHOTS: whole, GRADIENTS: _Gradients(snapshots(seat.rank, gradient_keys(keys), agents, GRADIENTS))}
    )
    request = RunRequest(job=job(micro_batches), plan=made, until_step=steps)
    reports: list[StepReport] = []
    engine = build_rank(request, seat.rank, exchange, sink).engine
    engine.run(until_step=steps, report=reports.append, stop_after=lambda: None)
    return RankSaw(
        laps={report.step - 1: _lap(report, sink) for report in reports},
        sums=sink.sums,
        exact_in_bf16_share=sink.num_exact / sink.num_elements,
    )


def _lap(report: StepReport, sink: Turns) -> Lap:
    return Lap(
        step_s=report.duration_s,
        stall_s=sum(way.stall_s[report.step] for way in sink.ways.values()),
        copy_cpu_s=sum(way.copy_cpu_s[report.step] for way in sink.ways.values()),
        rank_cpu_s=sink.cpu_s[report.step] - sink.cpu_s[report.step - 1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`turns` without the first: of each the mean lap by way. `spent` by agents, by part and way."""

    turns: list[dict[str, Lap]]
    spent: dict[str, float]
    equal_shards: int  # of `compared_shards`, after all runs of gradients
    compared_shards: int
    exact_in_bf16_share: float
    micro_batches: int
    problems: list[str]


def measure(num_cycles: int) -> Measured:
    num_steps = CYCLE * (num_cycles + 1)
    with Processes(len(NODES), timeout_s=1200.0) as processes:
        micro_batches = micro_batches_for(processes)
        with Agents(NODES, functools.partial(serve, job(micro_batches))) as agents:
            ranks: list[RankSaw] = processes.call(len(NODES), train, micro_batches, num_steps, agents.addresses)
            found = agents.ask()
    spent: Counter[str] = Counter()
    final: Final = {}
    for seconds, states, _ in found:
        spent.update(seconds)
        final |= states
    equal = [equal for rank, saw in enumerate(ranks) for equal in _equal(rank, saw.sums, final)]
    return Measured(
        turns=[_turn(ranks, cycle * CYCLE) for cycle in range(1, num_cycles + 1)],
        spent=dict(spent),
        equal_shards=sum(equal),
        compared_shards=len(equal),
        exact_in_bf16_share=statistics.fmean(saw.exact_in_bf16_share for saw in ranks),
        micro_batches=micro_batches,
        problems=[problem for *_, problem in found if problem],
    )


def _equal(rank: int, sums: dict[int, list[str]], final: Final) -> list[bool]:
    """A copy that is not there equals nothing."""
    found: list[bool] = []
    for step, wanted in sums.items():
        made = final.get((snapshot_name(1, rank), step), [""] * len(wanted))
        found += [one == other for one, other in zip(wanted, made, strict=True)]
    return found


def _turn(ranks: Sequence[RankSaw], first: int) -> dict[str, Lap]:
    laps: dict[str, list[Lap]] = {SNAPSHOTS: [], GRADIENTS: [], PLAIN: []}
    for step in filter(is_timed, range(first, first + CYCLE)):
        laps[way_of(step)].append(_of_all([saw.laps[step] for saw in ranks]))
    return {way: _mean(some) for way, some in laps.items()}


def _of_all(laps: Sequence[Lap]) -> Lap:
    return Lap(
        step_s=max(lap.step_s for lap in laps),
        stall_s=max(lap.stall_s for lap in laps),
        copy_cpu_s=sum(lap.copy_cpu_s for lap in laps),
        rank_cpu_s=sum(lap.rank_cpu_s for lap in laps),
    )


def _mean(laps: Sequence[Lap]) -> Lap:
    columns = zip(*(dataclasses.astuple(lap) for lap in laps), strict=True)
    return Lap(**dict(zip(Lap.__slots__, map(statistics.fmean, columns), strict=True)))


def results(measured: Measured) -> dict[str, float]:
    cpu_s = {way: _cpu_s(measured, way) for way in WAYS}
    plain_s = statistics.median(turn[PLAIN].step_s for turn in measured.turns)
    of_snapshots_s, of_gradients_s = (sum(cpu_s[way].values()) for way in WAYS)
    found = {
        "cpu_ratio": of_gradients_s / of_snapshots_s,
        "cpu_ratio.without_state_sums": (of_gradients_s - cpu_s[GRADIENTS]["state_sums"]) / of_snapshots_s,
    }
    for way in WAYS:
        found |= _of_way(measured, way) | {f"cpu_s.{way}": sum(cpu_s[way].values())}
        found[f"cpu_share.{way}"] = found[f"cpu_s.{way}"] / plain_s / (os.cpu_count() or 1)
        found |= {f"cpu_s.{way}.{part}": seconds for part, seconds in cpu_s[way].items()}
    return found | {
        "equal_shards_share": measured.equal_shards / measured.compared_shards,
        "exact_in_bf16_share": measured.exact_in_bf16_share,
        "step_s": plain_s,
        "state_bytes": _state_bytes(),
    }


def _cpu_s(measured: Measured, way: str) -> dict[str, float]:
    """Of one step, on both nodes."""
    num_steps = measured.spent[f"copies.{way}"] / len(NODES)
    parts = (*PARTS, *UPDATE_PARTS) if way == GRADIENTS else PARTS
    spent = {part: measured.spent[f"{part}.{way}"] / num_steps for part in (*parts, "rest")}
    return {"copy": statistics.median(turn[way].copy_cpu_s for turn in measured.turns)} | spent


def _of_way(measured: Measured, way: str) -> dict[str, float]:
    num_steps = measured.spent[f"copies.{way}"] / len(NODES)
    turns = measured.turns
    stall_s = statistics.median(turn[way].stall_s for turn in turns)
    return {
        f"overhead_share.{way}": statistics.median(turn[way].step_s / turn[PLAIN].step_s - 1 for turn in turns),
        f"rank_cpu_share.{way}": statistics.median(turn[way].rank_cpu_s / turn[PLAIN].rank_cpu_s - 1 for turn in turns),
        f"stall_ms_per_166mb.{way}": stall_s * 1e3 * STALL_BYTES / (_state_bytes() / len(NODES)),
        f"network_bytes_per_parameter.{way}": measured.spent[f"received_bytes.{way}"]
        / num_steps
        / num_parameters(MODEL),
    }


def _state_bytes() -> int:
    return num_parameters(MODEL) * ELEMENT_BYTES * len(OWNED_KINDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cycles", type=int, default=NUM_CYCLES)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    before = free_cores()
    measured = measure(arguments.cycles)
    free = {"before": before, "after": free_cores()}
    if min(free.values()) < _LEAST_FREE * (os.cpu_count() or 1):
        print(f"other work had some of the cores: {free}; the times are of that, too", file=sys.stderr)
    for problem in measured.problems:
        print(problem, file=sys.stderr)
    answer(
        "gradient_backup", results(measured) | {"free_cores": min(free.values())}, dataclasses.asdict(measured) | free
    )


if __name__ == "__main__":
    main()
