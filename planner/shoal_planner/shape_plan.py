"""From nodes to kinds of room, and from a shape with layers and choices to a plan.

Owns what the exact searches begin with and what they end in; no costs and no search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shoal_planner.again import marked
from shoal_planner.chain_times import Choice
from shoal_planner.choices import Choice as LayerChoice
from shoal_planner.choices import overrides
from shoal_planner.cluster import Node
from shoal_planner.costs import CostModel
from shoal_planner.memory import GENERATIONS, hosted_bytes, snapshot_bytes, unit_elements
from shoal_planner.options import Ints
from shoal_planner.plan import Override, Pipeline, Plan, Recompute, Replica, Sharding, Stage
from shoal_planner.shape_exchange import Shape
from shoal_planner.shapes import Room, Rooms


def plan_of(shape: Shape, layers: list[Ints], choices: list[Choice], copies: int, *, split: bool, away: Ints) -> Plan:
    """Devices are given out in order; `split`: optimizer state is shared by all who hold a weight; `away`: by layers of
    a stage, of how many of them it is on the host."""
    free: dict[str, Iterator[int]] = {node: itertools.count() for placed in shape for node in placed.nodes}
    pipelines = []
    for placed, row, choice in zip(shape, layers, choices, strict=True):
        samples, first, stages = iter(choice.samples), 0, []
        for stage, count, again in zip(placed.chain.stages, row, choice.again, strict=True):
            replicas = tuple(
                Replica(
                    node=placed.nodes[cell.slot],
                    devices=tuple(itertools.islice(free[placed.nodes[cell.slot]], cell.tp)),
                    tp=cell.tp,
                    samples=next(samples),
                )
                for cell in stage
            )
            stages.append(_stage(first, int(count), again, int(away[count]), replicas))
            first += int(count)
        pipelines.append(Pipeline(micro_batch=choice.size, micro_batches=choice.number, stages=tuple(stages)))
    sharding = Sharding(optimizer="cluster" if split else "none")
    return Plan(pipelines=tuple(pipelines), copies=copies, sharding=sharding)


def _stage(first: int, count: int, again: tuple[int, int], away: int, replicas: tuple[Replica, ...]) -> Stage:
    last = first + count
    recompute, changed = _with_hosts(first, count, again, away) if away else marked(first, last, *again)
    return Stage(layers=((first, last),), replicas=replicas, recompute=recompute, overrides=changed)


def _with_hosts(first: int, count: int, again: tuple[int, int], away: int) -> tuple[Recompute, tuple[Override, ...]]:
    """Of the layers, so many are computed again selectively and fully, and the state of so many is on the host."""
    selective, full = again
    kinds: tuple[tuple[Recompute, int], ...]
    kinds = (("full", full), ("selective", selective), ("none", count - full - selective))
    left, choices, counts = count - away, [], []
    for recompute, number in kinds:
        kept = min(number, left)
        left -= kept
        choices += [LayerChoice(recompute=recompute), LayerChoice(recompute=recompute, offload="optimizer")]
        counts += [kept, number - kept]
    return overrides(first, choices, counts)


def have_ample_hosts(nodes: tuple[Node, ...], costs: CostModel) -> bool:
    """Whether every host has room for whatever a plan on these nodes may keep there."""
    most_bytes = most_host_bytes(nodes, costs)
    return all(node.host_memory_bytes > most_bytes for node in costs.snapshot.nodes)


def most_host_bytes(nodes: tuple[Node, ...], costs: CostModel, *, hosting: bool = False) -> float:
    """All devices together own everything once, or each owns everything where nothing is split, and no node keeps
    copies of more than that. `hosting`: the state itself, if split, too."""
    model = costs.job.model
    elements = sum(unit_elements(model, unit, 1) for unit in range(model.layers + 2))
    owners = 1 if costs.job.train.sharding != "none" else sum(node.devices for node in nodes)
    most_bytes = snapshot_bytes(owners * elements) + (GENERATIONS * hosted_bytes(elements, elements) if hosting else 0)
    return 2 * most_bytes  # tp repeats a few small matrices


def rooms_of(nodes: tuple[Node, ...], costs: CostModel, *, apart: bool) -> Rooms:
    """Equal nodes may change places; `apart`: none may. Where hosts are tight it matters whose copies a node keeps."""
    found: dict[int, list[int]] = {}
    shapes = sorted({(costs.kind(node.id), node.devices) for node in nodes})
    for place, node in enumerate(nodes):
        found.setdefault(place if apart else shapes.index((costs.kind(node.id), node.devices)), []).append(place)
    return {kind: Room(nodes[places[0]].devices, tuple(places)) for kind, places in found.items()}
