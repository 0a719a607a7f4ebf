"""The plans that people make without a planner: Megatron-like grids of tp x pp x dp, and two ways to deal layers.

All families have the same pipelines: every device of the chosen types, one tp degree, pipelines of one length, equal
micro-batches. `uniform` gives every stage as many blocks (as nearly as the count divides), `compute_proportional` by
the rate of the stage's devices, `memory_proportional` by their memory. A family answers with the best of its plans over
tp, pp, dp, micro-batch size, which device types take part, the order of nodes, whether a stage's replicas or a
pipeline's stages are neighbours, and recomputation where nothing fits without: what a patient person could try.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.plan import Pipeline, Plan, Recompute, Replica, Stage
from shoal_planner.score import score

Family = Literal["uniform", "compute_proportional", "memory_proportional"]
FAMILIES: tuple[Family, ...] = ("uniform", "compute_proportional", "memory_proportional")
MICRO_BATCHES = (1, 2, 4, 8)
TENSOR_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best plan of a family, or the reason of the last that did not fit."""

    plan: Plan | None
    step_s: float | None
    num_tried: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """tp devices of one node: what a grid is made of."""

    node: Node
    devices: tuple[int, ...]


def best(family: Family, job: JobSpec, snapshot: ClusterSnapshot) -> Best:
    """The best plan of the family under `shoal score`."""
    found: Plan | None = None
    found_s, tried, why = float("inf"), 0, "no grid divides the devices and the global batch"
    for recompute in ("none", "full"):
        for made in _plans(family, job, snapshot, recompute):
            tried += 1
            try:
                scored = score(made, job, snapshot)
            except (InvalidField, NoPlanFits) as error:
                why = str(error)
                continue
            assert scored.prediction is not None
            if scored.prediction.step_s < found_s:
                found, found_s = scored, scored.prediction.step_s
        if found is not None:
            return Best(plan=found, step_s=found_s, num_tried=tried, why="")
    return Best(plan=None, step_s=None, num_tried=tried, why=why)


def _plans(family: Family, job: JobSpec, snapshot: ClusterSnapshot, recompute: Recompute) -> Iterator[Plan]:
    heads, batch = job.model.num_kv_heads, job.train.global_batch
    for nodes, tp in itertools.product(_node_orders(snapshot), TENSOR_DEGREES):
        if heads % tp or any(node.devices % tp for node in nodes):
            continue
        slots = [_Slot(node=node, devices=found) for node in nodes for found in _groups(node, tp)]
        for pp in range(1, min(len(slots), job.model.layers) + 1):
            if len(slots) % pp:
                continue
            dp = len(slots) // pp
            for size in MICRO_BATCHES:
                if batch % (dp * size) == 0:
                    for chains in _chains(slots, pp, dp):
                        yield _plan(family, job, snapshot, chains, size, batch // (dp * size), recompute)


def _node_orders(snapshot: ClusterSnapshot) -> Iterator[tuple[Node, ...]]:
    """Nodes of each set of device types, by rate, slow first and fast first."""
    types = sorted({node.device for node in snapshot.nodes})
    rate = {name: device_type(name, snapshot.overrides).flops_per_s("bf16") for name in types}
    for count in range(1, len(types) + 1):
        for chosen in itertools.combinations(types, count):
            nodes = [node for node in snapshot.nodes if node.device in chosen]
            ordered = tuple(sorted(nodes, key=lambda node: (rate[node.device], node.id)))
            yield ordered
            if count > 1:
                yield ordered[::-1]


def _groups(node: Node, tp: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + tp)) for first in range(0, node.devices, tp)]


def _chains(slots: list[_Slot], pp: int, dp: int) -> Iterator[list[list[_Slot]]]:
    """The stages of each pipeline: first with a stage's replicas side by side, as Megatron lays out ranks, then with a
    pipeline's stages side by side."""
    yield [[slots[stage * dp + pipeline] for stage in range(pp)] for pipeline in range(dp)]
    if pp > 1 and dp > 1:
        yield [slots[pipeline * pp : (pipeline + 1) * pp] for pipeline in range(dp)]


def _plan(
    family: Family,
    job: JobSpec,
    snapshot: ClusterSnapshot,
    chains: list[list[_Slot]],
    micro_batch: int,
    micro_batches: int,
    recompute: Recompute,
) -> Plan:
    pipelines = []
    for chain in chains:
        ends = list(itertools.accumulate(deal(job.model.layers, _weights(family, chain, snapshot))))
        stages = [
            Stage(
                layers=((first, last),),
                replicas=(Replica(node=slot.node.id, devices=slot.devices, tp=len(slot.devices), samples=micro_batch),),
                recompute=recompute,
            )
            for slot, first, last in zip(chain, [0, *ends], ends, strict=False)
        ]
        pipelines.append(Pipeline(micro_batch=micro_batch, micro_batches=micro_batches, stages=tuple(stages)))
    return Plan(pipelines=tuple(pipelines))


def _weights(family: Family, chain: list[_Slot], snapshot: ClusterSnapshot) -> list[float]:
    devices = [device_type(slot.node.device, snapshot.overrides) for slot in chain]
    match family:
        case "uniform":
            return [1.0] * len(chain)
        case "compute_proportional":
            return [device.flops_per_s("bf16") * device.efficiency for device in devices]
        case "memory_proportional":
            return [float(device.memory_bytes) for device in devices]


def deal(layers: int, weights: list[float]) -> list[int]:
    """Blocks per stage by weight, one at least: each further one goes to the stage that has fewest for its weight."""
    dealt = [1] * len(weights)
    for _ in range(layers - len(weights)):
        poorest = min(range(len(weights)), key=lambda stage: ((dealt[stage] + 1) / weights[stage], stage))
        dealt[poorest] += 1
    return dealt
