"""The parameters of a model and where tensor parallelism cuts them: the coordinates that all state is addressed by.

A *unit* is what one device holds as a whole or in tp slices: unit 0 is the embedding, unit 1 + i block i, and the last
unit final norm and head. With tied embeddings the head's weight *is* `embedding.weight`: one name, held wherever the
first or the last unit is.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from shoal_planner.job import ModelSpec
from shoal_planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One named tensor as stored: row-major `shape`, cut along dimension 0 by tensor parallelism or replicated.

    Stored shapes (N heads, K kv heads, D head size, H hidden, F inner width, V vocabulary):
    q [N*D, H], k and v [K*D, H], o [N*D, H] (used as x @ o), gate (if gated) and up [F, H], down [F, H] (used as
    x @ down), embedding and head [V, H], norms [H].
    A cut parameter's gradient on a tp rank covers that rank's rows; a replicated one's is the full gradient on every tp
    rank, so tp rank 0 alone contributes it. `units` are the units that use it: two for a tied embedding.
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
    """All parameters in the order of their units."""
    found = [
        _matrix("embedding.weight", model.vocab, model.hidden, (0, model.layers + 1) if model.tie_embeddings else (0,))
    ]
    for layer in range(model.layers):
        found.extend(_block(model, layer))
    head = model.layers + 1
    found.append(Parameter(fqn="final_norm.weight", shape=(model.hidden,), units=(head,), cut=False, decay=False))
    if not model.tie_embeddings:
        found.append(_matrix("head.weight", model.vocab, model.hidden, (head,)))
    return tuple(found)


def _block(model: ModelSpec, layer: int) -> list[Parameter]:
    prefix, units = f"layers.{layer}", (layer + 1,)
    rows = {
        "attention.q.weight": model.heads * model.head_dim,
        "attention.k.weight": model.num_kv_heads * model.head_dim,
        "attention.v.weight": model.num_kv_heads * model.head_dim,
        "attention.o.weight": model.heads * model.head_dim,
        **({"mlp.gate.weight": model.ffn} if model.gated_mlp else {}),
        "mlp.up.weight": model.ffn,
        "mlp.down.weight": model.ffn,
    }
    norms = [
        Parameter(fqn=f"{prefix}.{name}.weight", shape=(model.hidden,), units=units, cut=False, decay=False)
        for name in ("attention_norm", "mlp_norm")
    ]
    return [
        norms[0],
        *(_matrix(f"{prefix}.{name}", count, model.hidden, units) for name, count in rows.items()),
        norms[1],
    ]


def _matrix(fqn: str, rows: int, columns: int, units: tuple[int, ...]) -> Parameter:
    return Parameter(fqn=fqn, shape=(rows, columns), units=units, cut=True, decay=True)


def num_parameters(model: ModelSpec) -> int:
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
