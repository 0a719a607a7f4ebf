"""Bytes that a plan takes on each device and host, counted again from the plan and the shapes of the matrices.

Shares with the planner the engine's constants, the order in which its stages work and where copies are placed, but no
arithmetic: what a rank holds, owns and keeps in flight is counted here, matrix by matrix and micro-batch by
micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

from shoal_planner import memory as policy
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import JobSpec, ModelSpec, Schedule
from shoal_planner.orders import Place, order
from shoal_planner.placement import Placement
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.programs import Backward, Forward, InputGradient, WeightGradient

# What the published memory policy leaves free, in numbers of our own.
FREE_SHARE = 0.05
CONTEXT_GIB = 0.6


def device_bytes(plan: Plan, job: JobSpec, cluster: ClusterSnapshot) -> dict[str, float]:
    """Peak bytes by device (`node:index`)."""
    owners = _owners(plan, job)
    found = {}
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            for replica in stage.replicas:
                held = _held(pipeline, number, replica, job.model)
                total = _state_bytes(held, _owned(plan, held, replica, owners), stage, job, replica.tp)
                total -= _kept_by_others(plan, held, stage, replica, job, cluster)
                total += _made_whole(plan, held, stage, replica, job, cluster)
                if stage.slices > 1:
                    total -= _not_staged(plan, held, stage, replica, job, cluster)
                total += _activation_bytes(plan.schedule, pipeline, number, replica, job)
                total -= _never_at_once(plan, held, pipeline, number, replica, job, cluster)
                for index in replica.devices:
                    found[f"{replica.node}:{index}"] = total
    return found


def room_bytes(cluster: ClusterSnapshot, node_id: str) -> float:
    """What a plan may use of one device of this node."""
    device = device_type(cluster.node(node_id).device, cluster.overrides)
    return device.memory_bytes * (1 - FREE_SHARE) - (0 if device.threads else CONTEXT_GIB * 2**30)


def host_bytes(plan: Plan, job: JobSpec, cluster: ClusterSnapshot) -> dict[str, float]:
    """Bytes by node: of snapshots of its own state and of what it keeps for others, and of state that lives there,
    with the gradients of one block on their way there.

    Each thing is snapshotted once however many hold it: by its holders alike, where each holds all of its state. Copies
    stand with those who hold the same anyway as long as all hosts have room for that, else where backups are; and in
    other pools as long as there is room for that.
    """
    owned, living = _hosted(plan, job)
    for by_owners, apart in itertools.product((True, False), (True, False)):
        placement = Placement(cluster.nodes, plan.copies, by_owners=by_owners, apart=apart)
        kept: dict[str, float] = defaultdict(float)
        for (node, others), elements in owned.items():
            copies = placement.copies(node, others)
            for keeper in (node, *copies.live, *copies.sent):
                kept[keeper] += elements
        # Two snapshots of the running epoch, and two of the one before while a plan changes; so what lives there.
        snapshots = {node: 2 * 2 * 12 * elements for node, elements in kept.items()}
        found = {node: taken + 2 * living[node] for node, taken in snapshots.items()}
        if all(taken <= cluster.node(node).host_memory_bytes for node, taken in found.items()):
            break
    return found


def _hosted(plan: Plan, job: JobSpec) -> tuple[dict[tuple[str, frozenset[str]], float], dict[str, float]]:
    """Elements of which a node takes snapshots, by the other nodes that own them too; bytes of state that live on its
    host."""
    owners = _owners(plan, job)
    replicas = [
        (pipeline, number, replica)
        for pipeline in plan.pipelines
        for number, stage in enumerate(pipeline.stages)
        for replica in stage.replicas
    ]
    nodes: dict[str, set[str]] = defaultdict(set)
    for pipeline, number, replica in replicas:
        for name in _held(pipeline, number, replica, job.model):
            nodes[name].add(replica.node)
    owned: dict[tuple[str, frozenset[str]], float] = defaultdict(float)
    living: dict[str, float] = defaultdict(float)
    for pipeline, number, replica in replicas:
        held = _held(pipeline, number, replica, job.model)
        for name, count in held.items():
            others = nodes[name] - {replica.node} if plan.sharding.optimizer != "cluster" else ()
            share = Fraction(replica.state_share) / owners[name]
            owned[replica.node, frozenset(others)] += replica.tp * float(count * share)
        away = _offloaded(_owned(plan, held, replica, owners), pipeline.stages[number])
        passing = min(away, matrix_elements(job.model, replica.tp)["block"])
        living[replica.node] += replica.tp * float(12 * away + 4 * passing)
    return owned, living


def matrix_elements(model: ModelSpec, tp: int) -> dict[str, int]:
    """Elements that the rank with the largest slices holds of a block, the embedding, the final norm and the head."""
    keys, hidden = model.num_kv_heads * model.head_size, model.hidden
    rows = [hidden, keys, keys, hidden, model.ffn, model.ffn]
    if model.gated_mlp:
        rows.append(model.ffn)
    return {
        "block": hidden * sum(-(-count // tp) for count in rows) + 2 * hidden,
        "embedding": hidden * -(-model.vocab // tp),
        "norm": hidden,
    }


def _held(pipeline: Pipeline, number: int, replica: Replica, model: ModelSpec) -> dict[str, int]:
    """Names of what the replica's ranks hold, each with its elements."""
    sizes = matrix_elements(model, replica.tp)
    stage = pipeline.stages[number]
    found = {f"block {layer}": sizes["block"] for first, last in stage.layers for layer in range(first, last)}
    if number == 0:
        found["embedding"] = sizes["embedding"]
    if number == len(pipeline.stages) - 1:
        found["norm"] = sizes["norm"]
        found["embedding" if model.tie_embeddings else "head"] = sizes["embedding"]
    return found


def _owners(plan: Plan, job: JobSpec) -> dict[str, Fraction]:
    """The sum of the shares of all replicas that hold each thing."""
    found: dict[str, Fraction] = defaultdict(Fraction)
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            for replica in stage.replicas:
                for name in _held(pipeline, number, replica, job.model):
                    found[name] += Fraction(replica.state_share)
    return found


def _owned(plan: Plan, held: dict[str, int], replica: Replica, owners: dict[str, Fraction]) -> dict[str, Fraction]:
    """Elements of optimizer state on each rank of the replica."""
    if plan.sharding.optimizer == "none":
        return {name: Fraction(count) for name, count in held.items()}
    return {name: count * Fraction(replica.state_share) / owners[name] for name, count in held.items()}


def _state_bytes(held: dict[str, int], owned: dict[str, Fraction], stage: Stage, job: JobSpec, tp: int) -> float:
    size = 2 if job.train.precision == "bf16" else 4
    kept = sum(owned.values()) - _offloaded(owned, stage)
    largest = max(*held.values(), _largest_block(held, job, tp))
    return sum(held.values()) * (size + 4) + 12 * float(kept) + 2 * 4 * largest


def _is_whole(plan: Plan, stage: Stage, replica: Replica, cluster: ClusterSnapshot) -> bool:
    levels = plan.sharding.weights, plan.sharding.gradients
    return all(_part(stage, replica, level, cluster) == 1 for level in levels)


def _neighbours(stage: Stage, replica: Replica, level: str, cluster: ClusterSnapshot) -> list[Replica]:
    """The replicas of the stage, itself among them, with which it shares what is split at this level."""

    def place(one: Replica) -> object:
        if level == "cluster":
            return "all"
        if level == "node":
            return one.node
        size = cluster.node(one.node).device_group
        inside = len({index // size for index in one.devices}) == 1
        return (one.node, one.devices[0] // size) if level == "group" and inside else one

    return [one for one in stage.replicas if place(one) == place(replica)]


def _part(stage: Stage, replica: Replica, level: str, cluster: ClusterSnapshot) -> Fraction:
    shares = [Fraction(one.state_share) for one in _neighbours(stage, replica, level, cluster)]
    return Fraction(replica.state_share) / sum(shares)


def _kept_by_others(
    plan: Plan, held: dict[str, int], stage: Stage, replica: Replica, job: JobSpec, cluster: ClusterSnapshot
) -> float:
    """Bytes of weights and of gradients in fp32 that a rank need not keep."""
    size = 2 if job.train.precision == "bf16" else 4
    weights = size * (1 - _part(stage, replica, plan.sharding.weights, cluster))
    gradients = 4 * (1 - _part(stage, replica, plan.sharding.gradients, cluster))
    split = sum(count for name, count in held.items() if name not in _whole(stage, replica))
    return float(split * (weights + gradients))


def _whole(stage: Stage, replica: Replica) -> set[str]:
    """Blocks that nobody splits; who runs nothing has of them what it owns alone."""
    layers = [range(*entry.layers) for entry in stage.overrides if entry.sharding and replica.samples]
    return {f"block {layer}" for chunk in layers for layer in chunk}


def _made_whole(
    plan: Plan, held: dict[str, int], stage: Stage, replica: Replica, job: JobSpec, cluster: ClusterSnapshot
) -> float:
    """Whole weights of the layer in use and of the next one, and the whole gradients of one layer."""
    size = 2 if job.train.precision == "bf16" else 4
    largest = max(*held.values(), _largest_block(held, job, replica.tp))
    if stage.slices > 1:
        largest = _largest_slice(held, stage, replica.tp, job.model)
    gathers = _part(stage, replica, plan.sharding.weights, cluster) < 1
    scatters = _part(stage, replica, plan.sharding.gradients, cluster) < 1
    return float(largest * (2 * size * gathers + 4 * scatters))


def _not_staged(
    plan: Plan, held: dict[str, int], stage: Stage, replica: Replica, job: JobSpec, cluster: ClusterSnapshot
) -> float:
    """Bytes of buffers that are smaller where slices are sent. At the end of a step all that is kept of a unit is."""
    largest = max(*held.values(), _largest_block(held, job, replica.tp))
    parts = (
        _part(stage, replica, level, cluster) * largest for level in (plan.sharding.weights, plan.sharding.gradients)
    )
    whole = [held[name] for name in _whole(stage, replica)]
    return float(2 * 4 * (largest - max(_largest_slice(held, stage, replica.tp, job.model), *parts, *whole)))


def _largest_slice(held: dict[str, int], stage: Stage, tp: int, model: ModelSpec) -> int:
    """Of attention by key heads, of the MLP and the vocabulary by rows, with the norms of the unit beside it."""
    group = (2 * model.hidden // model.num_kv_heads) + 2 * model.head_size  # rows of q and o, k and v for a key head
    heads = model.num_kv_heads // tp
    attention = math.ceil(heads / min(stage.slices, heads)) * group
    rows = [math.ceil(math.ceil(count / tp) / stage.slices) for count in (model.ffn, model.vocab)]
    inner = rows[0] * (3 if model.gated_mlp else 2)
    found = [model.hidden * (2 + max(attention, inner))]
    if "embedding" in held:
        found.append(model.hidden * rows[1])
    if "norm" in held:
        found.append(model.hidden * (1 + rows[1]))
    return max(found)


def _offloaded(owned: dict[str, Fraction], stage: Stage) -> Fraction:
    """Of what a rank owns, the elements whose optimizer state lives in the host's memory."""
    layers = [range(*entry.layers) for entry in stage.overrides if entry.offload == "optimizer"]
    return sum((owned[f"block {layer}"] for chunk in layers for layer in chunk), Fraction(0))


def _largest_block(held: dict[str, int], job: JobSpec, tp: int) -> int:
    """Buffers are made for a block even where a stage holds none; final norm and untied head are one buffer."""
    found = matrix_elements(job.model, tp)["block"]
    if "norm" in held:
        end = "embedding" if job.model.tie_embeddings else "head"
        found = max(found, held["norm"] + held[end])
    return found


def _activation_bytes(schedule: Schedule, pipeline: Pipeline, number: int, replica: Replica, job: JobSpec) -> float:
    """Of each micro-batch in flight what its blocks keep and the borders of the stage, or what the gradients of weights
    wait for; and once what a backward needs while it runs."""
    model, train, stage = job.model, job.train, pipeline.stages[number]
    size = 2 if train.precision == "bf16" else 4
    chunks = [
        policy.BORDER_COPIES * size * model.hidden
        + sum(block_bytes(model, _kind(stage, layer), replica.tp, size) for layer in range(first, last))
        for first, last in stage.layers
    ]
    waiting = stage.num_layers * weight_bytes(model, replica.tp, size)
    is_last = number == len(pipeline.stages) - 1
    head = 4 * model.vocab / replica.tp + 2 * size * model.hidden if is_last else 0  # and what its norm takes and gives
    kept = max(
        sum(count * chunk for count, chunk in zip(forward, chunks, strict=True)) + later * waiting + heads * head
        for forward, later, heads in _moments_of(schedule, pipeline, number, len(chunks))
    )
    tokens = replica.samples * train.seq_len
    return tokens * (kept + policy.BORDER_EXTRA * size * model.hidden) + sum(_moments(pipeline, number, replica, job))


def _moments_of(
    schedule: Schedule, pipeline: Pipeline, number: int, chunks: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Micro-batches between forward and backward by chunk, those that gradients of weights wait for, and those in the
    last chunk that something else is done meanwhile. With 1F1B a stage is full once as many are in it as there are
    stages from it on, and its head waits for nothing; else they are counted along its order."""
    stages = len(pipeline.stages)
    if schedule == "1f1b":
        yield (min(stages - number, pipeline.micro_batches),), 0, 0
        return
    forward, later = [0] * chunks, 0
    place = Place(stage=number, stages=stages, micro_batches=pipeline.micro_batches, chunks=chunks)
    ended: set[int] = set()  # in the last chunk
    for work in order(schedule, place):
        if isinstance(work, Backward | InputGradient):
            yield tuple(forward), later, len(ended - ({work.micro_batch} if work.chunk == chunks - 1 else set()))
        match work:
            case Forward():
                if work.chunk == chunks - 1:
                    yield tuple(forward), later, len(ended)
                    ended.add(work.micro_batch)
                forward[work.chunk] += 1
            case Backward() | InputGradient():
                forward[work.chunk] -= 1
                later += isinstance(work, InputGradient)
                if work.chunk == chunks - 1:
                    ended.discard(work.micro_batch)
            case WeightGradient():
                later -= 1
        at_work = {work.micro_batch} if isinstance(work, Forward) and work.chunk == chunks - 1 else set()
        yield tuple(forward), later, len(ended - at_work)


def _moments(pipeline: Pipeline, number: int, replica: Replica, job: JobSpec) -> tuple[float, float]:
    """What the backward of a block takes while it runs, and what that of the head does."""
    model, train, stage = job.model, job.train, pipeline.stages[number]
    size = 2 if train.precision == "bf16" else 4
    usual = all(_kind(stage, layer) == "none" for first, last in stage.layers for layer in range(first, last))
    working = (1 if usual else 2) * block_bytes(model, "none", replica.tp, size)
    logits = 12 * model.vocab / replica.tp if number == len(pipeline.stages) - 1 else 0
    tokens = replica.samples * train.seq_len
    return tokens * working, tokens * logits


def _never_at_once(
    plan: Plan,
    held: dict[str, int],
    pipeline: Pipeline,
    number: int,
    replica: Replica,
    job: JobSpec,
    cluster: ClusterSnapshot,
) -> float:
    """The lesser of a block's backward and the head's; and before that of the last micro-batch nothing is on its way
    where all is whole everywhere."""
    stage = pipeline.stages[number]
    working, logits = _moments(pipeline, number, replica, job)
    if not _is_whole(plan, stage, replica, cluster):
        return min(logits, working)
    size = 2 if job.train.precision == "bf16" else 4
    largest = max(*held.values(), _largest_block(held, job, replica.tp))
    counted, staged = 2 * 4 * largest, 2 * 2 * size * largest  # sent and received, of two units
    return counted - staged + min(logits, working + staged)


def _kind(stage: Stage, layer: int) -> str:
    for override in stage.overrides:
        if override.layers[0] <= layer < override.layers[1] and override.recompute is not None:
            return str(override.recompute)
    return stage.recompute


def weight_bytes(model: ModelSpec, tp: int, size: int) -> float:
    """Bytes of one token that a block keeps for the gradients of its weights: what goes into each product, once where
    several share it, and the gradient of what comes out."""
    keys = model.num_kv_heads * model.head_size
    into = 2 * model.hidden + (model.hidden + model.ffn) / tp
    out = 2 * model.hidden + (model.hidden + 2 * keys + (2 if model.gated_mlp else 1) * model.ffn) / tp
    return size * (into + out)


def block_bytes(model: ModelSpec, kind: str, tp: int, size: int) -> float:
    """Bytes that a block keeps of one token."""
    hidden, ffn, gated = model.hidden, model.ffn, model.gated_mlp
    if kind == "full":
        return float(size * hidden)
    # Key and value are as wide as queries in fp32, where devices without a kernel for fewer heads copy them.
    keys = hidden if size == 4 else model.num_kv_heads * model.head_size
    heads = (policy.QUERY_WIDTHS * hidden + policy.KEY_WIDTHS * keys) / tp
    softmax = 4 * model.heads / tp
    if kind == "selective":
        return softmax + size * (policy.SELECTIVE_NORM_WIDTHS * hidden + heads + (2 if gated else 1) * ffn / tp)
    norms = policy.NORM_WIDTHS * size * hidden + 4 * (2 if model.norm == "rms" else 4)
    return softmax + norms + size * (heads + (4 if gated else 2) * ffn / tp)
