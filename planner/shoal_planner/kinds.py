"""Which pipelines of a plan are alike, and which replicas of a stage: what a reader need see only once.

Owns what counts as alike: device type, market, tp, layers, samples and settings; not the names of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.plan import Pipeline, Plan, Replica, Stage

UNKNOWN = "unknown"
Nodes = Mapping[str, Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`pipelines` (numbers within the plan, ascending) that are alike; the first stands for all."""

    pipelines: tuple[int, ...]
    first: Pipeline


def nodes_by_id(snapshot: ClusterSnapshot) -> dict[str, Node]:
    return {node.id: node for node in snapshot.nodes}


def type_of(node_id: str, nodes: Nodes) -> str:
    """The device type of a node, and its speed; a plan from elsewhere may name nodes that this cluster lacks."""
    return nodes[node_id].device_label if node_id in nodes else UNKNOWN


def kinds(plan: Plan, nodes: Nodes) -> tuple[Kind, ...]:
    """In the order in which they first come."""
    found: dict[object, list[int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        found.setdefault(_pipeline_key(pipeline, nodes), []).append(number)
    return tuple(Kind(pipelines=tuple(numbers), first=plan.pipelines[numbers[0]]) for numbers in found.values())


def replica_groups(stage: Stage, nodes: Nodes) -> tuple[tuple[int, ...], ...]:
    """Numbers of the replicas of a stage, those that are alike together."""
    found: dict[object, list[int]] = {}
    for number, replica in enumerate(stage.replicas):
        found.setdefault(_replica_key(replica, nodes), []).append(number)
    return tuple(map(tuple, found.values()))


def layers_text(stage: Stage) -> str:
    """As in "layers 0-13" (both included), "layer 3", or "no layers"."""
    chunks = [(first, last) for first, last in stage.layers if last > first]
    if not chunks:
        return "no layers"
    named = ", ".join(str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in chunks)
    return f"layer {named}" if stage.num_layers == 1 else f"layers {named}"


def stage_text(pipeline: Pipeline, number: int) -> str:
    """All that a stage holds: "embedding + layers 0-13"."""
    stage = pipeline.stages[number]
    parts = ["embedding"] if number == 0 else []
    parts += [layers_text(stage)] if stage.num_layers else []
    parts += ["head"] if number == len(pipeline.stages) - 1 else []
    return " + ".join(parts)


def stage_texts(pipeline: Pipeline, number: int) -> tuple[str, str, str]:
    """The same, and in ever fewer characters: "emb. + layers 0-13", "emb. + 0-13"."""
    whole = stage_text(pipeline, number)
    shorter = whole.replace("embedding", "emb.")
    return whole, shorter, shorter.replace("layers ", "").replace("layer ", "")


def numbers_text(numbers: tuple[int, ...]) -> str:
    """As in "0-63" or "0, 2-5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def devices_text(replica: Replica) -> str:
    """As in "a100-0:0-3"."""
    return f"{replica.node}:{numbers_text(replica.devices).replace(' ', '')}"


def marks(stage: Stage) -> tuple[str, ...]:
    """What differs from a plain stage: recomputation and overrides, in words."""
    found = [f"recompute {stage.recompute}"] if stage.recompute != "none" else []
    for override in stage.overrides:
        first, last = override.layers
        chosen = [f"recompute {override.recompute}"] if override.recompute is not None else []
        chosen += [f"{override.offload} on the host"] if override.offload != "none" else []
        chosen += ["whole on each replica"] if override.sharding else []
        if chosen:
            layers = f"{first}-{last - 1}" if last > first + 1 else str(first)
            found.append(f"{layers}: {', '.join(chosen)}")
    return tuple(found)


def _pipeline_key(pipeline: Pipeline, nodes: Nodes) -> object:
    stages = tuple(
        (stage.layers, marks(stage), tuple(sorted(map(str, (_replica_key(r, nodes) for r in stage.replicas)))))
        for stage in pipeline.stages
    )
    return pipeline.micro_batch, pipeline.micro_batches, stages


def _replica_key(replica: Replica, nodes: Nodes) -> tuple[str, bool, int, int, float]:
    spot = replica.node in nodes and nodes[replica.node].spot
    return type_of(replica.node, nodes), spot, replica.tp, replica.samples, round(replica.state_share, 2)
