"""Operator splitting (OSDP): where a stage cuts the large matrices of its units into slices, which are gathered, used
and released one after the other.

The *portions* of a unit have numbers. Portion 0 is what is not cut: all of a unit where a stage has one slice, else its
vectors and its table of positions. The others are its slices, in the order in which a forward uses them: of attention
by key-value heads, with the query heads that go with them; of the MLP by inner rows; at the ends by rows of the
vocabulary. Tensor parallelism cuts first, so that each rank has a part of every slice.

Owns these intervals. Does not own when slices pay (`teams`), nor what passes by them (`sharding`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import Parameter, parameters
from shoal_planner.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """Of all units of a stage: into how many slices its replicas cut what each of their `tp` ranks holds. Attention has
    fewer where there are fewer key-value heads."""

    slices: int = 1
    tp: int = 1


UNCUT = Slicing()


def slicing_of(stage: Stage) -> Slicing:
    return Slicing(slices=stage.slices, tp=stage.replicas[0].tp) if stage.slices > 1 else UNCUT


def check_slices(plan: Plan, model: ModelSpec) -> None:
    """Raises InvalidField, naming the first stage that this model and the rest of the plan cannot have in slices, or a
    schedule that is not for adapters."""
    if model.lora is not None and plan.schedule == "zero_bubble":
        raise InvalidField("schedule", plan.schedule, "puts gradients of weights off, and adapters have hardly any")
    splits = plan.sharding.weights != "none" or plan.sharding.gradients != "none"
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            problem = "" if stage.slices == 1 else _problem(stage, model, plan, splits=splits)
            if problem:
                raise InvalidField(f"pipelines[{p}].stages[{s}].slices", stage.slices, problem)


def _problem(stage: Stage, model: ModelSpec, plan: Plan, *, splits: bool) -> str:
    degrees = sorted({replica.tp for replica in stage.replicas})
    most = most_slices(model, degrees[-1])
    if stage.slices < 1:
        return "must be at least 1"
    if model.module is not None:
        return "must be 1: modules of a user's own are not cut into slices"
    if model.lora is not None:
        return "must be 1 where adapters are trained: what is frozen does not come together in a step"
    if not splits:
        return "must be 1 where sharding splits neither weights nor gradients: then nothing comes together in a step"
    if plan.schedule == "zero_bubble":
        return "must be 1 where the schedule is 'zero_bubble', which puts gradients of weights off"
    if plan.overlap.tensor_chunks > 1:
        return "must be 1 where overlap.tensor_chunks is more: sums of slices do not come in chunks"
    if len(degrees) > 1:
        return f"must be 1 where the replicas of a stage have different tp ({', '.join(map(str, degrees))})"
    if stage.slices > most:
        return f"must be at most {most}: so many rows of the MLP or of the vocabulary each tp rank has"
    return ""


def most_slices(model: ModelSpec, tp: int) -> int:
    """So many rows of the MLP or of the vocabulary each tp rank has."""
    return 1 if model.module is not None else min(model.ffn, model.vocab) // tp


class Portion(NamedTuple):
    unit: int
    number: int = 0


class Cut(NamedTuple):
    """Elements [first, last) of a parameter belong to the portion of this number, of each unit that uses it."""

    number: int
    first: int
    last: int


class _Operator(NamedTuple):
    """Matrices that are used together: how many equal parts their rows have that no slice cuts, in how many slices they
    come, and the number of the first one."""

    parts: int
    slices: int
    first: int


def num_slices(model: ModelSpec, unit: int, slicing: Slicing) -> int:
    """How many portions the unit has beside portion 0."""
    if slicing.slices == 1:
        return 0
    if 0 < unit <= model.layers:
        return _attention_slices(model, slicing) + slicing.slices
    return slicing.slices


@functools.lru_cache(maxsize=65536)
def cuts(model: ModelSpec, parameter: Parameter, slicing: Slicing) -> tuple[Cut, ...]:
    """All of a parameter, in the order of its elements."""
    if slicing.slices == 1 or not parameter.cut or len(parameter.shape) == 1:
        return (Cut(0, 0, parameter.numel),)
    operator = _operator(model, parameter, slicing)
    each = parameter.numel // operator.parts
    return tuple(Cut(number, first * each, last * each) for number, first, last in _ranges(operator, slicing.tp))


@functools.lru_cache(maxsize=4096)
def largest_portion(model: ModelSpec, unit: int, slicing: Slicing) -> int:
    """Elements of the largest slice of the unit on one rank and of its vectors, which are there at the same time; of
    the whole unit where nothing is cut."""
    sizes: dict[int, int] = {}
    for parameter in parameters(model):
        if unit in parameter.units:
            first, last = parameter.interval(slicing.tp - 1, slicing.tp)  # the largest
            for cut in cuts(model, parameter, slicing):
                ours = min(cut.last, last) - max(cut.first, first)
                if ours > 0:
                    sizes[cut.number] = sizes.get(cut.number, 0) + ours
    return sizes.get(0, 0) + max((size for number, size in sizes.items() if number), default=0)


def _attention_slices(model: ModelSpec, slicing: Slicing) -> int:
    return min(slicing.slices, model.num_kv_heads // slicing.tp)


def _operator(model: ModelSpec, parameter: Parameter, slicing: Slicing) -> _Operator:
    if ".attention." in parameter.fqn:
        return _Operator(model.num_kv_heads, _attention_slices(model, slicing), 1)
    if ".mlp." in parameter.fqn:
        return _Operator(model.ffn, slicing.slices, 1 + _attention_slices(model, slicing))
    return _Operator(model.vocab, slicing.slices, 1)


def _ranges(operator: _Operator, tp: int) -> Iterator[tuple[int, int, int]]:
    """The number of each slice and its parts, rank by rank."""
    for rank in range(tp):
        low, high = operator.parts * rank // tp, operator.parts * (rank + 1) // tp
        for index in range(operator.slices):
            first, last = (low + (high - low) * place // operator.slices for place in (index, index + 1))
            yield operator.first + index, first, last
