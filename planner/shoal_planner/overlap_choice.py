"""Which exchanges of a plan go on beside computing: those for which that makes the predicted step shorter.

Owns the choice for a plan whose devices and layers stand. Plans are searched for, and proven, with what passes between
stages received ahead, and as if nothing else overlapped.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_planner.overlap import AHEAD, NOTHING, Overlap
from shoal_planner.plan import Plan
from shoal_planner.score import score_with, step_s

CHUNKS = (2, 4, 8)
# Less is within what a prediction is wrong by, and overlapping has costs that no model knows.
_SURELY = 1 - 1e-3
_LEAST = 0.002  # of a step

_Change = Callable[[Overlap], Overlap]


def received_ahead(plan: Plan, job: JobSpec) -> Plan:
    """With what passes between stages received ahead of its use, if there is any and the job lets it: by the model that
    is never slower, and the memory for it is counted anyway."""
    has_stages = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    if job.train.overlap == "none" or plan.overlap != NOTHING or not has_stages:
        return plan
    return dataclasses.replace(plan, overlap=AHEAD, prediction=None)


def with_overlap(plan: Plan, costs: CostModel) -> Plan:
    """A plan that was scored as the search does, with what else the job allows and what pays; else as it is."""
    assert plan.prediction is not None and plan.overlap in (NOTHING, AHEAD)
    if costs.job.train.overlap == "none":
        return plan
    best = plan
    for way in _ways(plan, chunks=costs.job.model.module is None):
        for change in way:
            found = _scored(best, costs, change(best.overlap))
            if found is None or step_s(found) >= _SURELY * step_s(best):
                break  # where a few chunks do not pay, more do not either
            best = found
    return best


def with_like_overlap(plan: Plan, costs: CostModel, overlap: Overlap) -> Plan:
    """A plan that was scored as the search does, for one that runs with this: the same as far as it is for this plan,
    in one look."""
    assert plan.prediction is not None and plan.overlap in (NOTHING, AHEAD)
    if costs.job.train.overlap == "none":
        return plan
    found = overlapping(plan, costs, dataclasses.replace(overlap, stages=plan.overlap.stages))
    return found if step_s(found) <= step_s(plan) else plan


def overlapping(plan: Plan, costs: CostModel, overlap: Overlap) -> Plan:
    """A plan that was scored, with just this; as it is where that is not for it."""
    return plan if overlap == plan.overlap else _scored(plan, costs, overlap) or plan


def _ways(plan: Plan, *, chunks: bool) -> Iterator[tuple[_Change, ...]]:
    """One of each is taken at most. Where there is next to nothing to overlap nothing is tried;
    `chunks`: whether products may come in chunks."""
    assert plan.prediction is not None
    if plan.sharding.weights != "none" or plan.sharding.gradients != "none":
        yield (lambda overlap: dataclasses.replace(overlap, shards=True),)
    terms, least_s = plan.prediction.terms, _LEAST * plan.prediction.step_s
    if chunks and terms.tensor_s > least_s and any(replica.tp > 1 for replica in plan.replicas()):
        yield tuple(partial(_in_chunks, count) for count in CHUNKS)
    if terms.gradient_s > least_s and _may_sum(plan):
        yield (_with_gradients,)


def with_sums(plan: Plan, costs: CostModel) -> Plan:
    """A plan that was scored, with sums of gradients beside its backward where that surely pays; else as it is."""
    found = _scored(plan, costs, _with_gradients(plan.overlap)) if _may_sum(plan) else None
    return plan if found is None or step_s(found) >= _SURELY * step_s(plan) else found


def _with_gradients(overlap: Overlap) -> Overlap:
    return dataclasses.replace(overlap, gradients=True)


def _may_sum(plan: Plan) -> bool:
    """Whether its gradients may be summed beside its backward. Where pipelines are cut at different layers, stages that
    sum in the order of a backward wait for each other."""
    alike = len({tuple(stage.layers for stage in pipeline.stages) for pipeline in plan.pipelines}) == 1
    sums_whole = plan.sharding.gradients == "none" and plan.schedule != "interleaved"
    return plan.num_devices > 1 and sums_whole and alike and not _sums_on_nodes(plan)


def _sums_on_nodes(plan: Plan) -> bool:
    """Whether replicas of a node add up among themselves before they do with others: in rounds, for which a backward
    would wait, and which spare networks more than overlapping hides."""
    for stages in zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True):
        on_node = Counter(replica.node for stage in stages for replica in stage.replicas)
        if plan.exchanges_whole and len(on_node) > 1 and max(on_node.values()) > 1:
            return True
    return False


def _in_chunks(chunks: int, overlap: Overlap) -> Overlap:
    return dataclasses.replace(overlap, tensor_chunks=chunks)


def _scored(plan: Plan, costs: CostModel, overlap: Overlap) -> Plan | None:
    try:
        return score_with(dataclasses.replace(plan, overlap=overlap, prediction=None), costs)
    except InvalidField:  # its groups name collectives
        return None
