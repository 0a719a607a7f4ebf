"""Tensor parallelism: what crosses the ranks of one replica, as autograd functions.

Owns the two operators between replicated and split activations, the vocabulary-parallel embedding and the
vocabulary-parallel cross entropy. Does not own where weights are cut (`parameters`), nor the wire (`exchange`).

Shapes: B sequences, S positions, T tokens, H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_planner.plan import Plan
from shoal_workers.exchange import Pending


class Reducer(Protocol):
    """What tensor parallelism needs of an exchange. Both work in place over the ranks of the replica."""

    def all_reduce_sum(self, tensor: Tensor) -> None: ...

    def all_reduce_max(self, tensor: Tensor) -> None: ...

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """The ranks of one replica, as one of them sees them. With a `size` of 1 nothing is ever reduced. `chunks`: in how
    many parts products are computed whose results are summed (`chunked`)."""

    rank: int
    size: int
    reducer: Reducer
    chunks: int = 1

    @property
    def overlaps(self) -> bool:
        """Whether sums go on beside products."""
        return self.size > 1 and self.chunks > 1


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reducer: Reducer, beside: Callable[[], None]) -> Tensor:
        ctx.reducer, ctx.beside = reducer, beside
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        under_way = ctx.reducer.start_all_reduce_sum(total)
        ctx.beside()
        under_way.wait()
        return total, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reducer: Reducer) -> Tensor:
        ctx.mark_dirty(x)
        reducer.all_reduce_sum(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def nothing() -> None:
    pass


def enter(x: Tensor, group: TensorGroup, beside: Callable[[], None] = nothing) -> Tensor:
    """From replicated into split computation: nothing forward; backward, the parts of the gradient are summed, and
    `beside` is done meanwhile.

    Enter once for all weights that share the input, so that they share the one all-reduce.
    """
    if group.size == 1:
        return x
    return cast(Tensor, _Enter.apply(x, group.reducer, beside))  # type: ignore[no-untyped-call]


def leave(x: Tensor, group: TensorGroup) -> Tensor:
    """From split into replicated computation: forward, the parts are summed, in place; nothing backward.

    Whatever computed `x` must not need it for its backward, as no matrix product does.
    """
    if group.size == 1:
        return x
    return cast(Tensor, _Leave.apply(x, group.reducer))  # type: ignore[no-untyped-call]


def embed(tokens_BS: Tensor, weight_VH: Tensor, first_row: int, group: TensorGroup) -> Tensor:
    """Rows of the embedding, of which this rank has [first_row, first_row + V); whole on every rank."""
    if group.size == 1:
        return F.embedding(tokens_BS, weight_VH)
    local_BS = tokens_BS - first_row
    inside_BS = (local_BS >= 0) & (local_BS < len(weight_VH))
    x_BSH = F.embedding(local_BS.masked_fill(~inside_BS, 0), weight_VH)
    return leave(x_BSH * inside_BS.unsqueeze(-1), group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets_T: Tensor, first_rows: Sequence[int], reducer: Reducer, *slices_TV: Tensor) -> Tensor:
        logits_TV = [slice_TV.float() for slice_TV in slices_TV]
        top_T = functools.reduce(torch.maximum, (slice_TV.amax(dim=-1) for slice_TV in logits_TV))
        reducer.all_reduce_max(top_T)
        kept, sums = [], []
        for slice_TV, first_row in zip(logits_TV, first_rows, strict=True):
            slice_TV = slice_TV - top_T.unsqueeze(-1)
            local_T1 = (targets_T - first_row).unsqueeze(-1)
            inside_T1 = (local_T1 >= 0) & (local_T1 < slice_TV.shape[-1])
            local_T1 = local_T1.masked_fill(~inside_T1, 0)
            hit_T = slice_TV.gather(-1, local_T1).masked_fill(~inside_T1, 0.0).squeeze(-1)
            exponentials_TV = slice_TV.exp_()
            sums.append(torch.stack((exponentials_TV.sum(dim=-1), hit_T)))
            kept.append((exponentials_TV, local_T1, inside_T1))
        sums_2T = functools.reduce(torch.add, sums)
        reducer.all_reduce_sum(sums_2T)
        ignored_T = targets_T < 0
        totals_T = sums_2T[0].masked_fill(ignored_T, math.inf)  # so that all slopes there are zeros
        for exponentials_TV, _, _ in kept:
            exponentials_TV.div_(totals_T.unsqueeze(-1))
        ctx.save_for_backward(*itertools.chain(*kept))
        return (sums_2T[0].log() - sums_2T[1]).masked_fill(ignored_T, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        slopes, saved = [], iter(ctx.saved_tensors)
        for probabilities_TV, local_T1, inside_T1 in zip(saved, saved, saved, strict=True):
            slope_TV = probabilities_TV.scatter_add(-1, local_T1, -inside_T1.to(probabilities_TV.dtype))
            slopes.append(slope_TV.mul_(gradients[0]))
        return None, None, None, *slopes


def cross_entropy_sum(
    slices_TV: Sequence[Tensor], targets_T: Tensor, first_rows: Sequence[int], group: TensorGroup
) -> Tensor:
    """The cross entropy of all targets, summed, in fp32 and whole on every rank; the logits never leave their rank.
    Targets below zero are ignored.

    Each slice has logits of this rank for the V rows of the vocabulary from its first row on.
    """
    loss = _CrossEntropy.apply(targets_T, first_rows, group.reducer, *slices_TV)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


def tp_groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The ranks of each replica, in tp order: what an exchange wants to know."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for place in plan.places():
        found.setdefault((place.pipeline, place.stage, place.replica), []).append(place.rank)
    return tuple(map(tuple, found.values()))
