"""Two processes, one with half a core: what planning by measured speed gains over dealing samples out equally.

Usage: python -m benchmarks.uneven [--json] [--rounds N]

Each process has a core of its own, and times the parts of the model as it would on a cluster; the planner plans by
these figures. In every round come a step of that plan, one of the equal split, and what each process does in the
planned one, alone. `uneven_gain` is the planned split's tokens per second over the equal one's (1.5 is ideal where half
a core is half as fast), `uneven_efficiency` over the sum of what both do alone; both are medians over rounds.
`prediction_error` is how far the planned step is from what is predicted for it after a calibration on the other three,
`prediction_error.parts` from what the timed parts alone predict.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.cores import free_cores, keep_to_cores, part_of_a_core
from benchmarks.duel import Ours, timed
from benchmarks.reporting import answer
from shoal_planner.calibrate import MeasuredRun, calibrate
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.predict import predict
from shoal_planner.profile import LinkFigure, Profile, joined
from shoal_planner.search import plan as search
from shoal_workers.exchange import Exchange
from shoal_workers.measurements import figures
from shoal_workers.messages import Measured
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Processes, Seat
from shoal_workers.timing import time_parts, time_update

PART = 0.5
FREE_CORES = 1.8  # what a good split gains is lost where somebody else computes
NUM_ROUNDS = 11
WARM_UP = 1
RESULTS = ("uneven_gain", "uneven_efficiency", "prediction_error", "prediction_error.parts")
# A block takes several of the quota's periods even for one sample: what fits into one would be timed at full speed.
SEQ_LEN = 256
GLOBAL_BATCH = 24
TOKENS = GLOBAL_BATCH * SEQ_LEN
NODES = ("whole-0", "part-0")
DEVICES = ("whole-core", "part-core")
MODEL = ModelSpec(layers=8, hidden=384, heads=6, kv_heads=2, ffn=1024, vocab=1024, tie_embeddings=False)
_TRIPS = 20
_LINK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of a step, of the slower process, and those of each process alone, in the order of nodes."""

    planned_s: float
    equal_s: float
    alone_s: tuple[float, ...]
    alone_samples: tuple[int, ...]

    @property
    def alone_tokens_per_s(self) -> float:
        """Of both together, when neither waits for the other."""
        return sum(
            samples * SEQ_LEN / alone_s for samples, alone_s in zip(self.alone_samples, self.alone_s, strict=True)
        )


def job(global_batch: int) -> JobSpec:
    train = TrainSpec(global_batch=global_batch, seq_len=SEQ_LEN, steps=1000)
    return JobSpec(name="uneven", model=MODEL, data=DataSpec(uri="stdlib:"), train=train)


def cluster() -> ClusterSnapshot:
    """As if both were equal: what they differ in is only measured."""
    nodes = [
        {"name": node.removesuffix("-0"), "device": device, "count": 1, "host_memory_gib": 8}
        for node, device in zip(NODES, DEVICES, strict=True)
    ]
    return parse_cluster({"nodes": nodes, "devices": {device: _FIGURES for device in DEVICES}})


_FIGURES = {
    "memory_gib": 8,
    "tflops_fp32": 0.1,
    "tflops_bf16": 0.1,
    "memory_gb_per_s": 10,
    "efficiency": 0.8,
    "threads": 1,
}


def whole_model(node: str, micro_batch: int, micro_batches: int) -> Pipeline:
    replica = Replica(node=node, devices=(0,), samples=micro_batch)
    stage = Stage(layers=((0, MODEL.layers),), replicas=(replica,))
    return Pipeline(micro_batch=micro_batch, micro_batches=micro_batches, stages=(stage,))


def equal_split(spec: JobSpec, planned: Plan) -> Plan:
    """In the largest micro-batches up to the planned ones that divide them."""
    each, most = spec.train.global_batch // len(NODES), max(pipeline.micro_batch for pipeline in planned.pipelines)
    micro_batch = max(size for size in range(1, most + 1) if each % size == 0)
    return Plan(pipelines=tuple(whole_model(node, micro_batch, each // micro_batch) for node in NODES), copies=0)


def measure(seat: Seat, spec: JobSpec) -> tuple[Measured, float, float]:
    """The figures of this process, and the latency and rate of a message to the other one."""
    answered = Measured(rows=list(time_parts(spec, 1)), updates_per_s=time_update(spec, 1))
    exchange = seat.connect(nodes=NODES)
    exchange.connect()
    trip_s = statistics.median(_trip_s(seat, exchange, 1) for _ in range(_TRIPS))
    large_s = statistics.median(_trip_s(seat, exchange, _LINK_ELEMENTS) for _ in range(_TRIPS))
    return answered, trip_s / 2, _LINK_ELEMENTS * 4 / max(large_s / 2 - trip_s / 2, large_s / 20)


def _trip_s(seat: Seat, exchange: Exchange, numel: int) -> float:
    """There and back."""
    tensor = torch.zeros(numel)
    began_s = time.perf_counter()
    for turn in (0, 1):
        if seat.rank == turn:
            exchange.isend(tensor, 1 - seat.rank, turn).wait()
        else:
            exchange.irecv(tensor, 1 - seat.rank, turn).wait()
    return time.perf_counter() - began_s


def profile(spec: JobSpec, found: list[tuple[Measured, float, float]]) -> Profile:
    profiles = [
        figures(spec, device, answered, "benchmark") for device, (answered, _, _) in zip(DEVICES, found, strict=True)
    ]
    link = LinkFigure(
        from_node=NODES[0],
        to_node=NODES[1],
        latency_s=max(latency_s for _, latency_s, _ in found),
        bytes_per_s=min(bytes_per_s for _, _, bytes_per_s in found),
        source="benchmark",
    )
    return joined(joined(*profiles), Profile(links=(link,)))


def alone(planned: Plan, node: str) -> tuple[JobSpec, Plan]:
    """What this node does in a step of the plan, by itself."""
    pipeline = next(one for one in planned.pipelines if one.stages[0].replicas[0].node == node)
    return job(pipeline.samples), Plan(pipelines=(pipeline,), copies=0)


def step_in_turn(
    seat: Seat, spec: JobSpec, planned: Plan, equal: Plan, num_rounds: int
) -> list[tuple[float, float, float]]:
    """Seconds of each round: the planned split, the equal one, and this process alone on its part of the samples."""
    gate = seat.connect(name="gate")
    own, solo = alone(planned, NODES[seat.rank])
    lone = Seat(rank=0, size=1, epoch=seat.epoch, store=seat.store, timeout_s=seat.timeout_s)
    sides = (
        Ours(_in_place(seat, planned), spec, planned, name="planned"),
        Ours(seat, spec, equal, name="equal"),
        Ours(lone, own, solo),
    )
    rounds = []
    for number in range(1, WARM_UP + num_rounds + 1):
        laps = [timed(side, number, gate).step_s for side in sides]
        rounds.append((laps[0], laps[1], laps[2]))
    return rounds[WARM_UP:]


def _in_place(seat: Seat, planned: Plan) -> Seat:
    """With the rank of this process's node, whatever the order of the plan's pipelines."""
    return dataclasses.replace(seat, rank=nodes_of(planned).index(NODES[seat.rank]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    free = free_cores()
    if free < FREE_CORES:
        answer("uneven", dict.fromkeys(RESULTS), {"why": f"only {free:.2f} cores are free, and it takes two"})
        return
    with Processes(len(NODES), timeout_s=900.0) as processes:
        try:
            planned, rounds, measured = run(processes, arguments.rounds)
        except OSError as error:
            answer("uneven", dict.fromkeys(RESULTS), {"why": f"no quota can be set: {error}"})
            return
    assert planned.prediction is not None
    planned_s, parts_s = statistics.median(lap.planned_s for lap in rounds), planned.prediction.step_s
    predicted_s = calibrated_s(planned, rounds, measured)
    results = {
        "uneven_gain": statistics.median(lap.equal_s / lap.planned_s for lap in rounds),
        "uneven_efficiency": statistics.median(TOKENS / lap.planned_s / lap.alone_tokens_per_s for lap in rounds),
        "prediction_error": abs(predicted_s / planned_s - 1),
        "prediction_error.parts": abs(parts_s / planned_s - 1),
    }
    samples = {
        pipeline.stages[0].replicas[0].node: f"{pipeline.micro_batches} x {pipeline.micro_batch}"
        for pipeline in planned.pipelines
    }
    runs = {
        "free_cores": {"before": free, "after": free_cores()},
        "samples": samples,
        "plan": planned.reason,
        "predicted_s": {"calibrated": predicted_s, "parts": parts_s},
        "rounds": [dataclasses.asdict(lap) for lap in rounds],
    }
    answer("uneven", results, runs)


def calibrated_s(planned: Plan, rounds: list[Round], measured: Profile) -> float:
    """Seconds of a step of the plan, by what all other steps took."""
    spec = job(GLOBAL_BATCH)
    equal_s = statistics.median(lap.equal_s for lap in rounds)
    runs = [MeasuredRun(job=spec, plan=equal_split(spec, planned), step_s=equal_s)]
    for index, node in enumerate(NODES):
        own, solo = alone(planned, node)
        alone_s = statistics.median(lap.alone_s[index] for lap in rounds)
        runs.append(MeasuredRun(job=own, plan=solo, step_s=alone_s))
    found = calibrate(runs, cluster(), measured)
    costs = CostModel(spec, cluster(), dataclasses.replace(measured, calibration=found))
    return predict(planned, costs).step_s


def run(processes: Processes, num_rounds: int) -> tuple[Plan, list[Round], Profile]:
    spec = job(GLOBAL_BATCH)
    keep_to_cores([processes.pid(rank) for rank in range(len(NODES))])
    processes.call(len(NODES), measure, job(1))  # imports and first touches are not the device's speed
    with part_of_a_core(PART, [processes.pid(1)]):
        found = processes.call(len(NODES), measure, spec)
        measured = profile(spec, found)
        planned = search(spec, cluster(), measured).plan
        equal = equal_split(spec, planned)
        by_rank = processes.call(len(NODES), step_in_turn, spec, planned, equal, num_rounds)
    samples = tuple(alone(planned, node)[0].train.global_batch for node in NODES)
    return planned, [_whole(parts, samples) for parts in zip(*by_rank, strict=True)], measured


def _whole(parts: tuple[tuple[float, float, float], ...], samples: tuple[int, ...]) -> Round:
    return Round(
        planned_s=max(planned_s for planned_s, _, _ in parts),
        equal_s=max(equal_s for _, equal_s, _ in parts),
        alone_s=tuple(alone_s for _, _, alone_s in parts),
        alone_samples=samples,
    )


if __name__ == "__main__":
    main()
