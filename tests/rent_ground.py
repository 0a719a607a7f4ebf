"""A market to rent from, as in the acceptance cases of the renting solver, and jobs small enough to plan quickly."""

from __future__ import annotations

from typing import Any

from shoal_planner.job import JobSpec, parse_job
from shoal_planner.market import Market, parse_market

# Dollars an hour of one GPU, and how many there were in four snapshots of a marketplace.
PRICES = {"RTX4090": 0.53, "A40": 0.55, "A6000": 0.83, "L40": 0.90, "A100-80G": 1.75, "H100-80G": 2.99}
AVAILABLE = ((16, 12, 8, 12, 6, 8), (32, 8, 16, 16, 7, 12), (32, 16, 8, 8, 32, 8), (24, 24, 24, 16, 4, 8))


def rent_job(*, layers: int = 24, steps: int = 1000, batch: int = 256, **checkpoint: object) -> JobSpec:
    """About 1.3 billion parameters: more than an RTX4090 can train alone, less than an A40 can."""
    return parse_job(
        {
            "name": "rented",
            "model": {"layers": layers, "hidden": 2048, "heads": 16, "ffn": 5504, "vocab": 32000},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": batch, "seq_len": 2048, "steps": steps, "precision": "bf16"},
            "checkpoint": {"uri": "s3://bucket/rented", **checkpoint},
        }
    )


def offer(device: str, available: int, **fields: Any) -> dict[str, Any]:
    return {
        "name": device.lower(),
        "device": device,
        "available": available,
        "price_per_hour": PRICES[device],
        "inter_gbit_per_s": 5,
        "host_memory_gib": 256,
        **fields,
    }


def market(available: tuple[int, ...], **fields: Any) -> Market:
    return parse_market(
        {"offers": [offer(device, count, **fields) for device, count in zip(PRICES, available, strict=True)]}
    )
