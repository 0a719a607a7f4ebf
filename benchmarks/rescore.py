"""The plain analytic score that the recorded plans of other planners carry, for any Shoal plan.

Owns `profile_model` and `rescore_model` of `planner_cases.json`, and nothing of the planner uses it. Where their words
leave something open, this is what reproduces every recorded score to four digits:

* the embedding moves its output four times (written and read, forward and backward), and keeps it per micro-batch;
* embedding and head are synchronised as the blocks are;
* a hand-over between stages is one flow, of the largest share of the micro-batch that a replica of either end has;
* it goes at network rate even within a node where the stages of the plan split micro-batches over replicas (the form
  `stages` of the file), else at the node's own rate if both ends are on one node.

What the model does not know counts as none: selective recomputation saves nothing and costs nothing, state stays whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.planner_cases import EFFICIENCY, NodeShape, Setting
from shoal_planner.plan import Pipeline, Plan, Replica, Stage

STATE_BYTES = 16
ELEMENT_BYTES = 2
EMBEDDING_BYTES_PER_S = 1e12
EMBEDDING_MOVES = 4
MEMORY_SHARE = 0.95
EMBEDDING = -1  # beside the blocks, which count from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescore:
    """`memory_bytes` is per device (`node:index`), `memory_share` the fullest device's, of all it has."""

    seconds: float
    pipeline_s: float
    sync_s: float
    memory_bytes: tuple[tuple[str, float], ...]
    memory_share: float

    @property
    def fits(self) -> bool:
        return self.memory_share <= MEMORY_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The sizes of a setting's model: operations are those of one sequence, forward."""

    layers: int
    layer_elements: int
    layer_flops: float
    head_flops: float
    vocab_elements: int
    vocab: int
    seq_len: int
    residual_bytes: float

    @classmethod
    def of(cls, setting: Setting) -> Model:
        sizes = setting.model
        seq_len, hidden, vocab = sizes["seq_len"], sizes["hidden"], sizes["vocab"]
        elements = sizes["parameters_per_layer"]
        return cls(
            layers=sizes["layers"],
            layer_elements=elements,
            layer_flops=2.0 * seq_len * elements + 4.0 * seq_len * seq_len * hidden,
            head_flops=2.0 * seq_len * vocab * hidden,
            vocab_elements=vocab * hidden,
            vocab=vocab,
            seq_len=seq_len,
            residual_bytes=float(seq_len * hidden * ELEMENT_BYTES),
        )


def lower_bound_s(setting: Setting) -> float:
    """All operations on all devices at once, without recomputation, communication or bubbles."""
    model = Model.of(setting)
    flops = 3 * (model.layers * model.layer_flops + model.head_flops) * setting.global_batch
    return flops / sum(node.devices * node.flops_per_s * EFFICIENCY for node in setting.nodes)


def rescore(plan: Plan, setting: Setting, *, stages_form: bool = False) -> Rescore:
    """The score of a plan of this setting. `stages_form` says that the plan was recorded in that form, which counts
    only where no stage of it has more than one replica. Raises KeyError for a node that the setting does not have."""
    model, nodes = Model.of(setting), {node.id: node for node in setting.nodes}
    pipeline_s = max(_pipeline_s(pipeline, model, nodes, stages_form) for pipeline in plan.pipelines)
    sync_s = _sync_s(plan, model, nodes)
    memory = tuple(_memory(plan, model))
    share = max(num_bytes / nodes[device.rpartition(":")[0]].memory_bytes for device, num_bytes in memory)
    return Rescore(
        seconds=pipeline_s + sync_s,
        pipeline_s=pipeline_s,
        sync_s=sync_s,
        memory_bytes=memory,
        memory_share=share,
    )


def _pipeline_s(pipeline: Pipeline, model: Model, nodes: dict[str, NodeShape], stages_form: bool) -> float:
    split = stages_form or any(len(stage.replicas) > 1 for stage in pipeline.stages)
    times = []
    for index, stage in enumerate(pipeline.stages):
        ends = (index == 0, index == len(pipeline.stages) - 1)
        seconds = max(_replica_s(stage, replica, ends, model, nodes[replica.node]) for replica in stage.replicas)
        if not ends[1]:
            seconds += 2 * _hand_over_s(stage, pipeline.stages[index + 1], model, nodes, split)
        times.append(seconds)
    return sum(times) + (pipeline.micro_batches - 1) * max(times)


def _replica_s(stage: Stage, replica: Replica, ends: tuple[bool, bool], model: Model, node: NodeShape) -> float:
    """Forward and backward of this replica's share of a micro-batch."""
    again, blocks, tp = stage.recomputed()["full"], num_blocks(stage), replica.tp
    flops = (3 * blocks + again) * model.layer_flops + (3 * model.head_flops if ends[1] else 0.0)
    seconds = replica.samples * flops / (node.flops_per_s * EFFICIENCY * tp)
    ring_s = 2 * (tp - 1) / tp * replica.samples * model.residual_bytes / node.intra_bytes_per_s
    seconds += (4 * blocks + 2 * again) * ring_s
    if ends[0]:
        seconds += EMBEDDING_MOVES * replica.samples * model.residual_bytes / EMBEDDING_BYTES_PER_S
    return seconds


def num_blocks(stage: Stage) -> int:
    return sum(last - first for first, last in stage.layers)


def _hand_over_s(here: Stage, there: Stage, model: Model, nodes: dict[str, NodeShape], split: bool) -> float:
    ends = [nodes[replica.node] for replica in (*here.replicas, *there.replicas)]
    samples = max(replica.samples for replica in (*here.replicas, *there.replicas))
    near = not split and len({node.id for node in ends}) == 1
    rate = min(node.intra_bytes_per_s if near else node.inter_bytes_per_s for node in ends)
    return samples * model.residual_bytes / rate


def _sync_s(plan: Plan, model: Model, nodes: dict[str, NodeShape]) -> float:
    """Of the stage that needs longest for all of its blocks, embedding and head."""
    holders: dict[int, list[Replica]] = defaultdict(list)
    held = [
        (list(_held(pipeline, index, model)), stage.replicas)
        for pipeline in plan.pipelines
        for index, stage in enumerate(pipeline.stages)
    ]
    for units, replicas in held:
        for unit in units:
            holders[unit].extend(replicas)
    elements = defaultdict(lambda: model.layer_elements, {EMBEDDING: model.vocab_elements})
    elements[model.layers] = model.vocab_elements
    seconds = {unit: _ring_s(found, elements[unit], nodes) for unit, found in holders.items()}
    return max(sum(seconds[unit] for unit in units) for units, _ in held)


def _held(pipeline: Pipeline, index: int, model: Model) -> Iterator[int]:
    """The blocks of a stage, and EMBEDDING and the number of layers for its embedding and head."""
    if index == 0:
        yield EMBEDDING
    for first, last in pipeline.stages[index].layers:
        yield from range(first, last)
    if index == len(pipeline.stages) - 1:
        yield model.layers


def _ring_s(holders: list[Replica], elements: int, nodes: dict[str, NodeShape]) -> float:
    if len(holders) == 1:
        return 0.0
    num_bytes = 2 * (len(holders) - 1) / len(holders) * ELEMENT_BYTES * elements
    ends = [nodes[replica.node] for replica in holders]
    if len({node.id for node in ends}) > 1:
        return num_bytes / min(node.inter_bytes_per_s for node in ends)
    return num_bytes / ends[0].intra_bytes_per_s / min(replica.tp for replica in holders)


def _memory(plan: Plan, model: Model) -> Iterable[tuple[str, float]]:
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            depth = len(pipeline.stages) - index
            flight = min(pipeline.micro_batches, depth)
            for replica in stage.replicas:
                num_bytes = _replica_bytes(stage, replica, index == 0, depth == 1, flight, model)
                yield from ((str(ref), num_bytes) for ref in replica.refs())


def _replica_bytes(stage: Stage, replica: Replica, embedding: bool, head: bool, in_flight: int, model: Model) -> float:
    """Of each device of the replica."""
    blocks, again, tp = num_blocks(stage), stage.recomputed()["full"], replica.tp
    state = STATE_BYTES * (blocks * model.layer_elements + (embedding + head) * model.vocab_elements) / tp
    row = model.residual_bytes / ELEMENT_BYTES  # S x H
    kept = (blocks - again) * row * (10 + 24 / tp) + again * row * 2 + embedding * model.residual_bytes
    logits = model.seq_len * model.vocab * 4 / tp + row * 4 if head else 0.0
    return state + replica.samples * (kept * in_flight + logits)
