"""The recorded real runs of `measured_runs.json` as Shoal's own jobs, clusters and plans.

Owns the reading of that file and what it leaves out: which devices a run stood on, and the precision. Does not own any
prediction.

What the file does not say, and where it is known from: both sets ran Megatron with DeepSpeed in fp16, whose ranks count
through tensor, data, then pipeline parallelism, over nodes in order, without sharded state. Cards of the Turing
generation compute fp16 where others compute bf16, so the cluster states that rate for them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_planner.calibrate import MeasuredRun
from shoal_planner.catalogue import CATALOGUE
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PATH = ROOT.parent / "shared" / "measured" / "measured_runs.json"
# Runs whose values are the same to all digits, so that one is probably a copy: no judge of a prediction.
DOUBTFUL = {"sailor-rtx": ("N3_D1", "N6_D2")}
# OPT-350M as Sailor ran it; the file gives the model's name alone.
OPT_350M = {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 50272, "gated_mlp": False}
OPT_SEQ_LEN = 2048
SAILOR_TYPES = {"RTX-3090": "RTX3090", "RTX-2080": "RTX2080Ti", "Titan-RTX": "TitanRTX"}
SAILOR_COUNTS = {"RTX-3090": 1, "RTX-2080": 3, "Titan-RTX": 2}
SAILOR_DEVICES = 8
NEAR_GBIT_PER_S, FAR_GBIT_PER_S = 2.86 * 8, 0.115 * 8
AMP_DEVICES, AMP_NODES, AMP_GBIT_PER_S = 4, 4, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """`peer_s` is what the repository's own planner predicted, where it says."""

    name: str
    run: MeasuredRun
    peer_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCluster:
    """All runs of one cluster that did not fail."""

    name: str
    snapshot: ClusterSnapshot
    runs: tuple[NamedRun, ...]

    @property
    def doubtful(self) -> tuple[int, ...]:
        names = DOUBTFUL.get(self.name, ())
        return tuple(index for index, named in enumerate(self.runs) if named.name in names)


def load(path: Path = DEFAULT_PATH) -> tuple[RecordedCluster, ...]:
    """Raises OSError."""
    recorded = json.loads(path.read_text())
    by_cluster: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for raw in recorded["runs"]:
        if not raw.get("failed"):
            by_cluster[raw["cluster"]].append(raw)
    amp = recorded["clusters"]["amp-homo"]
    return (
        RecordedCluster(
            name="amp-homo",
            snapshot=amp_cluster(),
            runs=tuple(_amp_run(raw, amp) for raw in by_cluster["amp-homo"]),
        ),
        RecordedCluster(
            name="sailor-rtx", snapshot=sailor_cluster(), runs=tuple(map(_sailor_run, by_cluster["sailor-rtx"]))
        ),
    )


def amp_cluster() -> ClusterSnapshot:
    node = {"name": "t4", "count": AMP_NODES, "devices": AMP_DEVICES, "inter_gbit_per_s": AMP_GBIT_PER_S}
    return parse_cluster({"nodes": [{**node, **_device("T4")}], "devices": _half_precision("T4")})


def sailor_cluster() -> ClusterSnapshot:
    """The nodes of RTX 3090 stand apart, behind a slow link."""
    nodes = [
        {
            "name": _node_name(short),
            "count": count,
            "devices": SAILOR_DEVICES,
            "zone": "far" if short == "RTX-3090" else "near",
            "inter_gbit_per_s": NEAR_GBIT_PER_S,
            **_device(SAILOR_TYPES[short]),
        }
        for short, count in SAILOR_COUNTS.items()
    ]
    link = {"from": "near", "to": "far", "gbit_per_s": FAR_GBIT_PER_S, "latency_ms": 0.2}
    return parse_cluster({"nodes": nodes, "devices": _half_precision("RTX2080Ti", "TitanRTX"), "links": [link]})


def _device(name: str) -> dict[str, object]:
    link_bytes_per_s = CATALOGUE[name].link_bytes_per_s
    assert link_bytes_per_s is not None
    return {"device": name, "intra_gb_per_s": link_bytes_per_s / 1e9}


def _half_precision(*names: str) -> dict[str, object]:
    return {name: {"tflops_bf16": CATALOGUE[name].tflops.fp16} for name in names}


def _node_name(short: str) -> str:
    return short.lower()


def _job(name: str, model: Mapping[str, Any], seq_len: int, global_batch: int) -> JobSpec:
    train = {"global_batch": global_batch, "seq_len": seq_len, "steps": 1, "precision": "bf16"}
    return parse_job({"name": name, "model": dict(model), "data": {"uri": "stdlib:"}, "train": train})


def _amp_run(raw: Mapping[str, Any], cluster: Mapping[str, Any]) -> NamedRun:
    model = dict(cluster["model"])
    name, seq_len = model.pop("name"), model.pop("seq_len")
    job = _job(name, model, seq_len, cluster["global_batch"])
    tp, dp, pp, micro_batch = raw["tp"], raw["dp"], raw["pp"], raw["micro_batch"]
    pipelines = []
    for d in range(dp):
        stages = []
        for s, (first, last) in enumerate(raw["transformer_layers"]):
            rank = (s * dp + d) * tp
            devices = tuple(range(rank % AMP_DEVICES, rank % AMP_DEVICES + tp))
            stages.append(_stage(first, last, f"t4-{rank // AMP_DEVICES}", devices, micro_batch))
        pipelines.append(_pipeline(micro_batch, cluster["global_batch"] // (dp * micro_batch), stages))
    return NamedRun(
        name=f"tp{tp} dp{dp} pp{pp} micro-batch {micro_batch}",
        run=MeasuredRun(job=job, plan=_plan(pipelines), step_s=raw["measured_s"]),
        peer_s=raw["planner_predicted_s"],
    )


def _sailor_run(raw: Mapping[str, Any]) -> NamedRun:
    micro_batch, global_batch, stages = raw["micro_batch"], raw["global_batch"], raw["stages"]
    job = _job(raw["model"], OPT_350M, OPT_SEQ_LEN, global_batch)
    used: dict[str, int] = defaultdict(int)
    by_pipeline: dict[int, list[Stage]] = defaultdict(list)
    for stage in stages:
        kinds = [kind for kind, count in stage["replicas"].items() for _ in range(count)]
        for d, kind in enumerate(kinds):
            short, tp = kind.split(" TP")
            node = f"{_node_name(short)}-{used[short]}"
            used[short] += 1
            first, last = (_blocks(position) for position in stage["profile_layers"])
            by_pipeline[d].append(_stage(first, last, node, tuple(range(int(tp))), micro_batch))
    micro_batches = global_batch // (len(by_pipeline) * micro_batch)
    plan = _plan([_pipeline(micro_batch, micro_batches, found) for found in by_pipeline.values()])
    return NamedRun(name=raw["config"], run=MeasuredRun(job=job, plan=plan, step_s=raw["measured_s"]), peer_s=None)


def _blocks(position: int) -> int:
    """Positions of the profile count the embedding first and the head last."""
    return min(max(position - 1, 0), int(OPT_350M["layers"]))


def _stage(first: int, last: int, node: str, devices: tuple[int, ...], samples: int) -> Stage:
    replica = Replica(node=node, devices=devices, tp=len(devices), samples=samples)
    return Stage(layers=((first, last),), replicas=(replica,))


def _pipeline(micro_batch: int, micro_batches: int, stages: list[Stage]) -> Pipeline:
    return Pipeline(micro_batch=micro_batch, micro_batches=micro_batches, stages=tuple(stages))


def _plan(pipelines: list[Pipeline]) -> Plan:
    return Plan(pipelines=tuple(pipelines), copies=0, sharding=Sharding(optimizer="none"))
