"""Random clusters and jobs for campaigns over the planner, and changes that can only make a cluster better.

The same kind and seed give the same instance on every machine and under every hash seed. Owns what is drawn; what must
hold of the plans is judged elsewhere (`campaign`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Link, Node, parse_cluster, snapshot_to_mapping
from shoal_planner.job import JobSpec, ModelSpec, job_to_mapping, parse_job

GIB = 1024**3
GPU_TYPES = ("A100-80G", "A100-40G", "H100-80G", "V100-16G", "T4", "L4", "L40S", "A10G", "RTX4090", "RTX3090")
# What a GPU's context takes, and what stays free: only to draw memories that are neither hopeless nor endless.
CONTEXT_BYTES = GIB * 6 // 10
FREE_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A job on a cluster; `kind` and `seed` say how to draw it again."""

    kind: str
    seed: int
    job: JobSpec
    cluster: ClusterSnapshot

    def repro(self) -> str:
        """All of it in one line of JSON."""
        return json.dumps({"job": job_to_mapping(self.job), "cluster": snapshot_to_mapping(self.cluster)})


def log_uniform(rng: random.Random, least: float, most: float) -> float:
    """Rounded to three digits, so that a repro can be read."""
    return float(f"{math.exp(rng.uniform(math.log(least), math.log(most))):.3g}")


def draw_small(seed: int, most_devices: int = 8) -> Instance:
    """At most `most_devices` devices and a small model."""
    rng = random.Random(f"small {most_devices} {seed}")
    job = _job(rng, layers=rng.randint(1, 16), batch=rng.randint(1, 24), wide=rng.random() < 0.3)
    return Instance(kind="small", seed=seed, job=job, cluster=_cluster(rng, job, rng.randint(1, most_devices)))


def draw_large(seed: int, least_devices: int = 1, most_devices: int = 64) -> Instance:
    """Up to `most_devices` devices and models of any size."""
    rng = random.Random(f"large {least_devices} {most_devices} {seed}")
    batch = rng.choice((rng.randint(1, 32), 32, 64, 96, 128, 256))
    job = _job(rng, layers=rng.randint(1, 48), batch=batch, wide=rng.random() < 0.5)
    devices = rng.randint(least_devices, most_devices)
    return Instance(kind="large", seed=seed, job=job, cluster=_cluster(rng, job, devices))


def draw_any(seed: int, most_devices: int, least_devices: int = 1) -> Instance:
    """Models and numbers of devices of every order: as many clusters of 1 to 8 devices as of 8 to 64."""
    rng = random.Random(f"any {most_devices} {seed}")
    devices = min(most_devices, int(math.exp(rng.uniform(math.log(least_devices), math.log(most_devices + 1)))))
    batch = rng.choice((rng.randint(1, 32), 32, 64, 96, 128, 256))
    job = _job(rng, layers=rng.randint(1, 48), batch=batch, wide=rng.random() < 0.5)
    return Instance(kind="any", seed=seed, job=job, cluster=_cluster(rng, job, devices))


def with_more_aspects(instance: Instance) -> Instance:
    """As drawn, and with any schedule, with exchanges beside computing or not, and some nodes with groups of devices,
    as parts of one machine, or with known rates of preemption."""
    rng = _change(instance, "aspects")
    train = dataclasses.replace(
        instance.job.train,
        schedule=rng.choice(("1f1b", "auto", "interleaved", "zero_bubble")),
        overlap=rng.choice(("none", "auto")),
    )
    nodes = list(instance.cluster.nodes)
    if len(nodes) > 1 and rng.random() < 0.3:  # the second is of the first one's machine
        first, second = nodes[:2]
        same = ("zone", "spot", "intra_bytes_per_s", "inter_bytes_per_s", "nics")
        shared = {name: getattr(first, name) for name in same}
        nodes[:2] = dataclasses.replace(first, host="m0"), dataclasses.replace(second, host="m0", **shared)
    for index, node in enumerate(nodes):
        if node.devices > 1 and rng.random() < 0.5:
            grouped = {"device_group": rng.randint(2, node.devices), "group_bytes_per_s": node.intra_bytes_per_s * 4}
            node = dataclasses.replace(node, **grouped)
        if node.spot and rng.random() < 0.5:
            node = dataclasses.replace(node, preemptions_per_hour=log_uniform(rng, 0.01, 3))
        nodes[index] = node
    return dataclasses.replace(
        instance,
        kind=f"{instance.kind}, more aspects",
        job=dataclasses.replace(instance.job, train=train),
        cluster=dataclasses.replace(instance.cluster, nodes=tuple(nodes)),
    )


def draw_tiny(seed: int, attempt: int, *, most_devices: int) -> Instance:
    """For brute force: up to 6 layers and 8 sequences. The number of devices hangs on the seed alone, so that drawing
    again after an instance with too many plans keeps clusters of every size."""
    devices = random.Random(f"tiny devices {seed}").choice(_many_first(most_devices))
    rng = random.Random(f"tiny {most_devices} {seed} {attempt}")
    job = _job(rng, layers=rng.choice(_many_first(6)), batch=rng.choice(_many_first(8)), wide=rng.random() < 0.4)
    job = _held(rng, job, devices)
    scattered = rng.random() < 0.5
    cluster = _cluster(
        rng, job, devices, kinds=rng.randint(1, 3), zones=rng.choice((1, 1, 1, 2)), most_per_node=2 if scattered else 6
    )
    if rng.random() < 0.5:  # else so slow a network that hardly anything may cross it
        nodes = (dataclasses.replace(node, inter_bytes_per_s=node.inter_bytes_per_s * 50) for node in cluster.nodes)
        cluster = dataclasses.replace(cluster, nodes=tuple(nodes))
    return Instance(kind="tiny", seed=seed, job=job, cluster=cluster)


def _many_first(most: int) -> tuple[int, ...]:
    """Large numbers more often than small ones: they are where a search goes wrong."""
    return tuple(number for number in range(1, most + 1) for _ in range(number))


def _held(rng: random.Random, job: JobSpec, devices: int) -> JobSpec:
    """Most tiny jobs hold recomputation and sharding to none, and a few limit the devices."""
    train = dataclasses.replace(
        job.train,
        sharding=rng.choice(("none", "none", "none", "auto")),
        recompute=rng.choice(("none", "none", "none", "auto")),
        overlap=rng.choice(("none", "auto")),
    )
    least = rng.randint(1, devices) if rng.random() < 0.1 else 1
    return dataclasses.replace(job, train=train, limits=dataclasses.replace(job.limits, min_devices=least))


def _job(rng: random.Random, *, layers: int, batch: int, wide: bool) -> JobSpec:
    heads = rng.choice((1, 2, 3, 4, 4, 6, 8) if not wide else (8, 12, 16, 32, 64))
    hidden = heads * rng.choice((16, 32, 64) if not wide else (64, 128))
    model = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": rng.choice([count for count in range(1, heads + 1) if heads % count == 0]),
        "ffn": hidden * rng.randint(1, 4),
        "vocab": rng.choice((256, 1000, 32000)),
        "tie_embeddings": rng.random() < 0.5,
        "gated_mlp": rng.random() < 0.7,
    }
    train = {
        "global_batch": batch,
        "seq_len": rng.choice((32, 128, 512, 1024) if not wide else (512, 1024, 2048)),
        "steps": 10,
        "precision": rng.choice(("fp32", "bf16")),
        "overlap": "none",  # searches and their proofs are about plans in which nothing overlaps
    }
    return parse_job({"name": "campaign", "model": model, "data": {"uri": "stdlib:"}, "train": train})


def model_bytes(job: JobSpec) -> float:
    """About what the state of the model and the activations of one sample take together."""
    model, train = job.model, job.train
    size = 4 if train.precision == "fp32" else 2
    kept = model.layers * train.seq_len * size * (9 * model.hidden + 4 * model.ffn)
    return num_parameters(model) * (size + 16) + kept + ends_bytes(job)


def ends_bytes(job: JobSpec) -> float:
    """What no split between stages makes smaller: buffers of the largest matrix, logits, one block at work."""
    model, train = job.model, job.train
    block = model.hidden * 3 * model.ffn
    work = 4 * train.seq_len * (9 * model.hidden + 4 * model.ffn)
    return 30.0 * max(block, model.hidden * model.vocab) + 12.0 * train.seq_len * model.vocab + work


def _cluster(
    rng: random.Random,
    job: JobSpec,
    devices: int,
    *,
    kinds: int | None = None,
    zones: int | None = None,
    most_per_node: int = 16,
) -> ClusterSnapshot:
    zones = zones or rng.choice((1, 1, 2, 3))
    names = [f"d{index}" for index in range(kinds or rng.randint(1, 4))]
    if rng.random() < 0.3:
        names[0] = rng.choice(GPU_TYPES)
    types = {name: _device(rng, job, devices, known=name in GPU_TYPES) for name in names}
    nodes: list[dict[str, object]] = []
    left = devices
    while left:
        entry = _node(rng, f"n{len(nodes)}", rng.choice(names), rng.randint(1, min(left, most_per_node)), zones)
        size = int(str(entry["devices"]))
        entry["count"] = rng.randint(1, left // size)
        left -= size * int(str(entry["count"]))
        nodes.append(entry)
    return parse_cluster(
        {"nodes": nodes, "devices": types, "links": _links(rng, sorted({str(entry["zone"]) for entry in nodes}))}
    )


def _device(rng: random.Random, job: JobSpec, devices: int, *, known: bool) -> dict[str, float]:
    """Memory around an even share of what the model needs: sometimes it binds, sometimes it is ample or too little."""
    even = model_bytes(job) / devices
    factor = log_uniform(rng, 1.2, 3) if rng.random() < 0.7 else log_uniform(rng, 3, 12)
    need = factor * (even + ends_bytes(job) / 3)
    if known:
        return {"memory_gib": max(1e-3, (need + CONTEXT_BYTES) / FREE_SHARE / GIB)} if rng.random() < 0.5 else {}
    figures = {"memory_gb_per_s": log_uniform(rng, 10, 2000), "efficiency": round(rng.uniform(0.2, 0.7), 2)}
    if rng.random() < 0.5:
        speed = log_uniform(rng, 0.05, 2)
        return {
            **figures,
            "threads": 1,
            "tflops_fp32": speed,
            "tflops_bf16": 2 * speed,
            "memory_gib": max(1e-3, need / FREE_SHARE / GIB),
        }
    speed = log_uniform(rng, 5, 100)
    memory_gib = max(1e-3, (need + CONTEXT_BYTES) / FREE_SHARE / GIB)
    return {**figures, "tflops_fp32": speed, "tflops_bf16": 4 * speed, "memory_gib": memory_gib}


def _node(rng: random.Random, name: str, device: str, devices: int, zones: int) -> dict[str, object]:
    tight = rng.random() < 0.05
    return {
        "name": name,
        "device": device,
        "devices": devices,
        "intra_gb_per_s": log_uniform(rng, 0.5, 600),
        "inter_gbit_per_s": log_uniform(rng, 0.05, 400),
        "zone": f"z{rng.randrange(zones)}",
        "spot": rng.random() < 0.5,
        "price_per_hour": round(rng.uniform(0, 30), 2),
        "nics": rng.choice((1, 1, 1, 2, devices)),
        "host_memory_gib": log_uniform(rng, 0.01, 4) if tight else 4096,
    }


def _links(rng: random.Random, zones: list[str]) -> list[dict[str, object]]:
    figures = {"gbit_per_s": (0.01, 100), "latency_ms": (0.1, 60)}
    return [
        {"from": here, "to": there, **{name: log_uniform(rng, *ends) for name, ends in figures.items()}}
        for here, there in itertools.combinations(zones, 2)
        if rng.random() < 0.8
    ]


# --- changes for the better ------------------------------------------------------------------------------------------


def more_device(instance: Instance) -> tuple[str, ClusterSnapshot]:
    """One more device in a node, or a node of one device that is like another, or of a new type."""
    rng, cluster = _change(instance, "device"), instance.cluster
    node = rng.choice(cluster.nodes)
    match rng.randrange(3):
        case 0:
            larger = dataclasses.replace(node, devices=node.devices + 1)
            return f"{node.id} has {larger.devices} devices", _with_node(cluster, larger)
        case 1:
            alike = dataclasses.replace(node, id=f"{rng.choice('am')}-more", devices=1, nics=1)
            return f"{alike.id} is like {node.id}", _with_node(cluster, alike)
        case _:
            other = dataclasses.replace(
                node, id=f"{rng.choice('az')}-more", device=rng.choice(GPU_TYPES), devices=1, nics=1
            )
            return f"{other.id} has {other.device}", _with_node(cluster, other)


def more_memory(instance: Instance) -> tuple[str, ClusterSnapshot]:
    """One device type gets more memory, or one host."""
    rng, cluster = _change(instance, "memory"), instance.cluster
    factor = 1 + log_uniform(rng, 0.02, 4)
    if not cluster.overrides or rng.random() < 0.15:
        node = rng.choice(cluster.nodes)
        larger = dataclasses.replace(node, host_memory_bytes=int(node.host_memory_bytes * factor))
        return f"host memory of {node.id} x {factor:.3g}", _with_node(cluster, larger)
    grown = rng.choice(cluster.overrides)
    if grown.memory_bytes is None:
        return "nothing", cluster
    larger_type = dataclasses.replace(grown, memory_bytes=int(grown.memory_bytes * factor))
    others = tuple(entry for entry in cluster.overrides if entry != grown)
    return f"memory of {grown.name} x {factor:.3g}", dataclasses.replace(cluster, overrides=(*others, larger_type))


def faster_link(instance: Instance) -> tuple[str, ClusterSnapshot]:
    """The devices of one node, the network of one or all nodes, or two zones are connected better."""
    rng, cluster = _change(instance, "link"), instance.cluster
    factor = 1 + log_uniform(rng, 0.02, 20)
    node = rng.choice(cluster.nodes)
    match rng.randrange(4 if cluster.links else 3):
        case 0:
            better = dataclasses.replace(node, intra_bytes_per_s=node.intra_bytes_per_s * factor)
            return f"intra of {node.id} x {factor:.3g}", _with_node(cluster, better)
        case 1:
            better = dataclasses.replace(node, inter_bytes_per_s=node.inter_bytes_per_s * factor)
            return f"inter of {node.id} x {factor:.3g}", _with_node(cluster, better)
        case 2:
            nodes = tuple(
                dataclasses.replace(entry, inter_bytes_per_s=entry.inter_bytes_per_s * factor)
                for entry in cluster.nodes
            )
            return f"inter of all x {factor:.3g}", dataclasses.replace(cluster, nodes=nodes)
        case _:
            link = rng.choice(cluster.links)
            better_link = _better_link(rng, link, factor)
            others = tuple(entry for entry in cluster.links if entry != link)
            what = f"link {link.from_zone}-{link.to_zone} x {factor:.3g}"
            return what, dataclasses.replace(cluster, links=(*others, better_link))


def slow_device(instance: Instance) -> tuple[str, ClusterSnapshot]:
    """One more node with a device of a tenth of the speed of one that is there, behind the same links. Its figures
    are not a tenth, as small models use less of a fast device: its seconds are ten times as many."""
    rng, cluster = _change(instance, "slow"), instance.cluster
    node = rng.choice(cluster.nodes)
    slow = dataclasses.replace(node, id=f"{rng.choice('amz')}-slow", devices=1, nics=1, speed=node.speed / 10)
    return f"{slow.id} is like {node.id} at a tenth of its speed", _with_node(cluster, slow)


def _better_link(rng: random.Random, link: Link, factor: float) -> Link:
    if rng.random() < 0.5:
        return dataclasses.replace(link, latency_s=link.latency_s / factor)
    return dataclasses.replace(link, bytes_per_s=link.bytes_per_s * factor)


def _change(instance: Instance, what: str) -> random.Random:
    return random.Random(f"{what} {instance.kind} {instance.seed}")


def _with_node(cluster: ClusterSnapshot, node: Node) -> ClusterSnapshot:
    others = tuple(entry for entry in cluster.nodes if entry.id != node.id)
    return dataclasses.replace(cluster, nodes=(*others, node))


CHANGES: dict[str, Callable[[Instance], tuple[str, ClusterSnapshot]]] = {
    "device": more_device,
    "memory": more_memory,
    "link": faster_link,
}


def num_parameters(model: ModelSpec) -> int:
    """Counted from the shapes of the matrices alone."""
    keys = model.num_kv_heads * model.head_size
    block = model.hidden * (2 * model.hidden + 2 * keys + 3 * model.ffn + 2)
    ends = model.hidden * (model.vocab * (1 if model.tie_embeddings else 2) + 1)
    return model.layers * block + ends
