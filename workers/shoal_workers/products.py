"""Matrix products with weights, and the gradients of the weights: at once or when somebody asks for them.

Owns what is kept for those gradients. They go to an `AddProduct`, which multiplies right into the memory where they add
up: a result that is only added afterwards would pass through memory three times more. Does not own when they are taken
(`segments`). At once or put off, they have the same bits: the same products in the same order.

Shapes: T tokens, I inputs, O outputs of a product; R rows, C columns of a weight as it is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

AddProduct = Callable[[Tensor, Tensor, Tensor], None]
"""Of a weight, left_TR and right_TC: adds left.T @ right to the gradient of the weight."""


class Products(Protocol):
    def linear(
        self, x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """x with each of the weights, and the biases added, of which there is one for each or none."""

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor: ...

    def beside(self, x: Tensor, weight_IO: Tensor) -> Tensor | None:
        """What adapters of the weight, if it has any, add to `matmul`, summed over the group."""

    def add(self, weight: Tensor, left_TR: Tensor, right_TC: Tensor) -> None:
        """An `AddProduct` for products that others multiply."""


class ByAutograd:
    """For weights whose gradients nobody collects."""

    def linear(
        self, x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        return products_of(x, weights_OI, biases_O)

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        return x @ weight_IO

    def beside(self, x: Tensor, weight_IO: Tensor) -> Tensor | None:
        return None

    def add(self, weight: Tensor, left_TR: Tensor, right_TC: Tensor) -> None:
        pass


class AtOnce:
    """A backward finds the gradients of inputs, and adds those of weights."""

    def __init__(self, add_product: AddProduct) -> None:
        self.add = self._add_product = add_product

    def linear(
        self, x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        return _linear(x, weights_OI, biases_O, self._add_product)

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        return _matmul(x, weight_IO, self._add_product)

    def beside(self, x: Tensor, weight_IO: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProduct:
    """The gradient of `weight` is left.T @ right. They are the input of a product and the gradient of its output, in
    the order in which the weight is stored."""

    weight: Tensor
    left_TR: Tensor
    right_TC: Tensor
    add_product: AddProduct

    def add(self) -> None:
        self.add_product(self.weight, self.left_TR, self.right_TC)


class PutOff:
    """A backward finds the gradients of inputs alone; what those of weights need is left for `take`."""

    def __init__(self, add_product: AddProduct) -> None:
        self._left: list[WeightProduct] = []
        self._add_product = add_product

    def linear(
        self, x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        return _linear(x, weights_OI, biases_O, self.add)

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        return _matmul(x, weight_IO, self.add)

    def beside(self, x: Tensor, weight_IO: Tensor) -> Tensor | None:
        return None

    def take(self) -> tuple[WeightProduct, ...]:
        """Of all backwards since the last time."""
        taken = tuple(self._left)
        self._left.clear()
        return taken

    def add_left(self) -> None:
        """What is left is added."""
        for product in self.take():
            product.add()

    def add(self, weight: Tensor, left_TR: Tensor, right_TC: Tensor) -> None:
        self._left.append(
            WeightProduct(weight=weight, left_TR=left_TR, right_TC=right_TC, add_product=self._add_product)
        )


def _linear(
    x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...], add_product: AddProduct
) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], _Linear.apply(x, weights_OI, add_product, *biases_O))  # type: ignore[no-untyped-call]


def products_of(x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    pairs = itertools.zip_longest(weights_OI, biases_O)
    return tuple(F.linear(x, weight_OI, bias_O) for weight_OI, bias_O in pairs)


def _matmul(x: Tensor, weight_IO: Tensor, add_product: AddProduct) -> Tensor:
    return cast(Tensor, _Matmul.apply(x, (weight_IO,), add_product))  # type: ignore[no-untyped-call]


# The weights of both come in a tuple, which autograd does not look into: they get no gradient here, not even none.


class _Linear(torch.autograd.Function):
    """Of one input with several weights: the parts of its gradient add up as they are multiplied. Biases get theirs
    from autograd, at once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights_OI: tuple[Tensor, ...], add_product: AddProduct, *biases_O: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.weights_OI, ctx.add_product, ctx.biased = weights_OI, add_product, bool(biases_O)
        ctx.save_for_backward(x)
        return products_of(x, weights_OI, biases_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        x_TI = x.flatten(0, -2)
        slope_TI = torch.empty_like(x_TI)
        for index, (weight_OI, gradient) in enumerate(zip(ctx.weights_OI, gradients, strict=True)):
            slope_TO = gradient.flatten(0, -2)
            ctx.add_product(weight_OI, slope_TO, x_TI)
            slope_TI.addmm_(slope_TO, weight_OI, beta=min(index, 1))
        of_biases = (gradient.flatten(0, -2).sum(0) for gradient in gradients) if ctx.biased else ()
        return slope_TI.view(x.shape), None, None, *of_biases


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor], add_product: AddProduct) -> Tensor:
        (ctx.weight_IO,), ctx.add_product = weights, add_product
        ctx.save_for_backward(x)
        return x @ weights[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        slope_TO = gradients[0].flatten(0, -2)
        ctx.add_product(ctx.weight_IO, x.flatten(0, -2), slope_TO)
        return (slope_TO @ ctx.weight_IO.t()).view(x.shape), None, None
