"""Which node's snapshots hold how much of the optimizer state under a plan, and how much of it is sent to others.

Owns the counting by node. Does not own which element lies where (`shard_map` of the recovery) nor what it takes of a
device's memory (`memory`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal_planner.cluster import Node
from shoal_planner.job import JobSpec
from shoal_planner.memory import snapshot_bytes
from shoal_planner.parameters import parameters, stage_units
from shoal_planner.placement import Placement, placements
from shoal_planner.plan import Plan

Units = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """State of so many elements that `home` takes snapshots of; ranks of the `owners`, other nodes, have it too."""

    home: str
    elements: float
    owners: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Keeping:
    """Of one node, the elements of which it keeps snapshots, by why: its ranks vouch for them, they own them and mirror
    what others vouch for, or they are copies that it received; and how many it sends, once for each copy."""

    vouched: float = 0.0
    mirrored: float = 0.0
    received: float = 0.0
    sent: float = 0.0

    @property
    def kept(self) -> float:
        return self.vouched + self.mirrored + self.received


def placed(held: Sequence[Held], nodes: tuple[Node, ...], copies: int) -> tuple[Placement, dict[str, Keeping]]:
    """Where copies of this state stand, and what each node keeps then: the best placement that all hosts have room
    for."""
    for found in placements(nodes, copies, shared=any(some.owners for some in held)):
        kept = keeping(held, found)
        if all(snapshot_bytes(kept[node.id].kept) <= node.host_memory_bytes for node in nodes if node.id in kept):
            break
    return found, kept


def keeping(some: Iterable[Held], placement: Placement) -> dict[str, Keeping]:
    """By node; those that keep nothing are left out."""
    found: defaultdict[str, Keeping] = defaultdict(Keeping)
    for held in some:
        copies = placement.copies(held.home, held.owners)
        found[held.home].vouched += held.elements
        found[held.home].sent += held.elements * len(copies.sent)
        for node in copies.live:
            found[node].mirrored += held.elements
        for node in copies.sent:
            found[node].received += held.elements
    return dict(found)


def held_state(plan: Plan, job: JobSpec) -> tuple[Held, ...]:
    """By who holds it. Of each element one rank vouches, even where all holders of a unit have all its state: they
    share that out as they would share the state. What is not split beyond nodes lies whole on every node that holds its
    unit."""
    elements = _elements(job)
    found: defaultdict[tuple[str, frozenset[str]], float] = defaultdict(float)
    holders = _holders(plan, elements)
    for units, count in elements.items():
        entries = holders[units]
        total = sum(share for _, share in entries)
        nodes = frozenset(node_id for node_id, _ in entries)
        for node_id, share in entries:
            owners = frozenset() if plan.sharding.optimizer == "cluster" else nodes - {node_id}
            found[node_id, owners] += count * share / total
    return tuple(
        Held(home=home, elements=count, owners=owners)
        for (home, owners), count in sorted(found.items(), key=lambda entry: (entry[0][0], sorted(entry[0][1])))
    )


def state_held(plan: Plan, job: JobSpec) -> dict[str, float]:
    """Elements by the node that takes snapshots of them."""
    owned: defaultdict[str, float] = defaultdict(float)
    for held in held_state(plan, job):
        owned[held.home] += held.elements
    return dict(sorted(owned.items()))


def _holders(plan: Plan, known: Iterable[Units]) -> dict[Units, list[tuple[str, float]]]:
    """By units, the nodes of the replicas that hold any of them, each with its share."""
    tied = [units for units in known if len(units) > 1]
    holders: defaultdict[Units, list[tuple[str, float]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            entries = [(replica.node, replica.state_share) for replica in stage.replicas]
            own = stage_units(plan, p, s)
            for unit in own:
                holders[unit,].extend(entries)
            for units in tied:
                if not set(units).isdisjoint(own):
                    holders[units].extend(entries)
    return holders


def _elements(job: JobSpec) -> dict[Units, int]:
    """By the units whose holders share them: two of a tied embedding."""
    elements: defaultdict[Units, int] = defaultdict(int)
    for parameter in parameters(job.model):
        elements[parameter.units] += parameter.numel
    return elements
