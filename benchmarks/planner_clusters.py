"""Clusters and models that the planner's benchmarks run on, as documents of the published forms.

Node shapes are those that can be rented or bought: device counts, host memory and network rates as the makers and
clouds state them, rounded. No cluster of equal devices is here: on those there is nothing to win over a uniform plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A job and a cluster to plan it on."""

    name: str
    job: Document
    cluster: Document


_MODELS: Mapping[str, Document] = {
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000},
    "13b": {"layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824, "vocab": 32000},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 32000},
}
# Device of the catalogue: links in the node, one interface, interfaces, host memory.
MACHINES: Mapping[str, tuple[float, float, int, float]] = {
    "A100-80G": (300, 200, 4, 1024),
    "A100-40G": (300, 100, 4, 1024),
    "H100-80G": (450, 400, 8, 2048),
    "H800-80G": (200, 400, 4, 2048),
    "H20-96G": (450, 400, 4, 2048),
    "L40S": (28, 100, 1, 768),
    "A10G": (12, 50, 1, 384),
    "L4": (12, 50, 1, 384),
    "V100-32G": (130, 100, 1, 768),
    "RTX4090": (20, 25, 1, 512),
}


def machines(device: str, count: int, devices: int = 8, zone: str = "a") -> Document:
    intra, inter, nics, host_gib = MACHINES[device]
    return {
        "name": f"{device.lower()}-{zone}{devices}",
        "device": device,
        "count": count,
        "devices": devices,
        "zone": zone,
        "intra_gb_per_s": intra,
        "inter_gbit_per_s": inter,
        "nics": min(nics, devices),
        "host_memory_gib": host_gib,
    }


def _ground(name: str, model: str, global_batch: int, *nodes: Document, **others: Any) -> Ground:
    train = {"global_batch": global_batch, "seq_len": 4096, "steps": 1000, "precision": "bf16"}
    job = {
        "name": f"{model}-on-{name}",
        "model": {**_MODELS[model], "tie_embeddings": False},
        "data": {"uri": "stdlib:"},
        "train": train,
    }
    return Ground(name=name, job=job, cluster={"nodes": list(nodes), **others})


_BETWEEN_ZONES = [{"from": "a", "to": "b", "gbit_per_s": 50, "latency_ms": 2}]
# How long a first call takes: by number of devices.
SIZES: tuple[Ground, ...] = (
    _ground("16", "7b", 512, machines("A100-80G", 1), machines("H100-80G", 1, 4), machines("L4", 1, 4)),
    _ground("64", "7b", 512, machines("A100-80G", 4), machines("H100-80G", 2), machines("A10G", 4, 4)),
    _ground("256", "13b", 1024, machines("A100-80G", 16), machines("H100-80G", 8), machines("L40S", 8)),
    _ground("1024", "70b", 2048, machines("A100-80G", 64), machines("H800-80G", 32), machines("H20-96G", 32)),
    _ground(
        "1024x2zones",
        "70b",
        2048,
        machines("A100-80G", 48),
        machines("H100-80G", 32),
        machines("H20-96G", 32, zone="b"),
        machines("L40S", 16, zone="b"),
        links=_BETWEEN_ZONES,
    ),
    _ground("10000", "70b", 4096, machines("A100-80G", 600), machines("H800-80G", 300), machines("H20-96G", 350)),
    _ground("10000x1", "7b", 4096, machines("A100-80G", 5000, 1), machines("L4", 5000, 1)),
)
# What is won over the plans that people make without a planner.
MIXED: tuple[Ground, ...] = (
    _ground("a100+v100", "7b", 256, machines("A100-80G", 1), machines("V100-32G", 1)),
    _ground("h100+a100", "13b", 512, machines("H100-80G", 1), machines("A100-80G", 2)),
    _ground("a10g+l4", "3b", 128, machines("A10G", 4, 4), machines("L4", 4, 4)),
    _ground("h100+l40s+a100-40", "13b", 512, machines("H100-80G", 1), machines("L40S", 2), machines("A100-40G", 1)),
    _ground("uneven", "7b", 256, machines("A100-80G", 1, 4), machines("H100-80G", 1, 2), machines("L4", 1)),
    _ground("h800+h20", "13b", 512, machines("H800-80G", 1), machines("H20-96G", 2)),
    _ground("a100+rtx4090", "7b", 256, machines("A100-40G", 1), machines("RTX4090", 2)),
)
