"""What still stands of a running plan on the cluster as it is now: pipelines, units of the others, and free devices.

Owns the comparison alone. What is made of it is up to `repair`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_planner.cluster import Node
from shoal_planner.costs import CostModel
from shoal_planner.finish import Unit, Word
from shoal_planner.options import usable_nodes
from shoal_planner.plan import Pipeline, Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A pipeline that lost devices: its units as they were, and whether each is still there."""

    place: int
    word: Word
    alive: tuple[bool, ...]

    def rest(self) -> Word:
        return tuple(unit for unit, alive in zip(self.word, self.alive, strict=True) if alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`kept` pipelines and `broken` ones by their places in the plan. `free` are devices by node that neither use;
    `spare` those among them that were there before, and idle. `lost` are nodes that are gone, `joined` new ones."""

    num_pipelines: int
    kept: tuple[tuple[int, Pipeline], ...]
    broken: tuple[Broken, ...]
    free: Mapping[str, tuple[int, ...]]
    spare: Mapping[str, int]
    lost: tuple[str, ...]
    joined: tuple[str, ...]

    def new_devices(self, words: Iterable[Word]) -> dict[str, tuple[int, ...]]:
        """Of nodes that joined, but for those that these words use already."""
        taken = {(unit.node, device) for word in words for unit in word for device in unit.devices}
        left = {
            node_id: tuple(device for device in self.free[node_id] if (node_id, device) not in taken)
            for node_id in self.joined
        }
        return {node_id: devices for node_id, devices in left.items() if devices}


def standing(previous: Plan, costs: CostModel) -> Standing | None:
    """None where the plan has stages that a search made of single units would not have, or is not one of this job."""
    if not all(_is_plain(stage) for pipeline in previous.pipelines for stage in pipeline.stages):
        return None
    if previous.num_layers != costs.job.model.layers:
        return None
    nodes = {node.id: node for node in usable_nodes(costs.job, costs.snapshot)}
    kept, broken = [], []
    for place, pipeline in enumerate(previous.pipelines):
        word = word_of(pipeline)
        alive = tuple(_is_there(unit, nodes) for unit in word)
        if all(alive):
            kept.append((place, pipeline))
        else:
            broken.append(Broken(place=place, word=word, alive=alive))
    units = [unit for _, pipeline in kept for unit in word_of(pipeline)]
    units += [unit for entry in broken for unit in entry.rest()]
    free = _free(nodes, units)
    named = {replica.node for replica in previous.replicas()}
    idle = {name.rpartition(":")[0] for name in previous.unused}
    joined = tuple(sorted(nodes.keys() - named - idle))
    return Standing(
        num_pipelines=len(previous.pipelines),
        kept=tuple(kept),
        broken=tuple(broken),
        free=free,
        spare={node_id: len(devices) for node_id, devices in free.items() if node_id not in joined},
        lost=tuple(sorted(named - nodes.keys())),
        joined=joined,
    )


def word_of(pipeline: Pipeline) -> Word:
    """Of a pipeline whose stages are single units."""
    return tuple(Unit(stage.replicas[0].node, stage.replicas[0].devices) for stage in pipeline.stages)


def _is_plain(stage: Stage) -> bool:
    return len(stage.replicas) == len(stage.layers) == 1 and not stage.offloaded() and not stage.whole()


def _is_there(unit: Unit, nodes: Mapping[str, Node]) -> bool:
    return unit.node in nodes and max(unit.devices) < nodes[unit.node].devices


def _free(nodes: Mapping[str, Node], units: list[Unit]) -> dict[str, tuple[int, ...]]:
    used: dict[str, set[int]] = {}
    for unit in units:
        used.setdefault(unit.node, set()).update(unit.devices)
    found = {}
    for node in nodes.values():
        taken = used.get(node.id, set())
        if len(taken) < node.devices:
            found[node.id] = tuple(index for index in range(node.devices) if index not in taken)
    return found
