"""How long steps on one GPU take, and how much of its memory, beside what the planner says of them before.

Usage: python -m benchmarks.gpu_prediction [--json] [--device cpu --type cpu-1t]

As before a job's first plan, one block, the ends of the model and the update are timed on the device. `error.measured`
is the median error of the predicted seconds of a step with these figures, `error.catalogue` that from the datasheet
alone, `rank.*` Spearman's correlation of predicted and real steps over all settings. `memory.*` compare the peak that
is predicted, by which plans are taken or refused, with what torch had allocated at most: the median and the worst of
real over predicted (above 1 a plan may not fit). Three models run in bf16, in several micro-batches, with and without
recompute. Without a CUDA device all of it is null, and `runs` says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import Ours
from benchmarks.prediction import median_error, rank_correlation
from benchmarks.reporting import answer
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Recompute, Replica, Stage
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_workers.devices import current, synchronise
from shoal_workers.measurements import figures
from shoal_workers.messages import Measured
from shoal_workers.timing import time_parts, time_update

RESULTS = (
    "error.measured",
    "error.catalogue",
    "rank.measured",
    "rank.catalogue",
    "memory.median",
    "memory.worst",
)
_WARM_UP = 3
_STEPS = 7
_TYPES = {"H100 80GB": "H100-80G", "H100 PCIe": "H100-PCIE-80G", "H200": "H200-141G", "A100-SXM4-80GB": "A100-80G"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    model: ModelSpec
    seq_len: int
    micro_batch: int
    micro_batches: int
    recompute: Recompute = "none"

    @property
    def job(self) -> JobSpec:
        train = TrainSpec(
            global_batch=self.micro_batch * self.micro_batches, seq_len=self.seq_len, steps=1000, precision="bf16"
        )
        return JobSpec(name="gpu", model=self.model, data=DataSpec(uri="stdlib:"), train=train)

    @property
    def plan(self) -> Plan:
        replica = Replica(node="here-0", devices=(0,), samples=self.micro_batch)
        stage = Stage(layers=((0, self.model.layers),), replicas=(replica,), recompute=self.recompute)
        pipeline = Pipeline(micro_batch=self.micro_batch, micro_batches=self.micro_batches, stages=(stage,))
        return Plan(pipelines=(pipeline,), copies=0)


def settings() -> Iterator[Setting]:
    small = ModelSpec(layers=20, hidden=1024, heads=16, ffn=4096, vocab=32_000, tie_embeddings=True)
    middle = ModelSpec(layers=8, hidden=2048, heads=32, kv_heads=4, ffn=5632, vocab=32_000, tie_embeddings=False)
    wide = ModelSpec(layers=3, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=32_000, tie_embeddings=False)
    for name, model, seq_len, batches in (
        ("0.4B", small, 1024, ((2, 1), (8, 1), (8, 4))),
        ("0.5B", middle, 2048, ((1, 4), (4, 1), (4, 4))),
        ("0.9B", wide, 4096, ((1, 1), (1, 8), (2, 2))),
    ):
        ways: list[tuple[int, int, Recompute]] = [(*batch, "none") for batch in batches]
        ways += [(*batches[-1], "selective"), (*batches[-1], "full")]
        for micro_batch, micro_batches, recompute in ways:
            yield Setting(
                name=f"{name} {micro_batch} x {micro_batches}, recompute {recompute}",
                model=model,
                seq_len=seq_len,
                micro_batch=micro_batch,
                micro_batches=micro_batches,
                recompute=recompute,
            )


def cluster(device_type: str) -> ClusterSnapshot:
    return parse_cluster({"nodes": [{"name": "here", "device": device_type, "count": 1, "host_memory_gib": 64}]})


def measured_profile(job: JobSpec, device: torch.device, device_type: str) -> Profile:
    answered = Measured(rows=list(time_parts(job, 1, device)), updates_per_s=time_update(job, 1, device))
    return figures(job, device_type, answered, "benchmark")


def run(setting: Setting, device: torch.device, device_type: str) -> dict[str, Any]:
    """Seconds of a step, predicted both ways and real, and bytes."""
    job, plan, snapshot = setting.job, setting.plan, cluster(device_type)
    with current(device):
        by_datasheet = score(plan, job, snapshot).prediction
        by_figures = score(plan, job, snapshot, measured_profile(job, device, device_type)).prediction
        assert by_datasheet is not None and by_figures is not None
        _reset(device)
        side = Ours(job, device, plan)
        step_s = []
        for number in range(1, _WARM_UP + _STEPS + 1):
            synchronise(device)
            began_s = time.perf_counter()
            side.step(number)
            synchronise(device)
            step_s.append(time.perf_counter() - began_s)
        real_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else side.peak_bytes
        found = {
            "real_s": statistics.median(step_s[_WARM_UP:]),
            "measured_s": by_figures.step_s,
            "catalogue_s": by_datasheet.step_s,
            "predicted_bytes": dict(by_figures.memory_bytes)["here-0:0"],
            "ledger_bytes": side.peak_bytes,
            "real_bytes": real_bytes,
        }
        del side
        _reset(device)
    return found


def _reset(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def judged(runs: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    real = [each["real_s"] for each in runs.values()]
    found: dict[str, float | None] = {}
    for way in ("measured", "catalogue"):
        predicted = [each[f"{way}_s"] for each in runs.values()]
        found[f"error.{way}"] = median_error(predicted, real)
        found[f"rank.{way}"] = rank_correlation(predicted, real)
    shares = [each["real_bytes"] / each["predicted_bytes"] for each in runs.values()]
    return {**found, "memory.median": statistics.median(shares), "memory.worst": max(shares)}


def type_of(name: str) -> str | None:
    """The catalogue's name of a GPU that torch calls so."""
    return next((known for words, known in _TYPES.items() if words in name), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--type", help="its name in the catalogue, where it is not found by that of the device")
    arguments = parser.parse_args()
    nothing: dict[str, float | None] = dict.fromkeys(RESULTS)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        answer("gpu_prediction", nothing, {"reason": "no CUDA device is at hand"})
        return
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device(arguments.device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU"
    device_type = arguments.type or type_of(name)
    if device_type is None:
        answer("gpu_prediction", nothing, {"device": name, "reason": "give --type: the catalogue has no such name"})
        return
    runs = {setting.name: run(setting, device, device_type) for setting in settings()}
    spelled = {setting.name: dataclasses.asdict(setting) for setting in settings()}
    about = {"device": name, "type": device_type, "torch": torch.__version__, "settings": spelled, "steps": runs}
    answer("gpu_prediction", judged(runs), about)


if __name__ == "__main__":
    main()
