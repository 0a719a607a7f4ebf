"""Sentences about plans: why this one, what is left unused and why, and why none fits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import assert_never

from shoal_planner.algorithms import DIRECT
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.errors import HostTooSmall, NoPlanFits
from shoal_planner.groups import group_text
from shoal_planner.memory import held_elements, part_elements, snapshot_bytes, stage_memory, usable_bytes
from shoal_planner.options import usable_nodes
from shoal_planner.overlap import NOTHING, overlap_text
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Level, Pipeline, Plan, Recompute, Sharding, Stage
from shoal_planner.score import sizes

_MANY_KINDS = 5  # of pipelines, which a line has room for
_FEW = 4  # pipelines, all of which a sentence has room for
_AS_GOOD = 0.0005  # a difference that would show as 0.0 %


def describe(plan: Plan, snapshot: ClusterSnapshot) -> str:
    """The structure in one line: "2 x [12 on A100-80G tp2 | 12 in 3 stages on T4] 8 x 4": pipelines, their layers and
    devices, micro-batches and their samples."""
    found = Counter(_texts(plan, snapshot))
    named = [text if count == 1 else f"{count} x {text}" for text, count in found.items()]
    rest = len(plan.pipelines) - sum(list(found.values())[:_MANY_KINDS])
    text = " + ".join(named[:_MANY_KINDS]) + (f" + {rest} more pipelines" if rest else "") + shared(plan.sharding)
    return text + ("" if plan.schedule == "1f1b" else f", {schedule_text(plan)}")


def shared(sharding: Sharding) -> str:
    """As in ", weights and gradients split by node"; empty where every replica has them whole."""
    names: dict[Level, list[str]] = {}
    for name, level in (("weights", sharding.weights), ("gradients", sharding.gradients)):
        if level != "none":
            names.setdefault(level, []).append(name)
    among = {"group": "device group", "node": "node", "cluster": "stage"}
    return "".join(f", {' and '.join(found)} split by {among[level]}" for level, found in names.items())


def shape(plan: Plan, snapshot: ClusterSnapshot) -> tuple[str, ...]:
    """Equal for plans that differ only in which of equal devices does what, and in which of neighbours on such devices
    holds which layers."""
    return (*sorted(_texts(plan, snapshot)), shared(plan.sharding), plan.schedule)


def schedule_text(plan: Plan) -> str:
    """As in "1F1B", "zero bubble" or "interleaved (3 chunks a stage)"."""
    match plan.schedule:
        case "1f1b":
            return "1F1B"
        case "zero_bubble":
            return "zero bubble"
        case "interleaved":
            counts = sorted({pipeline.num_chunks for pipeline in plan.pipelines})
            chunks = " or ".join(map(str, counts)) + (" chunk" if counts == [1] else " chunks")
            return f"interleaved ({chunks} a stage)"
        case _:
            assert_never(plan.schedule)


def _texts(plan: Plan, snapshot: ClusterSnapshot) -> list[str]:
    types = {node.id: node.device_label for node in snapshot.nodes}
    return [_describe_pipeline(pipeline, types) for pipeline in plan.pipelines]


def _describe_pipeline(pipeline: Pipeline, types: Mapping[str, str]) -> str:
    stages = [(_holders(stage, types), stage.num_layers) for stage in pipeline.stages]
    runs = []
    for holders, run in itertools.groupby(stages, key=lambda entry: entry[0]):
        layers = [count for _, count in run]
        runs.append(f"{sum(layers)}{f' in {len(layers)} stages' if len(layers) > 1 else ''} on {holders}")
    return f"[{' | '.join(runs)}] {pipeline.micro_batches} x {pipeline.micro_batch}"


def _holders(stage: Stage, types: Mapping[str, str]) -> str:
    replicas = Counter(
        types[replica.node] + (f" tp{replica.tp}" if replica.tp > 1 else "") + ("" if replica.samples else " for state")
        for replica in stage.replicas
    )
    devices = ", ".join(name if count == 1 else f"{count} {name}" for name, count in replicas.items())
    return f"{devices}{_recomputed(stage)}"


def _recomputed(stage: Stage) -> str:
    """As in " (recompute full)" or " (recompute selective in 3)"."""
    layers = stage.num_layers
    parts = [
        f"recompute {kind}" + ("" if count == layers else f" in {count}")
        for kind, count in stage.recomputed().items()
        if kind != "none" and count
    ]
    parts += [f"in {stage.slices} slices"] if stage.slices > 1 else []
    parts += [f"optimizer of {stage.offloaded()} on the host"] if stage.offloaded() else []
    return f" ({', '.join(parts)})" if parts else ""


def reason(plan: Plan, costs: CostModel, others: list[Plan]) -> str:
    """Why this plan, in sentences for the user."""
    assert plan.prediction is not None
    stages = [len(pipeline.stages) for pipeline in plan.pipelines]
    shape = f"{len(stages)} pipelines" if len(stages) > 1 else "one pipeline"
    depth = _depths(stages)
    parts = [f"{shape} {depth} {'take' if len(stages) > 1 else 'takes'} {plan.prediction.step_s:.3g} s a step"]
    parts.append(_gained(plan, others))
    parts.append(_compared(plan, costs, others))
    parts.append(_why_stages(plan, costs))
    parts.append(_why_slices(plan))
    if plan.groups:
        parts.append(_why_groups(plan))
    if plan.overlap != NOTHING:
        parts.append(f"beside computing go on {overlap_text(plan.overlap)}")
    if plan.unused:
        parts.append(_why_unused(plan, costs))
    text = "; ".join(part for part in parts if part)
    return text[0].upper() + text[1:] + "."


def _why_slices(plan: Plan) -> str:
    counts = sorted({stage.slices for pipeline in plan.pipelines for stage in pipeline.stages} - {1})
    if not counts:
        return ""
    names = [name for name in ("weights", "gradients") if getattr(plan.sharding, name) != "none"]
    slices = " or ".join(map(str, counts))
    return f"{' and '.join(names)} come together in {slices} slices of a unit, as whole units leave too little memory"


def _why_groups(plan: Plan) -> str:
    named = [group_text(group, plan.num_layers) for group in plan.groups if group.collective != DIRECT]
    return f"gradients are not added up directly where that takes longer ({_some(named)})"


def _gained(plan: Plan, others: list[Plan]) -> str:
    """What another schedule than 1F1B brings over the best plan with 1F1B."""
    if plan.schedule == "1f1b":
        return ""
    assert plan.prediction is not None
    plain = [other.prediction.step_s for other in others if other.schedule == "1f1b" and other.prediction is not None]
    text = f"stages take turns by the schedule {schedule_text(plan)}"
    if not plain:
        return text
    gain = min(plain) / plan.prediction.step_s - 1
    if abs(gain) < _AS_GOOD:
        return f"{text}, as fast as the best plan found with 1F1B"
    return f"{text}, {abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than the best plan found with 1F1B"


def _compared(plan: Plan, costs: CostModel, others: list[Plan]) -> str:
    """With the best of the others that differs in more than which of equal devices does what."""
    assert plan.prediction is not None
    for other in others:
        if other.prediction is None or shape(other, costs.snapshot) == shape(plan, costs.snapshot):
            continue
        behind = other.prediction.step_s / plan.prediction.step_s - 1
        text = describe(other, costs.snapshot)
        if abs(behind) < _AS_GOOD:
            return f"{text} would do as well"
        if behind > 0:
            return f"the next best, {text}, takes {behind:.1%} longer"
        return f"{text} is predicted {-behind:.1%} faster, too little to prefer it"
    return ""


def _depths(stages: list[int]) -> str:
    least, most = min(stages), max(stages)
    if least == most:
        return f"of {most} stage{'s' if most > 1 else ''}"
    if len(stages) > _FEW:
        return f"of {least} to {most} stages"
    return "of " + ", ".join(map(str, stages[:-1])) + f" and {stages[-1]} stages"


def _why_stages(plan: Plan, costs: CostModel) -> str:
    """Devices that cannot hold the whole model, where the plan has more than one stage."""
    whole_bytes = _stage_bytes(costs, costs.job.model.layers, embedding=True, head=True)
    small = sorted(
        {
            costs.device(replica.node).name
            for pipeline in plan.pipelines
            if len(pipeline.stages) > 1
            for stage in pipeline.stages
            for replica in stage.replicas
            if whole_bytes > replica.tp * usable_bytes(costs.device(replica.node))
        }
    )
    return f"{', '.join(small)} cannot hold the whole model alone, so such devices share it in stages" if small else ""


def _why_unused(plan: Plan, costs: CostModel) -> str:
    allowed = {node.id for node in usable_nodes(costs.job, costs.snapshot)}
    excluded = [name for name in plan.unused if name.rsplit(":", 1)[0] not in allowed]
    idle = [name for name in plan.unused if name not in excluded]
    sentences = []
    if excluded:
        sentences.append(f"{_some(excluded)} stay unused as limits.device_types leaves them out")
    if idle:
        sentences.append(f"{_some(idle)} stay unused: every plan tried that uses them is slower or does not fit")
    return "; ".join(sentences)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def no_plan_fits(costs: CostModel, refusal: NoPlanFits | None) -> NoPlanFits:
    """Why a search found nothing. `refusal` is what ruled out the last plan whose devices would have sufficed."""
    return NoPlanFits(_memory_constraint(costs)) if refusal is None else refusal


def plain_constraint(costs: CostModel, copies: int) -> None:
    """Raises NoPlanFits for what rules out all plans and shows without a search."""
    job, snapshot = costs.job, costs.snapshot
    nodes = usable_nodes(job, snapshot)
    if not nodes:
        if not snapshot.nodes:
            raise NoPlanFits("the cluster has no nodes")
        found = ", ".join(sorted({node.device for node in snapshot.nodes}))
        raise NoPlanFits(f"limits.device_types allows {', '.join(job.limits.device_types)}; the cluster has {found}")
    devices, least = sum(node.devices for node in nodes), job.limits.min_devices
    if devices < least:
        raise NoPlanFits(f"limits.min_devices is {least}; the cluster has {devices} devices that the job may use")
    host_bytes = sum(node.host_memory_bytes for node in snapshot.nodes)  # copies may stand where the job may not run
    state_bytes = snapshot_bytes(num_parameters(job.model) * (1 + copies))
    if state_bytes > host_bytes:
        need, have = sizes(state_bytes, host_bytes)
        raise HostTooSmall(f"snapshots of the model need {need} of host memory; all nodes together have {have}")


def _memory_constraint(costs: CostModel) -> str:
    """What an even share of the model needs, cut over as many devices as can take part, one sample at a time: on the
    largest device if even that is too small, else on the smallest. With the optimizer state of all its layers on hosts,
    unless the job does not want that."""
    model, hosts = costs.job.model, costs.job.train.sharding != "none"
    nodes = sorted(usable_nodes(costs.job, costs.snapshot), key=lambda node: -costs.device(node.id).memory_bytes)
    stages = min(sum(node.devices for node in nodes), model.layers)
    for node in nodes:
        device = costs.device(node.id)
        need_bytes = _share_bytes(costs, stages, hosts=hosts) + device.memory_bytes - usable_bytes(device)
        if need_bytes > device.memory_bytes:
            need, have = sizes(need_bytes, device.memory_bytes)
            even_so = ", even with optimizer state on its host" if hosts else ""
            return f"needs {need} on {node.id}, which has {have}{even_so}"
    largest = nodes[0]
    device = costs.device(largest.id)
    head_bytes = _stage_bytes(costs, 0, embedding=False, head=True) + device.memory_bytes - usable_bytes(device)
    if head_bytes > device.memory_bytes:
        need, have = sizes(head_bytes, device.memory_bytes)
        return f"the head alone needs {need} on {largest.id}, which has {have}"
    return "every device could hold an even share of the layers, but no split fits them with the ends of the model too"


def _share_bytes(costs: CostModel, stages: int, *, hosts: bool) -> float:
    layers, whole = -(-costs.job.model.layers // stages), stages == 1
    return _stage_bytes(costs, layers, embedding=whole, head=whole, hosts=hosts)


def _stage_bytes(costs: CostModel, layers: int, *, embedding: bool, head: bool, hosts: bool = False) -> float:
    """What a device alone in its stage needs at least, one sample at a time, as the only pipeline."""
    model, train = costs.job.model, costs.job.train
    kinds: tuple[Recompute, ...] = ("none",) if train.recompute == "none" else ("none", "full")
    return min(
        stage_memory(
            model,
            train.seq_len,
            train.precision,
            tp=1,
            samples=1,
            in_flight=1,
            layers={kind: layers},
            embedding=embedding,
            head=head,
            owned=held_elements(model, 1, layers, embedding=embedding, head=head),
            offloaded=layers * part_elements(model, "block", 1) if hosts else 0,
        ).total
        for kind in kinds
    )
