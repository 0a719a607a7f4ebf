"""What a plan gives each replica to do and to hold, and who holds each layer: the sums that all predictions start from.

Owns the bookkeeping alone. What work costs is asked from `costs`, what it needs from `memory`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal_planner.algorithms import DIRECT
from shoal_planner.costs import CostModel, PartTime
from shoal_planner.groups import collective_of
from shoal_planner.hiding import hideable_among, with_chunks, with_shards_hidden
from shoal_planner.memory import (
    StageMemory,
    block_weight_bytes,
    hosted_bytes,
    kept_bytes,
    part_elements,
    stage_bytes,
    stage_memory,
    unit_elements,
)
from shoal_planner.orders import InFlight, fullest
from shoal_planner.plan import Override, Pipeline, Plan, Recompute, Replica, Stage
from shoal_planner.schedule import place_of
from shoal_planner.sharding import WHOLE, Place, Shards, optimizer_split, shards, shares_inside


class Holder(NamedTuple):
    """A replica that holds a unit: where it stands in the plan, its node, its tp, its ratio of the unit's state, and
    whether it keeps the unit whole where its plan splits others."""

    pipeline: int
    stage: int
    replica: int
    node: str
    tp: int
    share: float
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Units [first, last) that the same replicas synchronise, by one algorithm. Unit 0 is the embedding, unit 1 + i
    block i."""

    first: int
    last: int
    holders: tuple[Holder, ...]
    collective: str = DIRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """Each rank of a replica: its seconds per micro-batch, the elements of optimizer state that it owns, `offloaded` of
    them on the host, where they take `hosted_bytes`, its peak memory, and what it shares within a step. `chunks` are
    the seconds of each chunk of layers, which add up to `time`."""

    pipeline: int
    stage: int
    replica: Replica
    time: PartTime
    chunks: tuple[PartTime, ...]
    owned: float
    offloaded: float
    memory: StageMemory
    hosted_bytes: float
    shards: Shards = WHOLE

    @property
    def total_s(self) -> float:
        """Seconds per micro-batch."""
        return self.time.total_s + self.shards.total_s


def segments(plan: Plan, costs: CostModel) -> tuple[Segment, ...]:
    """All units, in order. A tied embedding is synchronised under unit 0, by holders of the last unit too."""
    num_layers, tied = plan.num_layers, costs.job.model.tie_embeddings
    cuts = {0, num_layers}
    for pipeline in plan.pipelines:
        cuts.update(first for stage in pipeline.stages for first, _ in stage.layers)
    cuts.update(*(group.layers for group in plan.groups))
    for entry in _whole_entries(plan):
        cuts.update(entry.layers)
    bounds = sorted(cuts)
    at = [[(p, s) for p, s in _ends(plan, first=True)]]
    at += [[] for _ in bounds[1:]]
    for p, pipeline in enumerate(plan.pipelines):
        chunks = sorted((end, start, s) for s, stage in enumerate(pipeline.stages) for start, end in stage.layers)
        reached = 0
        for index, bound in enumerate(bounds[:-1]):
            while chunks[reached][0] <= bound:
                reached += 1
            at[index + 1].append((p, chunks[reached][2]))
    last = list(_ends(plan, first=False))
    if tied:
        at[0] += [end for end in last if end[1] > 0]
    ranges = [(0, 1), *((low + 1, high + 1) for low, high in itertools.pairwise(bounds))]
    ranges.append((num_layers + 1, num_layers + 2))
    return tuple(
        Segment(
            first=low,
            last=high,
            holders=tuple(_holders(plan, places, low - 1)),
            collective=collective_of(plan.groups, num_layers, low, high),
        )
        for (low, high), places in zip(ranges, [*at, last], strict=True)
    )


def _ends(plan: Plan, *, first: bool) -> Iterator[tuple[int, int]]:
    for p, pipeline in enumerate(plan.pipelines):
        yield p, 0 if first else len(pipeline.stages) - 1


def _whole_entries(plan: Plan) -> Iterator[Override]:
    for pipeline in plan.pipelines if shares_inside(plan) else ():
        for stage in pipeline.stages:
            yield from (entry for entry in stage.overrides if entry.sharding)


def _holders(plan: Plan, places: list[tuple[int, int]], layer: int) -> Iterator[Holder]:
    """Of units that begin with this block; what is none is split where anything is."""
    for p, s in places:
        stage = plan.pipelines[p].stages[s]
        whole = bool(stage.overrides) and stage.is_whole(layer)
        for r, replica in enumerate(stage.replicas):
            yield Holder(p, s, r, replica.node, replica.tp, replica.state_share, whole)


def replica_loads(plan: Plan, costs: CostModel, parts: tuple[Segment, ...]) -> tuple[ReplicaLoad, ...]:
    """In the order of the plan. Raises KeyError for a node that the cluster lacks."""
    owned, hosted = _owned(plan, costs, parts)
    shared = shards(plan, costs)
    known: dict[tuple[object, ...], tuple[tuple[PartTime, ...], StageMemory]] = {}
    found = []
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            work = _work(plan, pipeline, s)
            for r, replica in enumerate(stage.replicas):
                mine, away = owned[p, s, r], hosted.get((p, s, r), 0.0)
                its = shared.get((p, s, r), WHOLE)
                key = (costs.kind(replica.node), replica.tp, replica.samples, work, mine, away, its)
                if key not in known:
                    known[key] = _time_and_memory(costs, replica, work, mine, away, its, plan.overlap.tensor_chunks)
                chunks, memory = known[key]
                time = chunks[0] if len(chunks) == 1 else functools.reduce(PartTime.plus, chunks)
                found.append(
                    ReplicaLoad(
                        pipeline=p,
                        stage=s,
                        replica=replica,
                        time=time,
                        chunks=chunks,
                        owned=mine,
                        offloaded=away,
                        memory=memory,
                        hosted_bytes=hosted_bytes(away, part_elements(costs.job.model, "block", replica.tp)),
                        shards=_hidden(plan, stage, replica, its, time, costs) if plan.overlap.shards else its,
                    )
                )
    return tuple(found)


def _hidden(plan: Plan, stage: Stage, replica: Replica, its: Shards, time: PartTime, costs: CostModel) -> Shards:
    """What stays exposed of what is passed round within a step."""
    inside = {plan.sharding.weights, plan.sharding.gradients} <= {"none", "group", "node"}
    nodes = [replica.node] if inside else [other.node for other in stage.replicas]
    return with_shards_hidden(its, time, hideable_among(costs, nodes), stage.num_layers)


class _Work(NamedTuple):
    """Of each replica of a stage: layers by kind of recomputation, of each chunk; whether the embedding and the head go
    with them; and the moments at which most micro-batches are kept."""

    chunks: tuple[tuple[tuple[Recompute, int], ...], ...]
    ends: tuple[bool, bool]
    moments: tuple[InFlight, ...]


def _work(plan: Plan, pipeline: Pipeline, s: int) -> _Work:
    stage, depth = pipeline.stages[s], len(pipeline.stages)
    ends = (s == 0, s == depth - 1)
    if plan.schedule == "1f1b":  # as `fullest` would find, and far sooner
        moments: tuple[InFlight, ...] = (InFlight(forward=(min(depth - s, pipeline.micro_batches),)),)
        return _Work((tuple(stage.recomputed().items()),), ends, moments)
    chunks = tuple(tuple(stage.recomputed(chunk).items()) for chunk in range(pipeline.num_chunks))
    return _Work(chunks, ends, fullest(plan.schedule, place_of(pipeline, s)))


def _time_and_memory(
    costs: CostModel, replica: Replica, work: _Work, owned: float, offloaded: float, its: Shards, tensor_chunks: int
) -> tuple[tuple[PartTime, ...], StageMemory]:
    memory = _memory(costs, replica, work, owned, offloaded, its)
    if not replica.samples:
        return (PartTime(),) * len(work.chunks), memory
    end = len(work.chunks) - 1
    where = (replica.node, replica.tp, replica.samples)
    times = []
    for chunk, counts in enumerate(work.chunks):
        layers = dict(counts)
        ends = (work.ends[0] and chunk == 0, work.ends[1] and chunk == end)
        time = costs.stage(*where, layers, embedding=ends[0], head=ends[1], slices=its.slices)
        times.append(with_chunks(time, costs, *where, sum(layers.values()), layers.get("full", 0), tensor_chunks))
    return tuple(times), memory


def _memory(
    costs: CostModel, replica: Replica, work: _Work, owned: float, offloaded: float, its: Shards
) -> StageMemory:
    train, model = costs.job.train, costs.job.model
    chunks = [dict(layers) for layers in work.chunks]
    counts = chunks[0]
    plain = len(chunks) == len(work.moments) == 1 and not work.moments[0].weight
    if len(chunks) > 1:
        counts = {kind: sum(layers[kind] for layers in chunks) for kind in counts}
    found = stage_memory(
        model,
        train.seq_len,
        train.precision,
        tp=replica.tp,
        samples=replica.samples,
        in_flight=work.moments[0].forward[0] if plain else 0,
        layers=counts,
        embedding=work.ends[0],
        head=work.ends[1],
        owned=owned,
        offloaded=offloaded,
        weights=its.weights,
        gradients=its.gradients,
        near=its.near,
        whole=its.whole,
        slices=its.slices,
    )
    if plain:
        return found
    line = stage_bytes(
        model,
        train.seq_len,
        train.precision,
        replica.tp,
        replica.samples,
        embedding=work.ends[0],
        head=work.ends[1],
    )
    each = block_weight_bytes(model, train.seq_len, train.precision, replica.tp)
    weight_bytes = replica.samples * sum(counts.values()) * each
    kept = max(kept_bytes(line, moment, chunks, weight_bytes) for moment in work.moments)
    return dataclasses.replace(found, activations=found.activations + kept)


def _owned(plan: Plan, costs: CostModel, parts: tuple[Segment, ...]) -> tuple[dict[Place, float], dict[Place, float]]:
    """Elements of optimizer state by replica: each unit's among its holders, or those of a circle, by their shares, or
    all of it at each. And those of them that live on hosts."""
    found: dict[Place, float] = {}
    hosted: dict[Place, float] = {}
    level, inside = plan.sharding.optimizer, optimizer_split(plan, costs)
    model = costs.job.model
    for part in parts:
        total = sum(holder.share for holder in part.holders)
        each = {tp: unit_elements(model, part.first, tp) * (part.last - part.first) for tp in _degrees(part)}
        for holder in part.holders:
            key = (holder.pipeline, holder.stage, holder.replica)
            its = holder.share / total if level == "cluster" else 1.0 if inside is None else inside.part[key]
            mine = each[holder.tp] * its
            found[key] = found.get(key, 0.0) + mine
            stage = plan.pipelines[holder.pipeline].stages[holder.stage]
            if stage.overrides and (away := _offloaded(stage, part)):
                hosted[key] = hosted.get(key, 0.0) + mine * away / (part.last - part.first)
    return found, hosted


def _degrees(part: Segment) -> set[int]:
    return {holder.tp for holder in part.holders}


def _offloaded(stage: Stage, part: Segment) -> int:
    """How many units of the segment keep their optimizer state on the host; unit 1 + i is layer i."""
    spans = (entry.layers for entry in stage.overrides if entry.offload == "optimizer")
    return sum(max(0, min(last + 1, part.last) - max(first + 1, part.first)) for first, last in spans)
