"""Which node holds how much of the optimizer state under a plan.

Owns the counting by node. Does not own which element lies where (`shard_map` of the recovery) nor what it takes of a
device's memory (`memory`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shoal_planner.job import JobSpec
from shoal_planner.parameters import parameters, stage_units
from shoal_planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeld:
    """`owned` are elements of optimizer state by node id. `live_copies` is on how many *other* nodes the plan itself
    holds every element; `shared` are the sets of nodes that hold a unit alike, where it does."""

    owned: tuple[tuple[str, float], ...]
    live_copies: int = 0
    shared: tuple[frozenset[str], ...] = ()

    def sharers(self, node_id: str) -> frozenset[str]:
        """The nodes of which one must live so that nothing that this one holds is lost: itself, where units are split,
        else the smallest set that holds one of its units."""
        sets = [nodes for nodes in self.shared if node_id in nodes]
        return min(sets, key=lambda nodes: (len(nodes), sorted(nodes)), default=frozenset((node_id,)))


def state_held(plan: Plan, job: JobSpec) -> StateHeld:
    """Elements by node. Holders of a unit split its state by their shares, unless it is not sharded at all."""
    holders: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for unit in stage_units(plan, p, s):
                holders[unit].extend((replica.node, replica.state_share) for replica in stage.replicas)
    elements: defaultdict[int, int] = defaultdict(int)
    for parameter in parameters(job.model):
        elements[parameter.units[0]] += parameter.numel
    whole = plan.sharding.optimizer == "none"
    owned: defaultdict[str, float] = defaultdict(float)
    for unit, entries in holders.items():
        total = sum(share for _, share in entries)
        for node_id, share in entries:
            owned[node_id] += elements[unit] * (1.0 if whole else share / total)
    shared = {frozenset(node_id for node_id, _ in entries) for entries in holders.values()} if whole else set()
    return StateHeld(
        owned=tuple(sorted(owned.items())),
        live_copies=min((len(nodes) for nodes in shared), default=1) - 1,
        shared=tuple(sorted(shared, key=sorted)),
    )
