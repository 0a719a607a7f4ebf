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
from shoal_planner.dividing import divide
from shoal_planner.hiding import hop_s
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
_ENDS = 2  # embedding and head may be stages without a layer
_LEAST_ROOM = 1e-3  # of a device's memory: whoever has none keeps this part of what the others do
_MOST_SHARE = 1e6
# Rounding of sums: what is chosen here leaves so much of a device free.
_ROUNDING = 1e-9

Where = tuple[int, int]  # pipeline and stage


def eased(plan: Plan, costs: CostModel, may_pay: Callable[[Plan], bool]) -> Iterator[Plan]:
    """What can be made of the plan as it is and with ever fewer and longer pipelines, with micro-batches of its size
    and of smaller ones; see `loosened`. `may_pay` is asked of devices and micro-batches, before their layers are
    divided."""
    for smaller in (made for deeper in _deeper(plan) for made in with_smaller(deeper)):
        if may_pay(smaller):
            yield from loosened(smaller, costs)


def loosened(plan: Plan, costs: CostModel) -> Iterator[Plan]:
    """With optimizer state shared evenly, and by free memory, on devices alone, and on hosts, too. None of them need
    fit."""
    by_room = shared_by_room(plan, costs)
    for shared in (plan,) if by_room is plan else (plan, by_room):
        for offload in (False, True):
            made = relieved(shared, costs, offload=offload)
            if made is not None:
                yield made


def _deeper(plan: Plan) -> Iterator[Plan]:
    """Two pipelines become one, one stage after the other, again and again, where stages have one replica."""
    yield plan
    while len(plan.pipelines) > 1 and _single(plan):
        if 2 * max(len(pipeline.stages) for pipeline in plan.pipelines) > plan.num_layers + _ENDS:
            return
        pairs = itertools.zip_longest(plan.pipelines[::2], plan.pipelines[1::2])
        joined = [here if there is None else _chained(here, there) for here, there in pairs]
        plan = dataclasses.replace(plan, pipelines=tuple(joined), prediction=None)
        yield plan


def _chained(here: Pipeline, there: Pipeline) -> Pipeline:
    """Layers are even, for now, with an end of the model for each of two."""
    stages = [*here.stages, *there.stages]
    layers, count = here.stages[-1].last, len(stages)
    bounds = [min(layers, max(0, number * (layers + _ENDS) // count - 1)) for number in range(count + 1)]
    samples = here.samples + there.samples
    size = math.gcd(samples, min(here.micro_batch, there.micro_batch))
    made = (
        Stage(layers=((first, last),), replicas=(dataclasses.replace(stage.replicas[0], samples=size),))
        for stage, (first, last) in zip(stages, itertools.pairwise(bounds), strict=True)
    )
    return Pipeline(micro_batch=size, micro_batches=samples // size, stages=tuple(made))


def with_smaller(plan: Plan) -> Iterator[Plan]:
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


def least_step_s(plan: Plan, costs: CostModel) -> float:
    """At least, with these devices and micro-batches, however layers are divided: a bound on computing alone."""
    return max(_least_s(pipeline, plan.num_layers, costs) for pipeline in plan.pipelines)


def _least_s(pipeline: Pipeline, num_layers: int, costs: CostModel) -> float:
    block_s = [
        max(costs.part("block", one.node, one.tp, one.samples).total_s for one in stage.replicas if one.samples)
        for stage in pipeline.stages
    ]
    even_s = num_layers / sum(1 / seconds for seconds in block_s)
    return (pipeline.micro_batches - 1) * even_s + num_layers * min(block_s)


def relieved(plan: Plan, costs: CostModel, *, offload: bool) -> Plan | None:
    """With layers divided anew where stages have one replica each, and in every stage the mix of choices that costs
    least of those that fit; none where some stage has no such mix."""
    return _Relief(plan, costs, offload=offload).plan()


def _mapped(plan: Plan, change: Callable[[Stage], Stage]) -> Plan:
    pipelines = (
        dataclasses.replace(pipeline, stages=tuple(map(change, pipeline.stages))) for pipeline in plan.pipelines
    )
    return dataclasses.replace(plan, pipelines=tuple(pipelines), prediction=None)


class _Relief:
    """One plan. Every stage is as tight as its tightest replica; N stages of all pipelines, C choices."""

    def __init__(self, plan: Plan, costs: CostModel, *, offload: bool) -> None:
        self.costs = costs
        self._plan = plan
        self._loads: dict[Where, list[ReplicaLoad]] = {}
        for load in replica_loads(plan, costs, segments(plan, costs)):
            self._loads.setdefault((load.pipeline, load.stage), []).append(load)
        self._rows = {where: row for row, where in enumerate(self._loads)}
        recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
        offloads: tuple[Offload, ...] = ("none", "optimizer")
        found = [self._figures(*where) for where in self._rows]
        self._rooms = np.array([room for _, room in found])
        self._options = options(
            _stacked([figures for figures, _ in found]),
            recomputes=recomputes if costs.job.train.recompute != "none" else recomputes[:1],
            offloads=offloads if offload else offloads[:1],
        )

    def plan(self) -> Plan | None:
        counts = self._counts()
        if counts is None:
            return None
        seconds, taken = cheapest(self._options, counts, self._rooms)
        if not np.isfinite(seconds).all():
            return None
        pipelines = []
        for p, pipeline in enumerate(self._plan.pipelines):
            first, stages = 0, []
            for s, stage in enumerate(pipeline.stages):
                row = self._rows[p, s]
                last = first + int(counts[row])
                recompute, rest = overrides(first, self._options.choices, taken[row].tolist())
                stages.append(dataclasses.replace(stage, layers=((first, last),), recompute=recompute, overrides=rest))
                first = last
            pipelines.append(dataclasses.replace(pipeline, stages=tuple(stages)))
        return dataclasses.replace(self._plan, pipelines=tuple(pipelines), prediction=None, unused=(), reason="")

    def _counts(self) -> Ints | None:
        """Layers of each stage [N]."""
        plan, found = self._plan, np.zeros(len(self._rows), dtype=np.int64)
        times: Floats | None = None
        for p, pipeline in enumerate(plan.pipelines):
            rows = [self._rows[p, s] for s in range(len(pipeline.stages))]
            if len(rows) == 1 or max(len(stage.replicas) for stage in pipeline.stages) > 1:
                found[rows] = [stage.num_layers for stage in pipeline.stages]
                continue
            if times is None:
                times = self._times()
            least = np.array([0 if s in (0, len(rows) - 1) else 1 for s in range(len(rows))])
            increasing = np.maximum.accumulate(times[rows], axis=1)
            counts = divide(increasing, least, plan.num_layers, pipeline.micro_batches)
            if counts is None:
                return None
            found[rows] = counts
        return found

    def _times(self) -> Floats:
        """[N, L+1]: seconds of a micro-batch by layers, those on a few of the choices; inf where they do not fit."""
        layers, rows = np.arange(self._plan.num_layers + 1), len(self._rows)
        extra_s, _ = cheapest(
            _few(self._options, rows, len(layers)), np.tile(layers, rows), np.repeat(self._rooms, len(layers))
        )
        plain = np.array([self._seconds(*where) for where in self._rows])
        number = np.array([self._plan.pipelines[p].micro_batches for p, _ in self._rows])
        found: Floats = plain[:, 1:] + layers * plain[:, :1] + extra_s.reshape(rows, -1) / number[:, None]
        return found

    def _seconds(self, p: int, s: int) -> tuple[float, float]:
        """Of a micro-batch: for each block, and beside them."""
        costs, stages = self.costs, self._plan.pipelines[p].stages
        replica = stages[s].replicas[0]
        block_s = costs.part("block", replica.node, replica.tp, replica.samples).total_s
        ends = {"embedding": s == 0, "head": s + 1 == len(stages)}
        fixed_s = costs.stage(replica.node, replica.tp, replica.samples, {}, **ends).total_s
        if s + 1 < len(stages):
            fixed_s += hop_s(costs, replica.node, stages[s + 1].replicas[0].node, replica.samples)[0]
        return block_s, fixed_s

    def _figures(self, p: int, s: int) -> tuple[LayerFigures, float]:
        """Of each layer on the replica with the least room for each of them, and that room."""
        found = [self._figures_of(self._plan.pipelines[p], s, load) for load in self._loads[p, s]]
        return min(found, key=lambda entry: entry[1] / _most_bytes(entry[0]))

    def _figures_of(self, pipeline: Pipeline, s: int, load: ReplicaLoad) -> tuple[LayerFigures, float]:
        costs, replica, stages = self.costs, load.replica, pipeline.stages
        line = self._line(s, len(stages), replica)
        size, stage = ELEMENT_BYTES[costs.job.train.precision], stages[s]
        in_flight = min(len(stages) - s, pipeline.micro_batches)
        own = load.owned / _held(load, pipeline, stage, costs)  # as if all it holds were shared alike
        shards = load.shards
        state = size * (shards.weights + shards.near) + GRADIENT_BYTES * shards.gradients
        beside = load.memory.staging if shards.weights == shards.gradients == 1 else 0.0  # as `stage_memory` has it
        once = line.once(beside)
        fixed = load.memory.staging - beside + once + in_flight * line.flight
        fixed += line.end_elements * (state + OPTIMIZER_BYTES * own) + line.frozen_ends
        elements, node, tp = line.block_elements, replica.node, replica.tp
        samples = max(1, replica.samples)
        plain_s = costs.part("block", node, tp, samples).total_s
        figures = LayerFigures(
            micro_batches=pipeline.micro_batches,
            in_flight=in_flight,
            kept_bytes=line.block_flight["none"],
            selective_bytes=line.block_flight["selective"],
            full_bytes=line.block_flight["full"],
            again_bytes=line.once(beside, again=True) - once,
            selective_s=costs.part("block", node, tp, samples, "selective").total_s - plain_s,
            full_s=costs.part("block", node, tp, samples, "full").total_s - plain_s,
            weight_bytes=elements * size * (shards.weights + shards.near) + line.frozen_block,
            gradient_bytes=elements * GRADIENT_BYTES * shards.gradients,
            optimizer_bytes=elements * OPTIMIZER_BYTES * own,
            host_s=costs.update_s(node, elements * own, elements * own) - costs.update_s(node, elements * own),
        )
        return figures, usable_bytes(costs.device(node)) * (1 - _ROUNDING) - fixed

    def _line(self, s: int, num_stages: int, replica: Replica) -> StageBytes:
        train = self.costs.job.train
        return stage_bytes(
            self.costs.job.model,
            train.seq_len,
            train.precision,
            replica.tp,
            replica.samples,
            embedding=s == 0,
            head=s + 1 == num_stages,
        )


def _most_bytes(figures: LayerFigures) -> float:
    state = figures.weight_bytes + figures.gradient_bytes + figures.optimizer_bytes
    return float(state + figures.in_flight * figures.kept_bytes)


def _stacked(figures: list[LayerFigures]) -> LayerFigures:
    """Of all stages at once."""
    names = [entry.name for entry in dataclasses.fields(LayerFigures)]
    return LayerFigures(**{name: np.array([getattr(one, name) for one in figures], dtype=float) for name in names})


def _few(found: Options, rows: int, times: int) -> Options:
    """The same with a few of the choices, the smallest among them, and each of the stages so many times."""
    steps = [choice for choice in _STEPS if choice in found.choices]
    if len(steps) < 2:
        steps = [choice for choice in found.choices if choice.recompute != "selective"]
    columns = [found.choices.index(choice) for choice in steps]

    def some(figures: Floats) -> Floats:
        every = np.broadcast_to(figures, (rows, len(found.choices)))
        return np.repeat(every[:, columns], times, axis=0)

    return Options(
        choices=tuple(steps),
        seconds=some(found.seconds),
        micro_batch_s=some(found.micro_batch_s),
        bytes=some(found.bytes),
        peak_bytes=some(found.peak_bytes),
    )
