"""How long each device computes in a step of a plan, which is what a device that is slow can be told by.

Owns the sum alone. What it waits for, and what passes between devices, is in `predict` and `simulate`.
"""

from __future__ import annotations

from shoal_planner.cluster import DeviceRef
from shoal_planner.costs import CostModel
from shoal_planner.loads import replica_loads, segments
from shoal_planner.plan import Plan


def busy_s(plan: Plan, costs: CostModel) -> dict[DeviceRef, float]:
    """Seconds of forwards, backwards and the update, with exchanges within a tensor-parallel replica. Raises KeyError
    for a node that the cluster lacks."""
    found: dict[DeviceRef, float] = {}
    for load in replica_loads(plan, costs, segments(plan, costs)):
        times = plan.pipelines[load.pipeline].micro_batches
        seconds = times * load.time.total_s + costs.update_s(load.replica.node, load.owned, load.offloaded)
        found |= dict.fromkeys(load.replica.refs(), seconds)
    return found
