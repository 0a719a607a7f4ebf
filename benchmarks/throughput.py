"""The engine beside PyTorch's own ways to train the same model, step by step in the same processes.

Usage: python -m benchmarks.throughput [--json] [--only NAME] [--pairs N]

`ratio.*` are tokens per second, ours over the peer's, the median of paired steps; `memory_ratio.*` is what a process
takes at most on top of what it had before the model was built, ours over the peer's. Peers: `benchmarks/peers`.
`overhead_share` is what of the engine's step goes into neither kernels nor communication, the largest of all layouts;
beside it that of the plain loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from functools import partial
from typing import Any

from benchmarks.cores import free_cores
from benchmarks.duel import Duel, alternate, memory_bytes, ratio
from benchmarks.overhead import noted, overhead_share, profiled
from benchmarks.peers.ddp import Ddp
from benchmarks.peers.dtensor_tp import DTensorTp
from benchmarks.peers.fsdp2 import Fsdp2
from benchmarks.peers.pipeline_1f1b import Pipeline1F1B
from benchmarks.peers.torch_loop import TorchLoop
from benchmarks.reporting import answer
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage
from shoal_workers.processes import Processes

MODEL = ModelSpec(layers=4, hidden=768, heads=12, kv_heads=4, ffn=2048, vocab=1024, tie_embeddings=False)
SEQ_LEN = 256
# Of a micro-batch, on each process. Beside the plain loop and the pipeline, and where it is profiled, they are so long
# that what leads from kernel to kernel, which takes as long for one sample as for twelve, weighs as little as in real
# jobs. Beside the others a step has one short one: so there are more of them, and what they exchange weighs more.
LONG, SHORT = 12, 4
NUM_PAIRS = 31
NUM_PAIRS_OF_PIPELINES = 13  # their steps take five times as long


def job(global_batch: int) -> JobSpec:
    train = TrainSpec(global_batch=global_batch, seq_len=SEQ_LEN, steps=1000)
    return JobSpec(name="throughput", model=MODEL, data=DataSpec(uri="stdlib:"), train=train)


def plan(micro_batches: int, *stages: Stage) -> Plan:
    pipeline = Pipeline(micro_batch=stages[0].samples, micro_batches=micro_batches, stages=stages)
    return Plan(pipelines=(pipeline,), copies=0, overlap=Overlap(stages=True))


def stage(first: int, last: int, *replicas: Replica) -> Stage:
    return Stage(layers=((first, last),), replicas=replicas)


def replica(device: int, samples: int, *, tp: int = 1) -> Replica:
    return Replica(node="here", devices=tuple(range(device, device + tp)), tp=tp, samples=samples)


def loop(samples: int) -> Duel:
    one = plan(1, stage(0, MODEL.layers, replica(0, samples)))
    return Duel(name="torch_loop", size=1, job=job(samples), plan=one, peer=TorchLoop)


def of_two(samples: int) -> tuple[Duel, ...]:
    """Those between two processes."""
    pair = plan(1, stage(0, MODEL.layers, replica(0, samples), replica(1, samples)))
    # What FSDP2 splits and overlaps, too: weights and gradients within a step.
    split = dataclasses.replace(
        pair, sharding=Sharding(weights="cluster", gradients="cluster"), overlap=Overlap(shards=True)
    )
    stages = plan(4, stage(0, 2, replica(0, samples)), stage(2, 4, replica(1, samples)))
    in_parts = plan(1, stage(0, MODEL.layers, replica(0, 2 * samples, tp=2)))
    pipelined = partial(Pipeline1F1B, layers=(2, 2), micro_batches=4)
    return (
        Duel(name="ddp", size=2, job=job(2 * samples), plan=pair, peer=Ddp),
        Duel(name="fsdp2", size=2, job=job(2 * samples), plan=split, peer=Fsdp2),
        Duel(name="pipeline_1f1b", size=2, job=job(4 * samples), plan=stages, peer=pipelined),
        Duel(name="dtensor_tp", size=2, job=job(2 * samples), plan=in_parts, peer=DTensorTp),
    )


PROFILED = (loop(LONG), *of_two(LONG))
DUELS = tuple(
    long if long.name in ("torch_loop", "pipeline_1f1b") else short
    for long, short in zip(PROFILED, (loop(SHORT), *of_two(SHORT)), strict=True)
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=[duel.name for duel in DUELS])
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [duel for duel in DUELS if arguments.only in (None, duel.name)]
    results: dict[str, float | None] = {}
    runs: dict[str, Any] = {"free_cores.before": free_cores()}
    for duel in chosen:
        with Processes(duel.size, timeout_s=900.0) as processes:
            most = NUM_PAIRS_OF_PIPELINES if duel.name == "pipeline_1f1b" else arguments.pairs
            pairs = alternate(processes, duel, min(most, arguments.pairs))
        ours, peer = memory_bytes(duel, ours=True), memory_bytes(duel, ours=False)
        results |= {f"ratio.{duel.name}": ratio(pairs), f"memory_ratio.{duel.name}": ours / peer}
        runs[duel.name] = {
            "pairs": [dataclasses.asdict(pair) for pair in pairs],
            "memory_bytes": {"ours": ours, "peer": peer},
        }
    with Processes(2, timeout_s=900.0) as processes:
        accounts = {
            duel.name: processes.call(duel.size, profiled, partial(noted, job=duel.job, plan=duel.plan))
            for duel in PROFILED
            if arguments.only in (None, duel.name)
        }
        plain = processes.call(1, profiled, partial(TorchLoop, job=PROFILED[0].job))
    results |= {
        "overhead_share": max(map(overhead_share, accounts.values())),
        "peer_overhead_share.torch_loop": overhead_share(plain),
    }
    runs |= {"profiled": accounts | {"peer.torch_loop": plain}, "free_cores.after": free_cores()}
    answer("throughput", results, runs)


if __name__ == "__main__":
    main()
