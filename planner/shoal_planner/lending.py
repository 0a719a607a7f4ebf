"""Devices that a plan leaves out hold state for its stages that lack memory (Hetis's idle devices).

Owns which device helps which stage. How much of the state each then owns follows from free memory (`relief`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from shoal_planner.costs import CostModel
from shoal_planner.loads import replica_loads, segments
from shoal_planner.memory import stage_memory, usable_bytes
from shoal_planner.options import usable_nodes
from shoal_planner.plan import Pipeline, Plan, Replica
from shoal_planner.relief import Where, shared_by_room
from shoal_planner.score import unused

_MOST = 64  # devices that are lent


def lent(plan: Plan, costs: CostModel) -> Plan | None:
    """The plan with idle devices as holders of state, each where most is lacking of where it can help; none where
    nothing is lacking, or nobody can help."""
    lacking: dict[Where, float] = {}
    for load in replica_loads(plan, costs, segments(plan, costs)):
        over = (load.memory.total - usable_bytes(costs.device(load.replica.node))) * load.replica.tp
        if over > 0:
            lacking[load.pipeline, load.stage] = lacking.get((load.pipeline, load.stage), 0.0) + over
    if plan.sharding.optimizer == "none":
        return None
    helpers: dict[Where, list[Replica]] = defaultdict(list)
    for holder in _idle(plan, costs)[:_MOST]:
        room = {where: _room(holder, plan.pipelines[where[0]], where[1], costs) for where in lacking}
        useful = [where for where in lacking if lacking[where] > 0 and room[where] > 0]
        if useful:
            chosen = max(useful, key=lambda where: (lacking[where], where))
            helpers[chosen].append(holder)
            lacking[chosen] -= room[chosen]
    if not helpers:
        return None
    pipelines = (
        dataclasses.replace(
            pipeline,
            stages=tuple(
                dataclasses.replace(stage, replicas=(*stage.replicas, *helpers[p, s]))
                for s, stage in enumerate(pipeline.stages)
            ),
        )
        for p, pipeline in enumerate(plan.pipelines)
    )
    changed = dataclasses.replace(plan, pipelines=tuple(pipelines), prediction=None, unused=(), reason="")
    return shared_by_room(changed, costs)


def _idle(plan: Plan, costs: CostModel) -> list[Replica]:
    """Those that update what they own soonest first."""
    allowed = {node.id for node in usable_nodes(costs.job, costs.snapshot)}
    places = (name.rpartition(":") for name in unused(plan, costs.snapshot))
    idle = [Replica(node=node, devices=(int(index),), samples=0) for node, _, index in places if node in allowed]
    return sorted(idle, key=lambda holder: costs.update_s(holder.node, 1.0))


def _room(holder: Replica, pipeline: Pipeline, s: int, costs: CostModel) -> float:
    """What of the optimizer's state the device can own beside the weights and gradients of the stage."""
    train, stage = costs.job.train, pipeline.stages[s]
    needed = stage_memory(
        costs.job.model,
        train.seq_len,
        train.precision,
        tp=1,
        samples=0,
        in_flight=1,
        layers={"none": stage.num_layers},
        embedding=s == 0,
        head=s + 1 == len(pipeline.stages),
        owned=0.0,
    )
    return usable_bytes(costs.device(holder.node)) - needed.total
