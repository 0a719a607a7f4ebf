"""The same devices under another schedule: what a plan found for 1F1B becomes when its stages take turns differently.

Owns how the layers of a stage are dealt out to its chunks, and which of a job's plans are tried with which schedule.
Does not own how plans are judged (`score`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from shoal_planner.chunks import Chunks
from shoal_planner.costs import CostModel
from shoal_planner.plan import Override, Pipeline, Plan, Stage
from shoal_planner.score import step_s

MAX_CHUNKS = 8  # of a stage: more send ever more often for ever less
_TRIED = 32  # plans of a search, those first that would be fastest if their stages waited half as long
# Shorter steps than with 1F1B by less than this are no reason for more messages and more memory.
_SURELY = 1 - 5e-4

Score = Callable[[Plan], Plan | None]


def with_schedules(found: Iterable[Plan], costs: CostModel, score: Score) -> list[Plan]:
    """Of plans with 1F1B that fit, fastest first, those that the job's `train.schedule` allows: with `auto` all of them
    and what is faster under another schedule; with a schedule by name what they become under it, if it fits, which may
    be with one chunk alone."""
    wanted, plain = costs.job.train.schedule, list(found)
    if wanted == "1f1b":
        return plain
    if wanted != "auto":
        return [made for plan in plain for made in _by_name(plan, wanted, costs, score)]
    faster: list[Plan] = []
    best_s = min(map(step_s, plain), default=math.inf)
    for plan in sorted(plain, key=lambda found: step_s(found) - _bubble_s(found) / 2)[:_TRIED]:
        if step_s(plan) - _bubble_s(plan) >= _SURELY * best_s:
            continue  # however little its stages wait
        for changed in itertools.chain(_under(plan, "interleaved", costs), _under(plan, "zero_bubble", costs)):
            scored = score(changed)
            if scored is not None and step_s(scored) < _SURELY * step_s(plan):
                faster.append(scored)
                best_s = min(best_s, step_s(scored))
    return plain + faster


def _by_name(plan: Plan, schedule: str, costs: CostModel, score: Score) -> list[Plan]:
    made = [scored for changed in _under(plan, schedule, costs) if (scored := score(changed))]
    if made or schedule != "interleaved":
        return made
    scored = score(dataclasses.replace(_plain(plan), schedule="interleaved"))
    return [] if scored is None else [scored]


def _plain(plan: Plan) -> Plan:
    return dataclasses.replace(plan, prediction=None, unused=(), reason="")


def _bubble_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.terms.bubble_s


def _under(plan: Plan, schedule: str, costs: CostModel) -> Iterator[Plan]:
    plain = _plain(plan)
    if schedule == "zero_bubble":
        model = costs.job.model
        if model.lora is None and model.module is None:  # else nothing is put off
            yield dataclasses.replace(plain, schedule="zero_bubble")
        return
    most = max(map(_most_chunks, plan.pipelines))
    for count in range(2, most + 1) if most > 1 else (1,):
        pipelines = tuple(_in_chunks(pipeline, count, costs) for pipeline in plan.pipelines)
        yield dataclasses.replace(plain, schedule="interleaved", pipelines=pipelines)


def _most_chunks(pipeline: Pipeline) -> int:
    """The first stage's first chunk and the last one's last chunk may hold no layer, all others must."""
    if len(pipeline.stages) == 1:
        return 1
    ends = {0, len(pipeline.stages) - 1}
    return min(MAX_CHUNKS, *(stage.num_layers + (s in ends) for s, stage in enumerate(pipeline.stages)))


def _in_chunks(pipeline: Pipeline, count: int, costs: CostModel) -> Pipeline:
    """With so many chunks in each stage, or as many as it can have; every stage has as many layers as before."""
    count = min(count, _most_chunks(pipeline))
    sizes = [_sizes(pipeline, s, count, costs) for s in range(len(pipeline.stages))]
    chunks: list[list[tuple[int, int]]] = [[] for _ in pipeline.stages]
    reached = 0
    for chunk in range(count):
        for s, mine in enumerate(chunks):
            mine.append((reached, reached + sizes[s][chunk]))
            reached += sizes[s][chunk]
    stages = tuple(_with_chunks(stage, tuple(mine)) for stage, mine in zip(pipeline.stages, chunks, strict=True))
    return dataclasses.replace(pipeline, stages=stages)


def _sizes(pipeline: Pipeline, s: int, count: int, costs: CostModel) -> list[int]:
    """Layers of each chunk: of even seconds, with the ends of the model. What is left over goes where nobody waits: in
    the first stage to the last chunks, elsewhere to the first ones."""
    stage, first, last = pipeline.stages[s], s == 0, s == len(pipeline.stages) - 1
    replica = max(stage.replicas, key=lambda found: found.samples)
    block_s = costs.part("block", replica.node, replica.tp, replica.samples).total_s
    seconds = [0.0] * count
    if first:
        seconds[0] += costs.part("embedding", replica.node, replica.tp, replica.samples).total_s
    if last:
        seconds[-1] += costs.part("head", replica.node, replica.tp, replica.samples).total_s
    may_be_empty = {0} if first else {count - 1} if last else set()
    sizes = [int(chunk not in may_be_empty) for chunk in range(count)]
    order = range(count - 1, -1, -1) if first else range(count)
    for _ in range(stage.num_layers - sum(sizes)):
        lightest = min(order, key=lambda chunk: seconds[chunk] + sizes[chunk] * block_s)
        sizes[lightest] += 1
    return sizes


def _with_chunks(stage: Stage, chunks: Chunks) -> Stage:
    """The n-th layer of the stage keeps what holds for it, whichever layer of the model it is now."""
    before = [block for first, last in stage.layers for block in range(first, last)]
    after = [block for first, last in chunks for block in range(first, last)]
    starts = {first for first, _ in chunks}
    overrides: list[Override] = []
    for override in stage.overrides:
        runs: list[list[int]] = []
        for old, new in zip(before, after, strict=True):
            if override.layers[0] <= old < override.layers[1]:
                if runs and runs[-1][-1] == new - 1 and new not in starts:
                    runs[-1].append(new)
                else:
                    runs.append([new])
        overrides += [dataclasses.replace(override, layers=(run[0], run[-1] + 1)) for run in runs]
    return dataclasses.replace(stage, layers=chunks, overrides=tuple(overrides))
