"""Layers whose weights and gradients each replica keeps whole, where its plan splits those of the others.

OSDP chooses so operator by operator: what is whole is passed round once a step, what is split in every micro-batch, and
beside computing as far as that takes as long. Equal layers cost and spare the same; what of them stays exposed is a
maximum of lines in their number, so that the seconds of a step are convex in it, and the best number is found by
halving. With more memory there are more to choose from. Owns that number; what it brings `score` says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.loads import ReplicaLoad, replica_loads, segments
from shoal_planner.memory import ELEMENT_BYTES, GRADIENT_BYTES, part_elements, usable_bytes
from shoal_planner.plan import Override, Plan, Stage
from shoal_planner.score import score_with, step_s
from shoal_planner.sharding import shares_inside


def with_whole_layers(plan: Plan, costs: CostModel, enough_s: float = math.inf) -> tuple[float, Plan]:
    """A plan that was scored, with the number of whole layers that is best, which may be none. And the seconds of its
    steps where what is passed round goes on beside computing, if the job allows that: for these it is chosen. None is
    looked for where no number could take less than `enough_s`."""
    if not shares_inside(plan):
        return step_s(plan), plan
    found = _Numbers(plan, costs)
    none_s = found.seconds(0)
    spared_s = found.part() * _exchanged_s(plan)
    if found.exposed_s() > 0 and none_s - spared_s < enough_s and found.one_betters():
        low, high = 1, found.most()
        while low < high:
            middle = (low + high) // 2
            if found.seconds(middle + 1) < found.seconds(middle):
                low = middle + 1
            else:
                high = middle
        return found.seconds(low), score_with(found.plan(low), costs)
    return none_s, plan


class _Numbers:
    """Of whole layers of a plan: of each stage so many, or as many as fit there if that is less."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan = plan
        self._costs = costs
        self._counts = _counts(plan, costs)
        self._scored: dict[int, Plan] = {}

    def plan(self, number: int) -> Plan:
        return _keeping(self._plan, [[min(number, count) for count in counts] for counts in self._counts])

    def part(self) -> float:
        """Of all layers, at most."""
        total = sum(stage.num_layers for pipeline in self._plan.pipelines for stage in pipeline.stages)
        return sum(map(sum, self._counts)) / total

    def exposed_s(self) -> float:
        """What is not hidden where no layer is whole."""
        return _exchanged_s(self._hidden(0))

    def one_betters(self) -> bool:
        """Else no number does."""
        try:
            return self.part() > 0 and self.seconds(1) < self.seconds(0)
        except NoPlanFits:
            return False

    def most(self) -> int:
        """The largest number that fits: exchanged whole, layers need larger buffers than they are counted with."""
        number = max(map(max, self._counts))
        while number:
            try:
                self.seconds(number)
            except NoPlanFits:
                number -= 1
            else:
                break
        return number

    def seconds(self, number: int) -> float:
        """Raises NoPlanFits."""
        return step_s(self._hidden(number))

    def _hidden(self, number: int) -> Plan:
        if number not in self._scored:
            self._scored[number] = _hidden(self.plan(number) if number else self._plan, self._costs)
        return self._scored[number]


def _hidden(plan: Plan, costs: CostModel) -> Plan:
    overlap = dataclasses.replace(plan.overlap, shards=costs.job.train.overlap != "none")
    if plan.prediction is not None and overlap == plan.overlap:
        return plan
    return score_with(dataclasses.replace(plan, overlap=overlap, prediction=None), costs)


def _counts(plan: Plan, costs: CostModel) -> list[list[int]]:
    """By pipeline and stage, as many as fit but for the buffers that they need."""
    found = [[stage.num_layers if len(stage.layers) == 1 else 0 for stage in p.stages] for p in plan.pipelines]
    for load in replica_loads(plan, costs, segments(plan, costs)):
        if load.replica.samples:
            counts = found[load.pipeline]
            counts[load.stage] = min(counts[load.stage], _count(load, costs))
    return found


def _count(load: ReplicaLoad, costs: CostModel) -> int:
    its, size = load.shards, ELEMENT_BYTES[costs.job.train.precision]
    each = size * (1 - its.weights - its.near) + GRADIENT_BYTES * (1 - its.gradients)
    room = usable_bytes(costs.device(load.replica.node)) - load.memory.total
    elements = part_elements(costs.job.model, "block", load.replica.tp)
    return int(room / (each * elements)) if each * elements > 0 else 0


def _exchanged_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.terms.gradient_s


def _keeping(plan: Plan, counts: list[list[int]]) -> Plan:
    pipelines = tuple(
        dataclasses.replace(
            pipeline,
            stages=tuple(
                _whole_from(stage, stage.last - count) if count else stage
                for stage, count in zip(pipeline.stages, numbers, strict=True)
            ),
        )
        for pipeline, numbers in zip(plan.pipelines, counts, strict=True)
    )
    return dataclasses.replace(plan, pipelines=pipelines, prediction=None)


def _whole_from(stage: Stage, border: int) -> Stage:
    """The last layers, as the first ones may be computed again, and so exchanged once more where units have slices."""
    return dataclasses.replace(stage, overrides=tuple(_entries(stage, border)))


def _entries(stage: Stage, border: int) -> Iterator[Override]:
    for entry in stage.overrides:
        if entry.layers[0] < border:
            yield dataclasses.replace(entry, layers=(entry.layers[0], min(entry.layers[1], border)))
    reached = border
    for entry in stage.overrides:
        low, high = max(entry.layers[0], border), entry.layers[1]
        if low < high:
            if reached < low:
                yield Override(layers=(reached, low), sharding="none")
            yield dataclasses.replace(entry, layers=(low, high), sharding="none")
            reached = high
    if reached < stage.last:
        yield Override(layers=(reached, stage.last), sharding="none")
