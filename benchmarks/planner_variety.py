"""Clusters and jobs of every usual make, drawn by seed, and the processor seconds that a first call may take on each.

Owns what is drawn and the bar; `planner` makes the calls (`--only variety`, `--only variety:v17`). A cluster has two to
five types of devices in nodes of one to eight, on spot or not, in one zone or two; a model has 0.35 to 70 thousand
million parameters.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Mapping

from benchmarks.planner_clusters import MACHINES, Document, Ground, machines

# Devices, and the seconds that are allowed for so many; between them, as a straight line of logarithms.
BAR_S = ((16, 0.2), (64, 0.5), (256, 1.5), (1024, 5.0), (10000, 60.0))
NUM_GROUNDS = 98
_DEVICES = (4, 6, 8, 8, 9, 12, 16, 24, 32, 40, 48, 64, 96, 256)
_BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
# Preset, and the fewest devices that somebody would train it on.
_MODELS: Mapping[str, int] = {
    "gpt2-medium": 1,
    "tinyllama-1.1b": 2,
    "llama-3.2-3b": 4,
    "llama-2-7b": 6,
    "llama-3-8b": 8,
    "llama-2-13b": 12,
    "llama-30b": 32,
    "llama-2-70b": 48,
}


def bar_s(devices: int) -> float:
    """What a first call may take on so many devices; below the fewest that a bar is stated for, as much as there."""
    at = bisect.bisect_left([size for size, _ in BAR_S], devices)
    if at == 0 or at == len(BAR_S):
        return BAR_S[min(at, len(BAR_S) - 1)][1]
    (fewer, less_s), (more, more_s) = BAR_S[at - 1 : at + 1]
    share = math.log(devices / fewer) / math.log(more / fewer)
    return float(less_s * (more_s / less_s) ** share)


def num_devices(ground: Ground) -> int:
    return sum(entry["count"] * entry["devices"] for entry in ground.cluster["nodes"])


def variety(number: int = NUM_GROUNDS) -> tuple[Ground, ...]:
    """So many, of all numbers of devices in turn."""
    return tuple(_drawn(seed, devices) for seed, devices in zip(range(number), itertools.cycle(_DEVICES), strict=False))


def _drawn(seed: int, devices: int) -> Ground:
    rng = random.Random(f"variety {seed}")
    model = rng.choice([name for name, least in _MODELS.items() if least <= devices])
    seq_len = 1024 if model.startswith("gpt2") else rng.choice((1024, 2048, 4096))
    train = {"global_batch": rng.choice(_BATCHES), "seq_len": seq_len, "steps": 1000, "precision": "bf16"}
    job = {"name": f"v{seed}", "model": {"preset": model}, "data": {"uri": "stdlib:"}, "train": train}
    return Ground(name=f"v{seed}", job=job, cluster=_cluster(rng, devices))


def _cluster(rng: random.Random, devices: int) -> Document:
    zones = rng.choice((1, 1, 2))
    types = rng.sample(sorted(MACHINES), min(devices, rng.randint(2, 5)))
    # Every type has a device at least, and what is left is shared out by weights.
    weights = [rng.uniform(0.3, 1) for _ in types]
    shares = [1 + int((devices - len(types)) * weight / sum(weights)) for weight in weights]
    shares[0] += devices - sum(shares)
    nodes = []
    for device, share in zip(types, shares, strict=True):
        size = rng.choice([size for size in (1, 2, 4, 8, 8) if size <= share])
        zone = rng.choice("ab"[:zones])
        nodes.append(_nodes(rng, device, share // size, size, zone))
        if share % size:
            nodes.append(_nodes(rng, device, 1, share % size, zone))
    cluster: Document = {"nodes": nodes}
    if len({entry["zone"] for entry in nodes}) > 1:
        cluster["links"] = [{"from": "a", "to": "b", "gbit_per_s": rng.choice((5, 25, 50)), "latency_ms": 2}]
    return cluster


def _nodes(rng: random.Random, device: str, count: int, devices: int, zone: str) -> Document:
    market = {"spot": rng.random() < 0.5, "price_per_hour": round(devices * rng.uniform(0.5, 4), 2)}
    return machines(device, count, devices, zone) | market
