"""Circles: the replicas of a stage that share a device group, a node or just the stage, and so may split its state.

The one place of this rule: the planner counts by it, and `shard_map` turns it into intervals. Circles are replicas of
one stage, because these run in step (docs/adr/0011). Owns who is in which; not what they pass round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.levels import DeviceGroups, Level
from shoal_planner.plan import Plan, Replica, Stage

GroupSize = Callable[[str], int]  # by node, how many of its devices are one device group


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Replicas of a stage that share what each of them would hold, by their place in it, and their parts."""

    members: tuple[int, ...]
    parts: tuple[float, ...]


def circles(stage: Stage, level: Level, group_size: GroupSize) -> tuple[Circle, ...]:
    """Every replica is in one, perhaps alone."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, replica in enumerate(stage.replicas):
        found.setdefault(_key(index, replica, level, group_size), []).append(index)
    return tuple(_circle(stage, members) for members in found.values())


def device_group(replica: Replica, group_size: GroupSize) -> int | None:
    """The device group of its node that all its devices are in."""
    size = group_size(replica.node)
    groups = {device // size for device in replica.devices}
    return groups.pop() if len(groups) == 1 else None


def _key(index: int, replica: Replica, level: Level, group_size: GroupSize) -> tuple[object, ...]:
    match level:
        case "none":
            return ("alone", index)
        case "group":
            group = device_group(replica, group_size)
            return ("alone", index) if group is None else (replica.node, group)
        case "node":
            return (replica.node,)
        case "cluster":
            return ()
        case _:
            assert_never(level)


def _circle(stage: Stage, members: list[int]) -> Circle:
    total = sum(stage.replicas[member].state_share for member in members)
    return Circle(members=tuple(members), parts=tuple(stage.replicas[member].state_share / total for member in members))


def with_device_groups(plan: Plan, snapshot: ClusterSnapshot) -> Plan:
    """The plan, saying itself how large the device groups of its nodes are, where it splits state among them: what
    ranks keep then follows from the plan alone, also when the node is gone. Raises KeyError for an unknown node."""
    sharding = plan.sharding
    found: tuple[DeviceGroups, ...] = ()
    if "group" in (sharding.weights, sharding.gradients, sharding.optimizer):
        nodes = sorted({replica.node for replica in plan.replicas()})
        sizes = ((node, snapshot.node(node).device_group) for node in nodes)
        found = tuple(DeviceGroups(node=node, size=size) for node, size in sizes if size > 1)
    return plan if plan.device_groups == found else dataclasses.replace(plan, device_groups=found)
