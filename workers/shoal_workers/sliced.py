"""Operators whose weights come in slices: autograd functions that enter and leave each slice in its turn, forward and
backward.

Owns the order. What enters one slice comes out of the one before it, so its gradient is complete, and the slice left,
before the backward enters the slice before. Does not own where weights come from: that is up to the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_workers.products import AddProduct


class Gate(Protocol):
    """Between `enter` and `leave` the weights of a slice are there, and in a backward their gradients add up."""

    def enter_forward(self) -> None: ...

    def leave_forward(self) -> None: ...

    def enter_backward(self) -> None: ...

    def leave_backward(self) -> None: ...


class BiasRows(NamedTuple):
    vector: Tensor
    rows: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some rows of an operator's weights, from `first_row` on, and of the biases of the first ones, if they have any.
    Without a gate they are there already; biases always are."""

    weights: tuple[Tensor, ...]
    first_row: int = 0
    gate: Gate | None = None
    biases: tuple[BiasRows, ...] = ()

    def bias_rows(self) -> tuple[Tensor, ...]:
        """Inside the slice: before, the vectors may have no memory yet."""
        return tuple(vector[rows.start : rows.stop] for vector, rows in self.biases)


def added(x: Tensor, slices: Sequence[Slice], compute: Callable[[Tensor, Slice], Tensor]) -> Tensor:
    """The sum of what `compute` gives for x and each of the slices. Whatever computes that must not need it for its
    backward, as no matrix product does: it is added up in place."""
    total: Tensor | None = None
    for one in slices:
        x, total = _through(x, one, compute, total)
    assert total is not None, "no slices"
    return total


def each(x: Tensor, slices: Sequence[Slice], compute: Callable[[Tensor, Slice], Tensor]) -> tuple[Tensor, ...]:
    """What `compute` gives for x and each of the slices."""
    found = []
    for one in slices:
        x, made = _through(x, one, compute, None)
        found.append(made)
    return tuple(found)


def rows_of(turn: Tensor, one: Slice, *, tokens_BS: Tensor, add_rows: AddProduct) -> Tensor:
    """The slice's rows of the embedding, zeros for tokens that are not among them. Nothing flows back to tokens: in the
    order of slices `turn`, of no elements, stands for them."""
    return cast(Tensor, _Rows.apply(turn, tokens_BS, one.weights, one.first_row, add_rows))  # type: ignore[no-untyped-call]


def _through(
    x: Tensor, one: Slice, compute: Callable[[Tensor, Slice], Tensor], total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What enters the next slice, and what came out of this one, with the total if there is one."""
    if one.gate is None:
        assert total is None, "a slice is either the only one, or comes through a gate"
        return x, compute(x, one)
    x = cast(Tensor, _Enter.apply(x, one.gate))  # type: ignore[no-untyped-call]
    found = _Leave.apply(x, compute(x, one), total, one.gate)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], found)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        gate.enter_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gate.leave_backward()
        return gradients[0], None


class _Leave(torch.autograd.Function):
    """x goes on to the next slice, if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Tensor, total: Tensor | None, gate: Gate) -> tuple[Tensor, Tensor]:
        ctx.gate, ctx.is_first = gate, total is None
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(made)
        if total is not None:
            made.add_(total)
        gate.leave_forward()
        return x.view_as(x), made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gate.enter_backward()
        onward, made = gradients
        return onward, made, None if ctx.is_first else made, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, turn: Tensor, tokens_BS: Tensor, weights: tuple[Tensor], first_row: int, add_rows: AddProduct
    ) -> Tensor:
        local_BS = tokens_BS - first_row
        inside_BS = (local_BS >= 0) & (local_BS < len(weights[0]))
        ctx.weights, ctx.add_rows = weights, add_rows
        ctx.save_for_backward(turn, local_BS, inside_BS)
        return F.embedding(local_BS.masked_fill(~inside_BS, 0), weights[0]) * inside_BS.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        turn, local_BS, inside_BS = ctx.saved_tensors
        ctx.add_rows(ctx.weights[0], local_BS[inside_BS], gradients[0][inside_BS])
        return torch.zeros_like(turn), None, None, None, None
