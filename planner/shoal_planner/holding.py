"""Which node's snapshots hold how much of the optimizer state under a plan.

Owns the counting by node. Does not own which element lies where (`shard_map` of the recovery) nor what it takes of a
device's memory (`memory`).
"""

from __future__ import annotations

from collections import defaultdict

from shoal_planner.job import JobSpec
from shoal_planner.parameters import parameters, stage_units
from shoal_planner.plan import Plan


def state_held(plan: Plan, job: JobSpec) -> dict[str, float]:
    """Elements by node id. Of each element one rank takes the snapshot, even where all holders of a unit have all its
    state: they share that out as they would share the state. What others have in their memory is no copy of it, as it
    serves nobody but their own processes."""
    holders: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for unit in stage_units(plan, p, s):
                holders[unit].extend((replica.node, replica.state_share) for replica in stage.replicas)
    elements: defaultdict[int, int] = defaultdict(int)
    for parameter in parameters(job.model):
        elements[parameter.units[0]] += parameter.numel
    owned: defaultdict[str, float] = defaultdict(float)
    for unit, entries in holders.items():
        total = sum(share for _, share in entries)
        for node_id, share in entries:
            owned[node_id] += elements[unit] * share / total
    return dict(sorted(owned.items()))
