"""The parameters of a model and where tensor parallelism cuts them: the coordinates that all state is addressed by.

A *unit* is what one device holds as a whole or in tp slices: unit 0 is the embedding, unit 1 + i block i, and the last
unit final norm and head. With tied embeddings the head's weight *is* `embedding.weight`: one name, held wherever the
first or the last unit is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shoal_planner.job import ModelSpec
from shoal_planner.own_model import OwnShape, UnitShape
from shoal_planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One named tensor as stored: row-major `shape`, cut along dimension 0 by tensor parallelism or replicated.

    Stored shapes (N heads, K kv heads, D head size, H hidden, F inner width, V vocabulary):
    q [N*D, H], k and v [K*D, H], o [N*D, H] (used as x @ o), gate (if gated) and up [F, H], down [F, H] (used as
    x @ down), embedding and head [V, H], norms and the biases of o and down [H], other biases one element per row of
    their matrices and cut with these, norms of heads [D], positions [P, H]. Adapters of rank R beside a matrix are
    `lora_a` and `lora_b`: [R, H] and [rows, R], the latter cut, beside q, k, v, gate and up; beside o and down
    [rows, R] (used as x @ a), which is cut, and [H, R].
    A cut parameter's gradient on a tp rank covers that rank's rows; a replicated one's is the full gradient on every tp
    rank, so tp rank 0 alone contributes it. Of a user's own modules it is as these declare.
    `units` are the units that use it: two for a tied embedding.
    """

    fqn: str
    shape: tuple[int, ...]
    units: tuple[int, ...]
    cut: bool
    decay: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def interval(self, tp_rank: int, tp: int) -> tuple[int, int]:
        """The half-open interval of flat elements that this tp rank holds; rows are cut as evenly as possible."""
        if not self.cut:
            return 0, self.numel
        rows, stride = self.shape[0], self.numel // self.shape[0]
        return rows * tp_rank // tp * stride, rows * (tp_rank + 1) // tp * stride


@functools.lru_cache(maxsize=16)
def parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """All that is trained, in the order of units. Raises InvalidField for modules that nobody has looked at."""
    if model.lora is None:
        return _whole(model)
    return tuple(one for layer in range(model.layers) for name in model.lora.names for one in _pair(model, layer, name))


@functools.lru_cache(maxsize=16)
def frozen(model: ModelSpec) -> tuple[Parameter, ...]:
    """All that the model computes with and that is not trained, in the order of units."""
    return () if model.lora is None else _whole(model)


@functools.lru_cache(maxsize=16)
def without_adapters(model: ModelSpec) -> ModelSpec:
    """What adapters are beside; the model itself where there are none."""
    return model if model.lora is None else replace(model, lora=None)


ADAPTER_A, ADAPTER_B = "lora_a", "lora_b"
_SUMMED_OVER_ROWS = ("attention.o", "mlp.down")  # used as x @ W: tensor parallelism cuts their inputs


def is_summed_over_rows(name: str) -> bool:
    """Whether the matrix of a block of this name multiplies as x @ W, as its A then does."""
    return name in _SUMMED_OVER_ROWS


def _pair(model: ModelSpec, layer: int, name: str) -> tuple[Parameter, Parameter]:
    assert model.lora is not None
    rank, rows, hidden = model.lora.rank, model.matrix_rows[name], model.hidden
    over_rows = is_summed_over_rows(name)
    shapes = ((rows, rank), (hidden, rank)) if over_rows else ((rank, hidden), (rows, rank))
    first, second = (
        Parameter(fqn=f"layers.{layer}.{name}.{which}.weight", shape=shape, units=(layer + 1,), cut=cut, decay=True)
        for which, shape, cut in zip((ADAPTER_A, ADAPTER_B), shapes, (over_rows, not over_rows), strict=True)
    )
    return first, second


def _whole(model: ModelSpec) -> tuple[Parameter, ...]:
    if (own := model.own_shape) is not None:
        return tuple(_own(own))
    found = [
        _matrix("embedding.weight", model.vocab, model.hidden, (0, model.layers + 1) if model.tie_embeddings else (0,))
    ]
    if model.learned_positions is not None:
        shape = (model.learned_positions, model.hidden)
        found.append(Parameter(fqn="positions.weight", shape=shape, units=(0,), cut=False, decay=True))
    for layer in range(model.layers):
        found.extend(_block(model, layer))
    head = model.layers + 1
    found.extend(_norm(model, "final_norm", (head,)))
    if not model.tie_embeddings:
        found.append(_matrix("head.weight", model.vocab, model.hidden, (head,)))
    return tuple(found)


def own_prefix(shape: OwnShape, unit: int) -> str:
    """Of the names of all parameters of a unit, which are as its module says behind that."""
    if unit == 0:
        return "first."
    return "last." if unit > shape.layers else f"layers.{unit - 1}."


def _own(shape: OwnShape) -> Iterator[Parameter]:
    tied = dict(shape.tied)
    last = shape.layers + 1
    yield from _own_unit(shape, shape.first, 0, {name: (0, last) for name in tied.values()})
    for unit in range(1, last):
        yield from _own_unit(shape, shape.block, unit, {})
    yield from _own_unit(shape, shape.last, last, {})


def _own_unit(shape: OwnShape, of: UnitShape, unit: int, users: Mapping[str, tuple[int, ...]]) -> Iterator[Parameter]:
    for one in of.parameters:
        yield Parameter(
            fqn=f"{own_prefix(shape, unit)}{one.name}",
            shape=one.shape,
            units=users.get(one.name, (unit,)),
            cut=one.cut != "whole",
            decay=len(one.shape) > 1,
        )


def _block(model: ModelSpec, layer: int) -> list[Parameter]:
    prefix, units = f"layers.{layer}", (layer + 1,)
    found = _norm(model, f"{prefix}.attention_norm", units)
    inner = ("gate", "up") if model.gated_mlp else ("up",)
    rows = model.matrix_rows
    found.extend(_matrix(f"{prefix}.{name}.weight", count, model.hidden, units) for name, count in rows.items())
    found.extend(_norm(model, f"{prefix}.mlp_norm", units))
    cut = ("attention.q", "attention.k", "attention.v") * model.qkv_bias + tuple(
        f"mlp.{name}" for name in inner
    ) * model.mlp_bias
    found.extend(_vector(f"{prefix}.{name}.bias", rows[name], units, cut=True) for name in cut)
    whole = ("attention.o",) * model.out_bias + ("mlp.down",) * model.mlp_bias
    found.extend(_vector(f"{prefix}.{name}.bias", model.hidden, units) for name in whole)
    heads = ("attention.q_norm", "attention.k_norm") * model.qk_norm
    found.extend(_vector(f"{prefix}.{name}.weight", model.head_size, units) for name in heads)
    return found


def _norm(model: ModelSpec, name: str, units: tuple[int, ...]) -> list[Parameter]:
    kinds = ("weight", "bias") if model.norm == "layer" else ("weight",)
    return [_vector(f"{name}.{kind}", model.hidden, units) for kind in kinds]


def _vector(fqn: str, count: int, units: tuple[int, ...], *, cut: bool = False) -> Parameter:
    return Parameter(fqn=fqn, shape=(count,), units=units, cut=cut, decay=False)


def _matrix(fqn: str, rows: int, columns: int, units: tuple[int, ...]) -> Parameter:
    return Parameter(fqn=fqn, shape=(rows, columns), units=units, cut=True, decay=True)


def num_parameters(model: ModelSpec) -> int:
    """That are trained."""
    return sum(parameter.numel for parameter in parameters(model))


def stage_units(plan: Plan, pipeline: int, stage: int) -> tuple[int, ...]:
    """The units that the ranks of this stage hold, ascending."""
    return tuple(unit for units in chunk_units(plan, pipeline, stage) for unit in units)


def chunk_units(plan: Plan, pipeline: int, stage: int) -> tuple[tuple[int, ...], ...]:
    """The same, by chunk."""
    stages = plan.pipelines[pipeline].stages
    chunks = [[block + 1 for block in range(first, last)] for first, last in stages[stage].layers]
    if stage == 0:
        chunks[0].insert(0, 0)
    if stage == len(stages) - 1:
        chunks[-1].append(plan.num_layers + 1)
    return tuple(map(tuple, chunks))


def degrees_of(model: ModelSpec, most: int) -> tuple[int, ...]:
    """The degrees of tensor parallelism that divide the heads and the key heads, up to `most`."""
    return tuple(tp for tp in range(1, most + 1) if model.heads % tp == 0 and model.num_kv_heads % tp == 0)
