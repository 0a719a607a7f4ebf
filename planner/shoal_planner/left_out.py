"""Why devices stay idle: what the plan would take if one of them had to have a part of its work.

Owns the variants of a plan in which one more device takes part: a stage of its own, a share of a micro-batch, a
pipeline of its own, or only state. Each is scored as any plan is; there is no search.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator

from shoal_planner.cluster import DeviceRef
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.explanation import LeftOut, prediction_of
from shoal_planner.group_choice import with_groups
from shoal_planner.kinds import kinds, nodes_by_id
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.score import score_with

MAX_TYPES = 8  # of devices, for which variants are tried
_MAX_KINDS = 4  # of pipelines, into which a device is put
_MAX_VARIANTS = 60
_AS_GOOD = 0.0005


def left_out(plan: Plan, costs: CostModel) -> tuple[LeftOut, ...]:
    """By device type, of a plan that was scored."""
    by_type: dict[str, list[DeviceRef]] = defaultdict(list)
    for name in plan.unused:
        node_id, _, index = name.rpartition(":")
        by_type[costs.node(node_id).device].append(DeviceRef(node=node_id, index=int(index)))
    return tuple(
        _left_out(plan, costs, name, refs, tried=number < MAX_TYPES)
        for number, (name, refs) in enumerate(sorted(by_type.items()))
    )


def _left_out(plan: Plan, costs: CostModel, device_type: str, refs: list[DeviceRef], *, tried: bool) -> LeftOut:
    names, allowed = tuple(map(str, refs)), costs.job.limits.device_types
    if allowed and device_type not in allowed:
        reason = f"limits.device_types allows {', '.join(allowed)} only"
        return LeftOut(device_type=device_type, devices=names, reason=reason)
    if not tried:
        return LeftOut(device_type=device_type, devices=names, reason="no plan with them was better")
    best, how, refusal = _best(plan, costs, refs[0])
    if best is None:
        reason = f"no way to give {refs[0]} a part of the work fits: {refusal}"
        return LeftOut(device_type=device_type, devices=names, reason=reason, problem=refusal)
    step_s = prediction_of(best).step_s
    behind = step_s / prediction_of(plan).step_s - 1
    takes = (
        f"takes {abs(behind):.1%} {'longer' if behind > 0 else 'less'}" if abs(behind) >= _AS_GOOD else "is no faster"
    )
    reason = f"the best part of the work for {refs[0]}, {how}, {takes}"
    return LeftOut(device_type=device_type, devices=names, reason=reason, step_s=step_s, behind=behind)


def _best(plan: Plan, costs: CostModel, device: DeviceRef) -> tuple[Plan | None, str, str]:
    """The fastest variant that fits, its part in words, or why none does."""
    best: Plan | None = None
    best_how, refusal = "", "the plan has no work that could be divided further"
    for how, variant in itertools.islice(variants(plan, costs, device), _MAX_VARIANTS):
        try:
            scored = score_with(variant, costs)
            scored = with_groups(scored, costs) if plan.groups else scored
        except (InvalidField, NoPlanFits) as error:
            refusal = str(error)
            continue
        if best is None or prediction_of(scored).step_s < prediction_of(best).step_s:
            best, best_how = scored, how
    return best, best_how, refusal


def variants(plan: Plan, costs: CostModel, device: DeviceRef) -> Iterator[tuple[str, Plan]]:
    """Plans in which this device takes part too, with its part in words; all else stays as it is as far as it can."""
    mine = Replica(node=device.node, devices=(device.index,))
    for kind in kinds(plan, nodes_by_id(costs.snapshot))[:_MAX_KINDS]:
        number = kind.pipelines[0]
        for how, changed in (*_as_stage(kind.first, mine), *_as_replica(kind.first, mine)):
            yield f"{how} of pipeline {number}", _with(plan, number, changed)
        if kind.first.micro_batches > 1:
            fewer = dataclasses.replace(kind.first, micro_batches=kind.first.micro_batches - 1)
            how = f"a pipeline of its own with one micro-batch of pipeline {number}"
            yield how, _with(plan, number, fewer, _alone(plan, mine, kind.first.micro_batch))


def _with(plan: Plan, number: int, *pipelines: Pipeline) -> Plan:
    """The pipeline of this number replaced by the first of these; the others are added."""
    kept = list(plan.pipelines)
    kept[number] = pipelines[0]
    changed = dataclasses.replace(plan, pipelines=(*kept, *pipelines[1:]), groups=())
    return dataclasses.replace(changed, prediction=None, unused=(), reason="")


def _alone(plan: Plan, mine: Replica, samples: int) -> Pipeline:
    stage = Stage(layers=((0, plan.num_layers),), replicas=(mine,))
    return Pipeline(micro_batch=1, micro_batches=samples, stages=(stage,))


def _as_stage(pipeline: Pipeline, mine: Replica) -> Iterator[tuple[str, Pipeline]]:
    """In each place, with one layer of the stage after it; at the end, with the last layer and the head. Stages
    with several chunks of layers are left as they are."""
    if pipeline.num_chunks > 1:
        return
    stages, mine = pipeline.stages, dataclasses.replace(mine, samples=pipeline.micro_batch)
    for place, stage in enumerate(stages):
        alone = place == len(stages) - 1  # the last stage may be left with the head
        if stage.last - stage.first >= (1 if alone else 2):
            made = Stage(layers=((stage.first, stage.first + 1),), replicas=(mine,), recompute=stage.recompute)
            changed = (*stages[:place], made, _cut(stage, stage.first + 1, stage.last), *stages[place + 1 :])
            yield f"a stage of its own before stage {place}", _staged(pipeline, changed)
    last = stages[-1]
    if last.last - last.first >= 2:
        made = Stage(layers=((last.last - 1, last.last),), replicas=(mine,), recompute=last.recompute)
        yield "a last stage of its own", _staged(pipeline, (*stages[:-1], _cut(last, last.first, last.last - 1), made))


def _as_replica(pipeline: Pipeline, mine: Replica) -> Iterator[tuple[str, Pipeline]]:
    """In each stage, with one sample of the replica that has most, or with a share of the state alone."""
    for place, stage in enumerate(pipeline.stages):
        most = max(range(len(stage.replicas)), key=lambda r: stage.replicas[r].samples)
        giver = stage.replicas[most]
        made = [(f"state alone in stage {place}", (*stage.replicas, dataclasses.replace(mine, samples=0)))]
        if giver.samples > 1:
            rest = dataclasses.replace(giver, samples=giver.samples - 1)
            shared = (*stage.replicas[:most], rest, *stage.replicas[most + 1 :], mine)
            made.append((f"one sample of each micro-batch in stage {place}", shared))
        for how, replicas in made:
            changed = dataclasses.replace(stage, replicas=replicas)
            yield how, _staged(pipeline, (*pipeline.stages[:place], changed, *pipeline.stages[place + 1 :]))


def _staged(pipeline: Pipeline, stages: tuple[Stage, ...]) -> Pipeline:
    return dataclasses.replace(pipeline, stages=stages)


def _cut(stage: Stage, first: int, last: int) -> Stage:
    """The stage with these layers alone."""
    overrides = []
    for override in stage.overrides:
        low, high = max(override.layers[0], first), min(override.layers[1], last)
        if low < high:
            overrides.append(dataclasses.replace(override, layers=(low, high)))
    return dataclasses.replace(stage, layers=((first, last),), overrides=tuple(overrides))
