"""A Llama of a billion parameters in bf16 on one GPU: the engine beside a plain PyTorch loop with the same kernels.

Usage: python -m benchmarks.gpu [--json] [--pairs N] [--peak TFLOPS] [--compile]

`mfu.*` are model FLOPs utilisations: what the model's products take, forward and backward and nothing made again, over
the datasheet's dense bf16 rate; `ratio.gpu` is ours over the loop's tokens per second, the median of paired steps. The
steps of both alternate on the same device, on the same samples from the same weights. With `--compile` ours
is a job with `train.compile`; the loop stays plain. Without a CUDA device all of it is null, and `runs` says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import time
from typing import Any, Protocol

import torch

from benchmarks.peers.mixed_loop import MixedLoop
from benchmarks.reporting import answer
from shoal_planner.datasheets import DATASHEETS
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_workers.devices import current, synchronise
from shoal_workers.exchange import SoloExchange
from shoal_workers.solo import RunRequest, build_rank

MODEL = ModelSpec(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32_000, tie_embeddings=False)
JOB = JobSpec(
    name="gpu",
    model=MODEL,
    data=DataSpec(uri="stdlib:"),
    train=TrainSpec(global_batch=8, seq_len=2048, steps=1000, precision="bf16"),
)
NUM_PAIRS = 11
_WARM_UP = 3


class Side(Protocol):
    def step(self, number: int) -> float: ...


class Ours:
    """One rank that does all of the plan, in its own process."""

    def __init__(self, job: JobSpec, device: torch.device, plan: Plan) -> None:
        request = RunRequest(job=job, plan=plan, until_step=job.train.steps, device=str(device))
        self._rank = build_rank(request, 0, SoloExchange())
        self._losses: list[float] = []

    @property
    def peak_bytes(self) -> int:
        """By the rank's own ledger."""
        return self._rank.memory.peak_bytes

    def step(self, number: int) -> float:
        self._rank.engine.run(
            until_step=number, report=lambda report: self._losses.append(report.loss), stop_after=lambda: None
        )
        return self._losses[-1]


def whole_batch(job: JobSpec) -> Plan:
    """On one device, in one micro-batch."""
    batch = job.train.global_batch
    stage = Stage(layers=((0, job.model.layers),), replicas=(Replica(node="here", devices=(0,), samples=batch),))
    return Plan(pipelines=(Pipeline(micro_batch=batch, micro_batches=1, stages=(stage,)),), copies=0)


def flops_per_step(job: JobSpec) -> float:
    """Of the products with weights (6 per weight and token, but for the embedding, which is looked up) and of causal
    attention (6 S H per layer and token)."""
    model, train = job.model, job.train
    weights = num_parameters(model) - (0 if model.tie_embeddings else model.vocab * model.hidden)
    return train.tokens_per_step * 6.0 * (weights + model.layers * train.seq_len * model.hidden)


def compare(
    job: JobSpec, device: torch.device, num_pairs: int, *, compiled: bool = False
) -> list[dict[str, dict[str, float]]]:
    """Seconds and loss of each step of both; the first steps only warm up."""
    own = dataclasses.replace(job, train=dataclasses.replace(job.train, compile=compiled))
    with current(device):
        sides: dict[str, Side] = {"ours": Ours(own, device, whole_batch(job)), "torch_loop": MixedLoop(job, device)}
        pairs = []
        for number in range(1, _WARM_UP + num_pairs + 1):
            names = list(sides) if number % 2 else list(reversed(sides))
            pairs.append({name: _timed(sides[name], number, device) for name in names})
    return pairs[_WARM_UP:]


def _timed(side: Side, number: int, device: torch.device) -> dict[str, float]:
    synchronise(device)
    began_s = time.perf_counter()
    loss = side.step(number)
    synchronise(device)
    return {"step_s": time.perf_counter() - began_s, "loss": loss}


def figures(job: JobSpec, pairs: list[dict[str, dict[str, float]]], peak_flops_per_s: float | None) -> dict[str, Any]:
    found: dict[str, float | None] = {
        "ratio.gpu": statistics.median(pair["torch_loop"]["step_s"] / pair["ours"]["step_s"] for pair in pairs)
    }
    for name in ("ours", "torch_loop"):
        step_s = statistics.median(pair[name]["step_s"] for pair in pairs)
        found[f"tokens_per_s.{name}"] = job.train.tokens_per_step / step_s
        found[f"mfu.{name}"] = flops_per_step(job) / step_s / peak_flops_per_s if peak_flops_per_s else None
    return found


def peak(device_name: str) -> float | None:
    """Dense bf16 operations a second of the catalogue's type whose name is in the device's; the longest counts."""
    words = re.sub(r"[^A-Z0-9]", "", device_name.upper())
    known = {name: sheet.bf16 for name, sheet in DATASHEETS.items() if name.partition("-")[0].upper() in words}
    best = max(known, key=lambda name: len(name.partition("-")[0]), default=None)
    rate = None if best is None else known[best]
    return None if rate is None else rate * 1e12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    parser.add_argument("--peak", type=float, help="dense bf16 TFLOP/s of this device, if the catalogue lacks it")
    arguments = parser.parse_args()
    nothing: dict[str, float | None] = dict.fromkeys(
        ("ratio.gpu", "mfu.ours", "mfu.torch_loop", "tokens_per_s.ours", "tokens_per_s.torch_loop")
    )
    if not torch.cuda.is_available():
        answer("gpu", nothing, {"reason": "no CUDA device is at hand"})
        return
    device, name = torch.device("cuda", 0), torch.cuda.get_device_name(0)
    try:
        pairs = compare(JOB, device, arguments.pairs, compiled=arguments.compile)
    except torch.OutOfMemoryError as error:
        answer("gpu", nothing, {"device": name, "reason": f"both sides at once do not fit: {error}"})
        return
    peak_flops_per_s = arguments.peak * 1e12 if arguments.peak else peak(name)
    runs = {
        "device": name,
        "compile": arguments.compile,
        "peak_flops_per_s": peak_flops_per_s,
        "flops_per_step": flops_per_step(JOB),
        "model": dataclasses.asdict(MODEL),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "pairs": pairs,
    }
    answer("gpu", figures(JOB, pairs, peak_flops_per_s), runs)


if __name__ == "__main__":
    main()
