"""Matrix products with weights, at once or with the gradients of the weights put off until somebody asks for them.

Owns what is kept for those gradients. Does not own when they are taken (`segments`). Put off or not, they have the same
bits: autograd's product of the same two matrices, added up in the same way.

Shapes: T tokens, I inputs, O outputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor


class Products(Protocol):
    def linear(self, x: Tensor, weight_OI: Tensor) -> Tensor: ...

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor: ...


class AtOnce:
    """As autograd does it."""

    def linear(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        return F.linear(x, weight_OI)

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        return x @ weight_IO


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProduct:
    """The gradient of `weight`, a leaf, is left.T @ right. They are the input of a product and the gradient of its
    output, in the order in which the weight is stored: R rows, C columns."""

    weight: Tensor
    left_TR: Tensor
    right_TC: Tensor

    def add(self) -> None:
        """To the gradient of the weight, where autograd would have added it."""
        self.weight.backward(self.left_TR.t() @ self.right_TC)  # type: ignore[no-untyped-call]


class PutOff:
    """A backward finds the gradients of inputs alone; what those of weights need is left for `take`."""

    def __init__(self) -> None:
        self._left: list[WeightProduct] = []

    def linear(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        return cast(Tensor, _Linear.apply(x, (weight_OI,), self._left))  # type: ignore[no-untyped-call]

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        return cast(Tensor, _Matmul.apply(x, (weight_IO,), self._left))  # type: ignore[no-untyped-call]

    def take(self) -> tuple[WeightProduct, ...]:
        """Of all backwards since the last time."""
        taken = tuple(self._left)
        self._left.clear()
        return taken


# The weights of both come in a tuple, which autograd does not look into: they get no gradient here, not even none.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor], left: list[WeightProduct]) -> Tensor:
        (ctx.weight_OI,), ctx.left = weights, left
        ctx.save_for_backward(x)
        return F.linear(x, ctx.weight_OI)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        slope_TO = gradients[0].flatten(0, -2)
        ctx.left.append(WeightProduct(weight=ctx.weight_OI, left_TR=slope_TO, right_TC=x.flatten(0, -2)))
        return (slope_TO @ ctx.weight_OI).view(x.shape), None, None


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor], left: list[WeightProduct]) -> Tensor:
        (ctx.weight_IO,), ctx.left = weights, left
        ctx.save_for_backward(x)
        return x @ weights[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        slope_TO = gradients[0].flatten(0, -2)
        ctx.left.append(WeightProduct(weight=ctx.weight_IO, left_TR=x.flatten(0, -2), right_TC=slope_TO))
        return (slope_TO @ ctx.weight_IO.t()).view(x.shape), None, None
