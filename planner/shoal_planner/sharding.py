"""Who shares weights and gradients with whom inside a step, and what passing them round takes.

Each member of a circle (`circles`) keeps its part of what is sharded. Weights are gathered before a layer's forward and
again before its backward, one layer ahead, and dropped after; gradients are scattered to their parts after each
backward. Owns the parts, and the seconds of these exchanges. Does not own what crosses between circles once a step
(`predict`), nor what a rank keeps (`memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal_planner.circles import Circle, circles, device_group
from shoal_planner.costs import CostModel
from shoal_planner.memory import ELEMENT_BYTES, unit_elements
from shoal_planner.plan import Level, Pipeline, Plan, Replica, Stage
from shoal_planner.slices import Slicing, num_slices, slicing_of

INT8_BYTES, INT4_BYTES = 1.0, 0.5  # scales come to 0.2 and 1.6 per cent more
Place = tuple[int, int, int]  # pipeline, stage and replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """What a replica keeps of its weights and gradients, as parts of the whole, `near` of the weights that its node has
    gathered, and the seconds that passing them round, each unit in so many slices, adds to each micro-batch's forward
    and backward. Of its blocks `whole` are not split."""

    weights: float = 1.0
    gradients: float = 1.0
    near: float = 0.0
    whole: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    slices: int = 1

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


WHOLE = Shards()


def circles_of(stage: Stage, level: Level, costs: CostModel) -> tuple[Circle, ...]:
    """By the device groups of the cluster. Raises KeyError for an unknown node."""
    return circles(stage, level, lambda node: costs.node(node).device_group)


def shares_inside(plan: Plan) -> bool:
    """Whether anything is passed round within a step."""
    return plan.sharding.weights != "none" or plan.sharding.gradients != "none"


def shards(plan: Plan, costs: CostModel) -> dict[Place, Shards]:
    """By replica; nothing for plans in which nobody shares. Raises KeyError for an unknown node."""
    found: dict[Place, Shards] = {}
    if not shares_inside(plan):
        return found
    known: dict[tuple[object, ...], float] = {}
    rounds = _rounds(plan, costs)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            units, ran_again = _units(pipeline, s), _gathered_again(stage)
            found_by = {one: _by_replica(stage, one, units, costs, known) for one in set(rounds)}
            forward, backward, scatter = (found_by[one] for one in rounds)
            again = _by_replica(stage, rounds[1], ran_again, costs, known) if ran_again.layers else None
            for r, replica in enumerate(stage.replicas):
                busy = bool(replica.samples)  # who runs nothing sends its parts beside what the others do
                found[p, s, r] = Shards(
                    weights=forward[r][0],
                    gradients=scatter[r][0],
                    near=backward[r][0] if plan.sharding.secondary else 0.0,
                    whole=stage.whole() if busy else 0,
                    forward_s=forward[r][1] if busy else 0.0,
                    backward_s=backward[r][1] + (again[r][1] if again else 0.0) + scatter[r][1] if busy else 0.0,
                    slices=stage.slices,
                )
    return found


class _Round(NamedTuple):
    """All layers are passed round once: among whom, and the bytes of an element on the way."""

    level: Level
    element_bytes: float
    hops: bool = False  # inside nodes first, so that each of them sends its sum once


def _rounds(plan: Plan, costs: CostModel) -> tuple[_Round, _Round, _Round]:
    """Weights for a forward, weights for a backward, and gradients."""
    sharding, size = plan.sharding, ELEMENT_BYTES[costs.job.train.precision]
    forward = _Round(sharding.weights, size if sharding.gather == "plain" else INT8_BYTES)
    backward = _Round("node", size) if sharding.secondary else forward
    scattered = size if sharding.scatter == "plain" else INT4_BYTES
    return forward, backward, _Round(sharding.gradients, scattered, sharding.relayed)


class _Units(NamedTuple):
    """Of a stage what is split: how many blocks, and which ends of the model."""

    layers: int
    first: bool = False
    last: bool = False


def _units(pipeline: Pipeline, s: int) -> _Units:
    stage = pipeline.stages[s]
    return _Units(stage.num_layers - stage.whole(), s == 0, s + 1 == len(pipeline.stages))


def _gathered_again(stage: Stage) -> _Units:
    """What a forward that runs again leaves when it is done: weights that come in slices."""
    return _Units(stage.recomputed()["full"] - stage.whole("full") if stage.slices > 1 else 0)


def _by_replica(
    stage: Stage, one: _Round, units: _Units, costs: CostModel, known: dict[tuple[object, ...], float]
) -> dict[int, tuple[float, float]]:
    """The part that each replica keeps, and the seconds of passing all these units round once."""
    found = {}
    for circle in circles_of(stage, one.level, costs):
        replicas = tuple(stage.replicas[member] for member in circle.members)
        names = tuple((replica.node, replica.tp, _group(replica, costs)) for replica in replicas)
        key = (names, min(circle.parts), units, stage.slices, one.element_bytes)
        if key not in known:
            slicing = slicing_of(stage)
            known[key] = _round_s(replicas, min(circle.parts), units, slicing, one.element_bytes, costs)
        for member, part in zip(circle.members, circle.parts, strict=True):
            found[member] = (part, known[key])
    return found


def _group(replica: Replica, costs: CostModel) -> int | None:
    return device_group(replica, lambda node: costs.node(node).device_group)


def _round_s(
    replicas: tuple[Replica, ...], least: float, units: _Units, slicing: Slicing, size: float, costs: CostModel
) -> float:
    """Each portion of each unit by itself, the parts from hand to hand: everybody sends all of them but one."""
    count = len(replicas)
    if count < 2:
        return 0.0
    members = frozenset((replica.node, replica.tp) for replica in replicas)
    # As if there were fewer bytes, where the circle has faster links or uneven parts than the exchange is made for.
    scale = (1 - least) / (1 - 1 / count) / _faster(replicas, costs)
    empty_s = costs.half_exchange_s(members, count, 0.0)
    return sum(
        times
        * (
            costs.half_exchange_s(members, count, elements * size * scale)
            + num_slices(costs.job.model, unit, slicing) * empty_s
        )
        for unit, elements, times in _counted(units, costs)
    )


def _faster(replicas: tuple[Replica, ...], costs: CostModel) -> float:
    """How many times faster than other links of the node those within the circle's device group are."""
    places = {(replica.node, _group(replica, costs)) for replica in replicas}
    node_id, group = next(iter(places))
    node = costs.node(node_id)
    if len(places) > 1 or group is None or node.group_bytes_per_s is None:
        return 1.0
    return max(1.0, node.group_bytes_per_s / costs.link(node_id, node_id).bytes_per_s)


def _counted(units: _Units, costs: CostModel) -> Iterator[tuple[int, int, int]]:
    """A unit, its elements, and how many such units there are."""
    model, (layers, first, last) = costs.job.model, units
    if layers:
        yield 1, unit_elements(model, 1, 1), layers
    if first or (last and model.tie_embeddings):  # where it is both, once for each of them
        yield 0, unit_elements(model, 0, 1), first + (last and model.tie_embeddings)
    if last:
        yield model.layers + 1, unit_elements(model, model.layers + 1, 1), 1


def carried_bytes(plan: Plan, costs: CostModel) -> dict[str, float]:
    """By node, what leaves it in a step when parts are passed round: once for all its members of a circle."""
    found: Counter[str] = Counter()
    forward, backward, scatter = _rounds(plan, costs)
    levels = {forward.level, backward.level, scatter.level}
    for pipeline in plan.pipelines if shares_inside(plan) else ():
        for s, stage in enumerate(pipeline.stages):
            units, ran_again = _units(pipeline, s), _gathered_again(stage)
            found_at = {level: circles_of(stage, level, costs) for level in levels}
            for one, passed in ((forward, units), (backward, units), (backward, ran_again), (scatter, units)):
                elements = sum(count * times for _, count, times in _counted(passed, costs))
                for circle in found_at[one.level] if elements else ():
                    nodes = {stage.replicas[member].node for member in circle.members}
                    if costs.are_apart(nodes):
                        kept = 1 / len(nodes) if one.hops else min(circle.parts)
                        moved = pipeline.micro_batches * elements * one.element_bytes * (1 - kept)
                        found.update({node: moved for node in nodes})
    return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a kind of state lies in the circles of a plan: by replica the number of its circle, and its part. What is
    `owned` is split in layers that are whole, too."""

    circle: Mapping[Place, int]
    part: Mapping[Place, float]
    owned: bool = False


def exchanged_at(plan: Plan, level: Level, costs: CostModel) -> Split | None:
    """None: each replica has all of it, and so have all that is exchanged."""
    return _split_at(plan, level, costs) if level != "none" or shares_inside(plan) else None


def _split_at(plan: Plan, level: Level, costs: CostModel, *, owned: bool = False) -> Split:
    number: dict[Place, int] = {}
    part: dict[Place, float] = {}
    count = 0
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for circle in circles_of(stage, level, costs):
                for member, its in zip(circle.members, circle.parts, strict=True):
                    number[p, s, member], part[p, s, member] = count, its
                count += 1
    return Split(circle=number, part=part, owned=owned)


def optimizer_split(plan: Plan, costs: CostModel) -> Split | None:
    """Of optimizer state, where circles split it; None: each replica has all of it, or all holders of a weight do."""
    level = plan.sharding.optimizer
    return None if level in ("none", "cluster") else _split_at(plan, level, costs, owned=True)
