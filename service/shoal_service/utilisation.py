"""How much of what devices could compute the model's own operations take, of a job and of each of its nodes, and how
full their memory is. From plans and measured steps; nothing is asked of nodes. Pure."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_planner.answers import plan_of_answer
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.compute import backward_factor, matmul_flops
from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec, parse_job
from shoal_planner.memory import usable_bytes
from shoal_planner.plan import Pipeline, Plan
from shoal_planner.profile import Part
from shoal_service.timeline import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """`mfu`: which share of the peak of the node's devices at work the model's operations are (None: no step is
    measured); `memory`: how full the fullest of them is predicted to be, of what a plan may use (None: not told)."""

    mfu: float | None
    memory: float | None


def mfu_per_rate(plans: Sequence[Event]) -> dict[int, float]:
    """By epoch, which share of the peak of its devices one token per second is; none of a plan without a prediction."""
    found = {}
    for event in plans:
        said = event.payload["plan"].get("predicted") or {}
        if said.get("tokens_per_s") and said.get("mfu"):
            found[int(event.payload["epoch"])] = float(said["mfu"]) / float(said["tokens_per_s"])
    return found


def in_percent(share: float) -> str:
    """Also of what is next to nothing: 41 %, 0.032 %."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def node_uses(spec: Mapping[str, Any], adopted: Mapping[str, Any], step_s: float | None) -> dict[str, NodeUse]:
    """By node of an adopted plan (the payload of its journal entry), with steps of `step_s`. Empty where this version
    cannot read the plan."""
    try:
        rates, memory = _rates(*(json.dumps(value) for value in (spec, adopted["plan"], adopted["snapshot"])))
    except (InvalidField, KeyError):
        return {}
    return {
        node: NodeUse(mfu=rate / step_s if step_s else None, memory=memory.get(node)) for node, rate in rates.items()
    }


@functools.lru_cache(maxsize=32)
def _rates(spec: str, plan_text: str, snapshot: str) -> tuple[dict[str, float], dict[str, float]]:
    """By node: the seconds that the model's operations in a step would take at the peak of its devices, and how full
    the fullest of these is."""
    job, plan, cluster = parse_job(json.loads(spec)), *_read(plan_text, snapshot)
    types = {node.id: device_type(node.device, cluster.overrides) for node in cluster.nodes}
    flops: defaultdict[str, float] = defaultdict(float)
    peak: defaultdict[str, float] = defaultdict(float)
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            of_sample = _stage_flops(job.model, pipeline, number, job.train.seq_len) * pipeline.micro_batches
            for replica in stage.replicas:
                flops[replica.node] += of_sample * replica.samples
                peak[replica.node] += types[replica.node].flops_per_s(job.train.precision) * replica.tp
    memory: dict[str, float] = {}
    for name, used in plan.prediction.memory_bytes if plan.prediction else ():
        node = name.rpartition(":")[0]
        memory[node] = max(memory.get(node, 0.0), used / (usable_bytes(types[node]) or 1.0))
    return {node: count / peak[node] for node, count in flops.items()}, memory


def _read(plan_text: str, snapshot: str) -> tuple[Plan, Any]:
    return plan_of_answer(json.loads(plan_text)), snapshot_from_mapping(json.loads(snapshot))


def _stage_flops(model: ModelSpec, pipeline: Pipeline, number: int, seq_len: int) -> float:
    """Of a stage for one sample, forward and backward, without recomputation: what `mfu` counts."""
    blocks = sum(last - first for first, last in pipeline.stages[number].layers)
    parts: list[tuple[Part, int]] = [("block", blocks)]
    if number == len(pipeline.stages) - 1:
        parts.append(("head", 1))
    return sum(
        count * matmul_flops(model, part, seq_len) * (1 + backward_factor(model, part, seq_len))
        for part, count in parts
    )
