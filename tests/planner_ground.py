"""Small jobs and clusters for tests of the planner."""

from __future__ import annotations

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.job import JobSpec, parse_job

MIB_PER_GIB = 1024


def make_job(
    *,
    layers: int = 8,
    batch: int = 16,
    heads: int = 8,
    precision: str = "fp32",
    tie: bool = True,
    seq_len: int = 128,
    hidden: int = 256,
    vocab: int = 256,
    limits: dict[str, object] | None = None,
    copies: int | str = "auto",
) -> JobSpec:
    return parse_job(
        {
            "name": "quickstart",
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": heads // 2,
                "ffn": hidden * 43 // 16,
                "vocab": vocab,
                "tie_embeddings": tie,
            },
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": batch, "seq_len": seq_len, "steps": 60, "precision": precision},
            "limits": limits or {},
            "checkpoint": {"copies": copies},
        }
    )


def make_cluster(*nodes: tuple[str, str, int, int], memory_mib: dict[str, float], **figures: float) -> ClusterSnapshot:
    """Nodes as (name, device, count, devices); each device type with this much memory."""
    return parse_cluster(
        {
            "nodes": [
                {"name": name, "device": device, "count": count, "devices": devices, **figures}
                for name, device, count, devices in nodes
            ],
            "devices": {name: {"memory_gib": mib / MIB_PER_GIB} for name, mib in memory_mib.items()},
        }
    )
