"""Room in memory for a plan as it is: per layer the least recomputation and offload that fit, layers divided anew, and
optimizer state shared out by free memory.

Owns plans made of a plan's devices, micro-batches and order of stages. Does not own which of them is better (`score`),
nor how many layers take which choice (`mixes`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from shoal_planner.choices import Choice, LayerFigures, Offload, Options, options, overrides
from shoal_planner.costs import CostModel
from shoal_planner.loads import ReplicaLoad, replica_loads, segments
from shoal_planner.memory import (
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    StageBytes,
    held_elements,
    stage_bytes,
    usable_bytes,
)
from shoal_planner.mixes import cheapest
from shoal_planner.options import Floats, Ints
from shoal_planner.plan import Pipeline, Plan, Recompute, Replica, Stage

# In whose mixes layers are divided, from the fastest to the smallest: counts of so few are found for all at once.
_STEPS = (Choice(), Choice(offload="optimizer"), Choice(recompute="full", offload="optimizer"))
_BOUNDS = 12  # times of the slowest stage that are tried, from the least possible
_LEAST_ROOM = 1e-3  # of a device's memory: whoever has none keeps this part of what the others do
_MOST_SHARE = 1e6
# Rounding of sums: what is chosen here leaves so much of a device free.
_ROUNDING = 1e-9


def eased(plan: Plan, costs: CostModel) -> Iterator[Plan]:
    """What can be made of the plan as it is and with ever fewer and longer pipelines, with micro-batches of its size
    and of smaller ones; optimizer state shared evenly, or by free memory. None of them need fit."""
    for smaller in (made for deeper in _deeper(plan) for made in _smaller(deeper)):
        by_room = shared_by_room(smaller, costs)
        for shared in (smaller,) if by_room is smaller else (smaller, by_room):
            for offload in (False, True):
                made = relieved(shared, costs, offload=offload)
                if made is not None:
                    yield made


def _deeper(plan: Plan) -> Iterator[Plan]:
    """Two pipelines become one, one stage after the other, again and again, where stages have one replica."""
    yield plan
    while len(plan.pipelines) > 1 and _single(plan):
        if 2 * max(len(pipeline.stages) for pipeline in plan.pipelines) > plan.num_layers:
            return
        pairs = itertools.zip_longest(plan.pipelines[::2], plan.pipelines[1::2])
        joined = [here if there is None else _chained(here, there) for here, there in pairs]
        plan = dataclasses.replace(plan, pipelines=tuple(joined), prediction=None)
        yield plan


def _chained(here: Pipeline, there: Pipeline) -> Pipeline:
    """Layers are even, for now."""
    stages = [*here.stages, *there.stages]
    layers, count = here.stages[-1].last, len(stages)
    bounds = [number * layers // count for number in range(count + 1)]
    samples = here.samples + there.samples
    size = math.gcd(samples, min(here.micro_batch, there.micro_batch))
    made = (
        Stage(layers=((first, last),), replicas=(dataclasses.replace(stage.replicas[0], samples=size),))
        for stage, (first, last) in zip(stages, itertools.pairwise(bounds), strict=True)
    )
    return Pipeline(micro_batch=size, micro_batches=samples // size, stages=tuple(made))


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Micro-batches of the size that each pipeline has, of half of it and so on down to one sample, where stages have
    one replica."""
    yield plan
    divisor = 2
    while any(pipeline.micro_batch >= divisor for pipeline in plan.pipelines) and _single(plan):
        pipelines = tuple(_resized(pipeline, max(1, pipeline.micro_batch // divisor)) for pipeline in plan.pipelines)
        yield dataclasses.replace(plan, pipelines=pipelines, prediction=None)
        divisor *= 2


def _single(plan: Plan) -> bool:
    return all(len(stage.replicas) == 1 for pipeline in plan.pipelines for stage in pipeline.stages)


def _resized(pipeline: Pipeline, most: int) -> Pipeline:
    size = next(size for size in range(most, 0, -1) if pipeline.samples % size == 0)
    stages = tuple(
        dataclasses.replace(stage, replicas=(dataclasses.replace(stage.replicas[0], samples=size),))
        for stage in pipeline.stages
    )
    return Pipeline(micro_batch=size, micro_batches=pipeline.samples // size, stages=stages)


def shared_by_room(plan: Plan, costs: CostModel) -> Plan:
    """Whoever has most memory left beside its optimizer state, for each element that it holds, owns most of it; the
    plan itself where nobody has anything to share."""
    alone = len(plan.pipelines) == 1 and _single(plan)
    if plan.sharding.optimizer == "none" or alone:
        return plan
    shares = {}
    for load in replica_loads(plan, costs, segments(plan, costs)):
        usable = usable_bytes(costs.device(load.replica.node))
        stage = plan.pipelines[load.pipeline].stages[load.stage]
        room = usable - load.memory.total + load.memory.optimizer
        held = _held(load, plan.pipelines[load.pipeline], stage, costs)
        shares[load.replica.node, load.replica.devices] = max(room, usable * _LEAST_ROOM, 1.0) / held
    least = min(shares.values())

    def share(replica: Replica) -> Replica:
        found = min(shares[replica.node, replica.devices] / least, _MOST_SHARE)
        return dataclasses.replace(replica, state_share=float(f"{found:.4g}"))

    return _mapped(plan, lambda stage: dataclasses.replace(stage, replicas=tuple(map(share, stage.replicas))))


def _held(load: ReplicaLoad, pipeline: Pipeline, stage: Stage, costs: CostModel) -> int:
    first, last = load.stage == 0, load.stage + 1 == len(pipeline.stages)
    count = stage.num_layers
    return max(1, held_elements(costs.job.model, load.replica.tp, count, embedding=first, head=last))


def relieved(plan: Plan, costs: CostModel, *, offload: bool) -> Plan | None:
    """With layers divided anew where stages have one replica each, and in every stage the mix of choices that costs
    least of those that fit; none where some stage has no such mix."""
    by_stage: dict[tuple[int, int], list[ReplicaLoad]] = {}
    for load in replica_loads(plan, costs, segments(plan, costs)):
        by_stage.setdefault((load.pipeline, load.stage), []).append(load)
    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        loads = [by_stage[p, s] for s in range(len(pipeline.stages))]
        made = _Relief(pipeline, loads, costs, offload=offload).pipeline()
        if made is None:
            return None
        pipelines.append(made)
    return dataclasses.replace(plan, pipelines=tuple(pipelines), prediction=None, unused=(), reason="")


def _mapped(plan: Plan, change: Callable[[Stage], Stage]) -> Plan:
    pipelines = (
        dataclasses.replace(pipeline, stages=tuple(map(change, pipeline.stages))) for pipeline in plan.pipelines
    )
    return dataclasses.replace(plan, pipelines=tuple(pipelines), prediction=None)


class _Relief:
    """One pipeline. Every stage is as tight as its tightest replica."""

    def __init__(self, pipeline: Pipeline, loads: list[list[ReplicaLoad]], costs: CostModel, *, offload: bool) -> None:
        self.costs = costs
        self._pipeline = pipeline
        self._loads = loads
        self._layers = pipeline.stages[-1].last
        recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
        self._recomputes = recomputes if costs.job.train.recompute != "none" else recomputes[:1]
        self._offloads: tuple[Offload, ...] = ("none", "optimizer") if offload else ("none",)
        figures = [self._figures(s) for s in range(len(pipeline.stages))]
        self._rooms = np.array([room for _, room in figures])
        self._options = [
            options(one, recomputes=self._recomputes, offloads=self._offloads) for one, _ in figures
        ]  # fmt: skip

    def pipeline(self) -> Pipeline | None:
        counts = self._counts()
        if counts is None:
            return None
        first, stages = 0, []
        for stage, count, found, room in zip(self._pipeline.stages, counts, self._options, self._rooms, strict=True):
            seconds, taken = cheapest(found, [count], [room])
            if not np.isfinite(seconds[0]):
                return None
            recompute, rest = overrides(first, found.choices, taken[0].tolist())
            layers = ((first, first + count),)
            stages.append(dataclasses.replace(stage, layers=layers, recompute=recompute, overrides=rest))
            first += count
        return dataclasses.replace(self._pipeline, stages=tuple(stages))

    def _counts(self) -> list[int] | None:
        """Layers of each stage."""
        stages = self._pipeline.stages
        if max(len(stage.replicas) for stage in stages) > 1 or len(stages) == 1:
            return [stage.num_layers for stage in stages]
        number, counts = self._pipeline.micro_batches, np.arange(self._layers + 1)
        times = np.empty((len(stages), len(counts)))
        for s, found in enumerate(self._options):
            extra_s, _ = cheapest(_few(found), counts, self._rooms[s])
            block_s, fixed_s = self._seconds(s)
            times[s] = fixed_s + counts * block_s + extra_s / number
        least = np.array([0 if s in (0, len(stages) - 1) else 1 for s in range(len(stages))])
        return divide(times, least, self._layers, number)

    def _seconds(self, s: int) -> tuple[float, float]:
        """Of a micro-batch: for each block, and beside them."""
        costs, stages = self.costs, self._pipeline.stages
        replica = stages[s].replicas[0]
        block_s = costs.part("block", replica.node, replica.tp, replica.samples).total_s
        ends = {"embedding": s == 0, "head": s + 1 == len(stages)}
        fixed_s = costs.stage(replica.node, replica.tp, replica.samples, {}, **ends).total_s
        if s + 1 < len(stages):
            fixed_s += 2 * costs.send_s(replica.node, stages[s + 1].replicas[0].node, replica.samples)
        return block_s, fixed_s

    def _figures(self, s: int) -> tuple[LayerFigures, float]:
        """Of each layer on the replica with the least room for each of them, and that room."""
        found = [self._figures_of(s, load) for load in self._loads[s]]
        return min(found, key=lambda entry: entry[1] / _most_bytes(entry[0]))

    def _figures_of(self, s: int, load: ReplicaLoad) -> tuple[LayerFigures, float]:
        costs, replica, stages = self.costs, load.replica, self._pipeline.stages
        line = self._line(s, replica)
        size, stage = ELEMENT_BYTES[costs.job.train.precision], stages[s]
        in_flight = min(len(stages) - s, self._pipeline.micro_batches)
        own = load.owned / _held(load, self._pipeline, stage, costs)  # as if all it holds were shared alike
        state = size * load.shards.weights + GRADIENT_BYTES * load.shards.gradients
        fixed = load.memory.staging + line.fixed + in_flight * line.flight
        fixed += line.end_elements * (state + OPTIMIZER_BYTES * own)
        elements, node, tp = line.block_elements, replica.node, replica.tp
        samples = max(1, replica.samples)
        plain_s = costs.part("block", node, tp, samples).total_s
        figures = LayerFigures(
            micro_batches=self._pipeline.micro_batches,
            in_flight=in_flight,
            kept_bytes=line.block_flight["none"],
            selective_bytes=line.block_flight["selective"],
            full_bytes=line.block_flight["full"],
            again_bytes=line.again,
            selective_s=costs.part("block", node, tp, samples, "selective").total_s - plain_s,
            full_s=costs.part("block", node, tp, samples, "full").total_s - plain_s,
            weight_bytes=elements * size * load.shards.weights,
            gradient_bytes=elements * GRADIENT_BYTES * load.shards.gradients,
            optimizer_bytes=elements * OPTIMIZER_BYTES * own,
            host_s=costs.update_s(node, elements * own, elements * own) - costs.update_s(node, elements * own),
        )
        return figures, usable_bytes(costs.device(node)) * (1 - _ROUNDING) - fixed

    def _line(self, s: int, replica: Replica) -> StageBytes:
        train = self.costs.job.train
        return stage_bytes(
            self.costs.job.model,
            train.seq_len,
            train.precision,
            replica.tp,
            replica.samples,
            embedding=s == 0,
            head=s + 1 == len(self._pipeline.stages),
            fused=self.costs.fused(replica.node),
        )


def _most_bytes(figures: LayerFigures) -> float:
    state = figures.weight_bytes + figures.gradient_bytes + figures.optimizer_bytes
    return float(state + figures.in_flight * figures.kept_bytes)


def _few(found: Options) -> Options:
    """The same with a few of the choices, the smallest among them."""
    steps = [choice for choice in _STEPS if choice in found.choices]
    if len(steps) < 2:
        steps = [choice for choice in found.choices if choice.recompute != "selective"]
    columns = [found.choices.index(choice) for choice in steps]
    return Options(
        choices=tuple(steps),
        seconds=found.seconds[columns],
        micro_batch_s=found.micro_batch_s[columns],
        bytes=found.bytes[columns],
        peak_bytes=found.peak_bytes[columns],
    )


def divide(times: Floats, least: Ints, layers: int, number: int) -> list[int] | None:
    """Layers by stage, about with the least (number - 1) max_s t_s + sum_s t_s, `times` [S, L+1] being seconds by
    number of layers, inf where they do not fit."""
    times = np.maximum.accumulate(times, axis=1)
    bounds = np.unique(times[np.isfinite(times)])
    rows = np.arange(len(times))

    def limits(bound: float) -> Ints:
        found: Ints = (times <= bound).sum(axis=1) - 1
        return found

    def enough(bound: float) -> bool:
        most = limits(bound)
        return bool((most >= least).all() and most.sum() >= layers)

    low, high = 0, len(bounds)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(bounds[middle]) else (middle + 1, high)
    best_s, best = np.inf, None
    for bound in bounds[low : low + _BOUNDS]:
        counts = limits(bound)
        while counts.sum() > layers:
            saved = np.where(counts > least, times[rows, counts] - times[rows, np.maximum(counts - 1, 0)], -1.0)
            counts[int(saved.argmax())] -= 1
        chosen = times[rows, counts]
        seconds = (number - 1) * chosen.max() + chosen.sum()
        if seconds < best_s:
            best_s, best = seconds, counts
    return None if best is None else [int(count) for count in best]
