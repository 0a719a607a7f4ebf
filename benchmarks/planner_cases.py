"""The recorded settings of `planner_cases.json` as Shoal's own job, cluster and plan documents.

Owns the reading of that file and the translation, in the published formats alone: what is made here could as well be
written to files and given to `shoal plan` and `shoal score`. Does not own any score (`rescore`, and the planner's).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal_planner.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PATH = ROOT.parent / "shared" / "measured" / "planner_cases.json"
# `full`: everything the planner can do, on the catalogue's devices with the setting's memory and peak.
# `plain`: held to what the plain re-score model knows.
Flavour = Literal["full", "plain"]
ZONE = "here"
# The settings say nothing of hosts. What machines with eight large GPUs have; snapshots of every setting fit into it.
HOST_GIB_PER_DEVICE = 256
EFFICIENCY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """One machine of a setting; `id` is what Shoal calls it."""

    id: str
    gpu: str
    devices: int
    memory_bytes: float
    flops_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A recorded setting. `nodes` are in the order of the file, `raw` is the file's entry."""

    id: str
    nodes: tuple[NodeShape, ...]
    raw: Mapping[str, Any]

    @property
    def model(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.raw["model"]
        return found

    @property
    def global_batch(self) -> int:
        return int(self.raw["global_batch_sequences"])

    @property
    def lower_bound_s(self) -> float:
        return float(self.raw["lower_bound_s"])

    @property
    def peer_rescored_s(self) -> float:
        return float(self.raw["best_rescored_s"])

    @property
    def peer(self) -> Mapping[str, Any]:
        """The best recorded plan of a peer, in the form of the file."""
        found: Mapping[str, Any] = self.raw["best_peer_plan"]
        return found


def load(path: Path = DEFAULT_PATH) -> tuple[Setting, ...]:
    """The settings in the order of the file. Raises SystemExit with a sentence where there is no such file."""
    if not path.exists():
        raise SystemExit(f"no recorded settings at {path}: give the path of planner_cases.json with --cases PATH")
    document = json.loads(path.read_text())
    return tuple(Setting(id=entry["id"], nodes=_nodes(entry["nodes"]), raw=entry) for entry in document["cases"])


def _nodes(entries: list[Mapping[str, Any]]) -> tuple[NodeShape, ...]:
    return tuple(
        NodeShape(
            id=f"{_group(index, entry)}-{copy}",
            gpu=entry["gpu"],
            devices=entry["gpus_per_node"],
            memory_bytes=entry["memory_gib"] * 2**30,
            flops_per_s=entry["peak_bf16_tflops"] * 1e12,
            intra_bytes_per_s=entry["intra_node_gb_s"] * 1e9,
            inter_bytes_per_s=entry["inter_node_gbit_s"] * 1e9 / 8,
        )
        for index, entry in enumerate(entries)
        for copy in range(entry["num_nodes"])
    )


def _group(index: int, entry: Mapping[str, Any]) -> str:
    """Node groups of one GPU type may differ in size, so the place in the list is part of the name."""
    return f"{entry['gpu'].lower()}.{index}"


def job(setting: Setting, flavour: Flavour) -> dict[str, Any]:
    """The job document: bf16, untied embeddings as the recorded parameter counts say."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp", "vocab")
    held = {"sharding": "none", "overlap": "none"} if flavour == "plain" else {}
    return {
        "name": setting.id,
        "model": {**{name: setting.model[name] for name in names}, "tie_embeddings": False},
        "data": {"uri": "stdlib:"},
        "train": {
            "global_batch": setting.global_batch,
            "seq_len": setting.model["seq_len"],
            "steps": 1000,
            "precision": "bf16",
            **held,
        },
    }


def cluster(setting: Setting, flavour: Flavour) -> dict[str, Any]:
    """The cluster document."""
    entries = setting.raw["nodes"]
    efficiency = {"efficiency": EFFICIENCY} if flavour == "plain" else {}
    found: dict[str, Any] = {
        "nodes": [_node_entry(index, entry, flavour) for index, entry in enumerate(entries)],
        "devices": {
            catalogue_name(entry["gpu"]): {
                "memory_gib": entry["memory_gib"],
                "tflops_bf16": entry["peak_bf16_tflops"],
                **efficiency,
            }
            for entry in entries
        },
    }
    if flavour == "plain":
        rate = max(entry["inter_node_gbit_s"] for entry in entries)
        found["links"] = [{"from": ZONE, "to": ZONE, "gbit_per_s": rate, "latency_ms": 0}]
    return found


def _node_entry(index: int, entry: Mapping[str, Any], flavour: Flavour) -> dict[str, Any]:
    devices = entry["gpus_per_node"]
    return {
        "name": _group(index, entry),
        "device": catalogue_name(entry["gpu"]),
        "count": entry["num_nodes"],
        "devices": devices,
        "intra_gb_per_s": entry["intra_node_gb_s"],
        "inter_gbit_per_s": entry["inter_node_gbit_s"],
        "zone": ZONE,
        "host_memory_gib": HOST_GIB_PER_DEVICE * devices,
        **({"nics": devices} if flavour == "plain" else {}),
    }


def catalogue_name(gpu: str) -> str:
    """The catalogue's name of a GPU that the file calls by name and GiB; a GPU it lacks keeps its name."""
    for name in (f"{gpu}G", gpu.rpartition("-")[0]):
        if name in CATALOGUE:
            return name
    return gpu


def peer_plan(setting: Setting) -> dict[str, Any]:
    """The best recorded peer plan as a plan document that `shoal score` takes. Fields that the file does not know are
    left to their defaults."""
    found = setting.peer
    recompute = {"recompute": "full"} if found["recompute"] else {}
    if found["form"] == "pipelines":
        pipelines = [_pipeline(setting, entry, recompute) for entry in found["pipelines"]]
    else:
        stages = [
            {"layers": [stage["layers"]], **recompute, "replicas": [_replica(setting, r) for r in stage["replicas"]]}
            for stage in found["stages"]
        ]
        samples = sum(replica["micro_batch"] for replica in found["stages"][0]["replicas"])
        pipelines = [{"micro_batch": samples, "micro_batches": found["n_micro"], "stages": stages}]
    return {"pipelines": pipelines}


def _pipeline(setting: Setting, entry: Mapping[str, Any], recompute: Mapping[str, str]) -> dict[str, Any]:
    micro_batch = {"micro_batch": entry["micro_batch"]}
    stages = [
        {"layers": [stage["layers"]], **recompute, "replicas": [_replica(setting, {**stage, **micro_batch})]}
        for stage in entry["stages"]
    ]
    return {**micro_batch, "micro_batches": entry["n_micro"], "stages": stages}


def _replica(setting: Setting, entry: Mapping[str, Any]) -> dict[str, Any]:
    refs = [ref for text in entry["devices"] for ref in _devices(text)]
    nodes = {node for node, _ in refs}
    if len(nodes) != 1:
        raise ValueError(f"devices = {entry['devices']} of {setting.id}: a replica lies within one node")
    return {
        "node": setting.nodes[nodes.pop()].id,
        "devices": [device for _, device in refs],
        "tp": entry["tp"],
        "samples": entry["micro_batch"],
    }


def _devices(text: str) -> list[tuple[int, int]]:
    """`N:a-b` or `N:a`: GPUs a to b, inclusive, of node N."""
    node, _, span = text.partition(":")
    first, _, last = span.partition("-")
    return [(int(node), device) for device in range(int(first), int(last or first) + 1)]
