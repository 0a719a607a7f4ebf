"""Why a plan takes the time that it does, as values: candidates side by side, terms, what binds, what is left out.

Owns the figures and sentences that need no other plan. What exchanges take by other algorithms is asked from
`exchange_choices`, why devices are left out from `left_out`, what others would bring from `marginals`; how it is shown
is the reader's affair.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal_planner.cluster import GIB
from shoal_planner.costs import CostModel
from shoal_planner.exchange_choices import Exchanged, exchanged
from shoal_planner.explain import describe, shape
from shoal_planner.kinds import devices_text, kinds, nodes_by_id, stage_text
from shoal_planner.loads import replica_loads, segments
from shoal_planner.memory import usable_bytes
from shoal_planner.plan import Plan, Prediction, Terms
from shoal_planner.predict import pipeline_s, stage_times

MAX_CANDIDATES = 6
_NEARLY_FULL = 0.95
_NAMES = {
    "compute_s": "computing",
    "bubble_s": "waiting for other stages and pipelines",
    "tensor_s": "exchanges of tensor parallelism",
    "pipeline_s": "transfers between stages",
    "gradient_s": "summing gradients and gathering weights",
    "optimizer_s": "vote and optimizer",
}
_NETWORK = ("tensor_s", "pipeline_s", "gradient_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A term of the prediction; all `share`s of a plan add up to one."""

    name: str
    meaning: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A plan that the search weighed. `behind` is how much longer than the chosen one it takes (0.1: ten percent)."""

    plan: str
    chosen: bool
    step_s: float
    behind: float
    tokens_per_s: float
    price_per_million_tokens: float
    num_devices: int
    terms: Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The slowest pipeline and its slowest stage, with seconds per micro-batch; all other pipelines are as fast or
    faster: the fastest takes `fastest_pipeline_s`."""

    pipeline: int
    pipeline_s: float
    fastest_pipeline_s: float
    micro_batches: int
    stage: int
    holds: str
    devices: str
    device_type: str
    stage_s: float
    fastest_stage_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The device that is nearest to its limit; `usable_bytes` leaves out what is always kept free."""

    device: str
    used_bytes: float
    usable_bytes: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What holds the plan back. `term` is the largest term, `network_share` that of all exchanges."""

    term: str
    bottleneck: Bottleneck
    memory: Memory
    network_share: float
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Devices of one type that the plan does not use. `step_s` is that of the best variant of the plan in which one of
    them has a part of the work, `behind` how much longer it takes; None where none was tried or `problem` says why."""

    device_type: str
    devices: tuple[str, ...]
    reason: str
    step_s: float | None = None
    behind: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marginal:
    """What one more device (in a machine of its own), or one more node like `like`, would bring to the best plan.
    `gain` is relative throughput; prices count the nodes that are used."""

    adds: str
    like: str
    device_type: str
    num_devices: int
    step_s: float
    tokens_per_s: float
    gain: float
    price_per_million_tokens: float
    used: bool
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`num_plans` is how many more searches it took; `skipped` says what was not asked because of their bound."""

    reason: str
    candidates: tuple[Compared, ...]
    terms: tuple[Term, ...]
    binding: Binding
    exchanges: tuple[Exchanged, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    marginals: tuple[Marginal, ...] = ()
    num_plans: int = 0
    skipped: str = ""


def explanation(plan: Plan, costs: CostModel, finalists: Iterable[Plan] = ()) -> Explanation:
    """Of a plan with a prediction, without any search; `finalists` are other plans with predictions."""
    predicted = prediction_of(plan)
    return Explanation(
        reason=plan.reason,
        candidates=_compared(plan, costs, finalists),
        terms=_terms(predicted),
        binding=_binding(plan, costs),
        exchanges=exchanged(plan, costs),
    )


def explanation_to_mapping(found: Explanation) -> dict[str, Any]:
    """Plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(found)))
    return plain


def prediction_of(plan: Plan) -> Prediction:
    assert plan.prediction is not None, "only a plan that was scored can be explained"
    return plan.prediction


def _terms(predicted: Prediction) -> tuple[Term, ...]:
    return tuple(
        Term(
            name=name,
            meaning=meaning,
            seconds=max(0.0, getattr(predicted.terms, name)),  # a difference of sums may come out as less than nothing
            share=max(0.0, getattr(predicted.terms, name)) / predicted.step_s,
        )
        for name, meaning in _NAMES.items()
    )


def _compared(plan: Plan, costs: CostModel, finalists: Iterable[Plan]) -> tuple[Compared, ...]:
    """The chosen plan first, then those of other shapes, fastest first."""
    shapes = {shape(plan, costs.snapshot): plan}
    others = [other for other in finalists if other.prediction is not None]
    for other in sorted(others, key=lambda found: (prediction_of(found).step_s, found.plan_id)):
        shapes.setdefault(shape(other, costs.snapshot), other)
    best_s = prediction_of(plan).step_s
    return tuple(
        Compared(
            plan=describe(found, costs.snapshot),
            chosen=found is plan,
            step_s=prediction_of(found).step_s,
            behind=prediction_of(found).step_s / best_s - 1,
            tokens_per_s=prediction_of(found).tokens_per_s,
            price_per_million_tokens=prediction_of(found).price_per_million_tokens,
            num_devices=len(found.devices()),
            terms=prediction_of(found).terms,
        )
        for found in list(shapes.values())[:MAX_CANDIDATES]
    )


def _binding(plan: Plan, costs: CostModel) -> Binding:
    terms = {term.name: term for term in _terms(prediction_of(plan))}
    largest = max(terms.values(), key=lambda term: term.seconds)
    bottleneck, memory = _bottleneck(plan, costs), _fullest(plan, costs)
    network_share = sum(terms[name].share for name in _NETWORK)
    sentences = (
        f"{largest.share:.1%} of the step goes into {largest.meaning}",
        _pace(plan, costs, bottleneck),
        _room(memory) + _hosted(prediction_of(plan)),
        f"exchanges that nothing hides take {network_share:.1%} of the step",
    )
    return Binding(
        term=largest.name, bottleneck=bottleneck, memory=memory, network_share=network_share, sentences=sentences
    )


def _bottleneck(plan: Plan, costs: CostModel) -> Bottleneck:
    by_pipeline = defaultdict(list)
    for load in replica_loads(plan, costs, segments(plan, costs)):
        by_pipeline[load.pipeline].append(load)
    ahead = plan.overlap.stages
    stages = [stage_times(pipeline, by_pipeline[p], costs, ahead=ahead) for p, pipeline in enumerate(plan.pipelines)]
    times = [[stage.total_s for stage in found] for found in stages]
    whole = [
        pipeline_s(plan.schedule, pipeline, by_pipeline[p], stages[p], costs)
        for p, pipeline in enumerate(plan.pipelines)
    ]
    p = max(range(len(whole)), key=whole.__getitem__)
    s = max(range(len(times[p])), key=times[p].__getitem__)
    slowest = max(
        (load for load in by_pipeline[p] if load.stage == s and load.replica.samples),
        key=lambda load: load.total_s,
    )
    return Bottleneck(
        pipeline=p,
        pipeline_s=whole[p],
        fastest_pipeline_s=min(whole),
        micro_batches=plan.pipelines[p].micro_batches,
        stage=s,
        holds=stage_text(plan.pipelines[p], s),
        devices=devices_text(slowest.replica),
        device_type=costs.device(slowest.replica.node).name,
        stage_s=times[p][s],
        fastest_stage_s=min(times[p]),
    )


def _fullest(plan: Plan, costs: CostModel) -> Memory:
    have = {str(place.device): usable_bytes(costs.device(place.device.node)) for place in plan.places()}
    device, used = max(prediction_of(plan).memory_bytes, key=lambda entry: entry[1] / have[entry[0]])
    return Memory(device=device, used_bytes=used, usable_bytes=have[device], share=used / have[device])


def _pace(plan: Plan, costs: CostModel, found: Bottleneck) -> str:
    kind = next(kind for kind in kinds(plan, nodes_by_id(costs.snapshot)) if found.pipeline in kind.pipelines)
    alike = f" (one of {len(kind.pipelines)} alike)" if len(kind.pipelines) > 1 else ""
    text = (
        f"pipeline {found.pipeline}{alike} sets the pace with {found.pipeline_s:.3g} s for {found.micro_batches} "
        f"micro-batches; its slowest stage holds {found.holds} on {found.devices} ({found.device_type}) and takes "
        f"{found.stage_s:.3g} s each"
    )
    stages = len(plan.pipelines[found.pipeline].stages)
    text += f", the fastest of its {stages} stages {found.fastest_stage_s:.3g} s" if stages > 1 else ""
    others = len(plan.pipelines) > 1
    return text + (f"; the fastest pipeline is done after {found.fastest_pipeline_s:.3g} s" if others else "")


def _room(memory: Memory) -> str:
    text = (
        f"the fullest device is {memory.device}: {memory.used_bytes / GIB:.3g} of {memory.usable_bytes / GIB:.3g} GiB "
        f"that a plan may use ({memory.share:.0%})"
    )
    return text + (", so memory binds too" if memory.share > _NEARLY_FULL else ", so memory does not bind")


def _hosted(predicted: Prediction) -> str:
    if not predicted.host_bytes:
        return ""
    each = [num_bytes / GIB for _, num_bytes in predicted.host_bytes]
    return f"; hosts keep {sum(each):.3g} GiB of optimizer state, up to {max(each):.3g} GiB for a device"
