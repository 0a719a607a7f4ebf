"""Products with weights that stay as they are, and what adapters add to them (LoRA: `shoal_planner.lora`).

Of a frozen weight a backward finds the gradient of its input alone, so nothing is kept for it; those of adapters come
from autograd. Where tensor parallelism cuts the outputs of a matrix, each rank has a part of the gradient of its A, and
these are summed in the backward (`enter`); where it cuts the inputs, each rank has a part of what comes out of A, and
these are summed in the forward (`leave`). Both are as narrow as the adapters' rank. So all ranks of a replica have the
same gradients of what they hold alike.

Shapes: I inputs, O outputs of a product, R the rank of the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import ADAPTER_A, ADAPTER_B
from shoal_workers.products import products_of
from shoal_workers.tensor_parallel import TensorGroup, enter, leave


class Lookup(Protocol):
    def __call__(self, fqn: str, number: int = 0) -> Tensor:
        """The rows of a parameter that this rank has in the portion of its unit of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """`a` is [R, I], or [I, R] beside a weight that is stored so; `b` is [O, R]."""

    a: Tensor
    b_OR: Tensor


class Adapted:
    """The `Products` of a unit. `beside`: the adapters of weights that have some."""

    def __init__(self, beside: Mapping[Tensor, Adapter], scale: float, group: TensorGroup) -> None:
        self._beside = beside
        self._scale = scale
        self._group = group

    def linear(
        self, x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        found = cast(tuple[Tensor, ...], _Linear.apply(x, weights_OI, biases_O))  # type: ignore[no-untyped-call]
        return tuple(map(lambda out, weight: self._with_adapter(out, x, weight), found, weights_OI))

    def _with_adapter(self, out: Tensor, x: Tensor, weight_OI: Tensor) -> Tensor:
        adapter = self._beside.get(weight_OI)
        if adapter is None:
            return out
        narrow_R = F.linear(x, enter(adapter.a, self._group))
        return out + F.linear(narrow_R * self._scale, adapter.b_OR)

    def matmul(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        """Without adapters: their part is another's to add, once it has summed over the group."""
        return cast(Tensor, _Matmul.apply(x, (weight_IO,)))  # type: ignore[no-untyped-call]

    def beside(self, x: Tensor, weight_IO: Tensor) -> Tensor | None:
        adapter = self._beside.get(weight_IO)
        if adapter is None:
            return None
        narrow_R = leave(x @ adapter.a, self._group)
        return F.linear(narrow_R * self._scale, adapter.b_OR)

    def add(self, weight: Tensor, left_TR: Tensor, right_TC: Tensor) -> None:
        """Frozen weights have no gradients."""


def adapted(model: ModelSpec, layer: int | None, lookup: Lookup, group: TensorGroup) -> Adapted:
    """Of a block, or (None) of an end of the model, which has no adapters."""
    assert model.lora is not None
    found: dict[Tensor, Adapter] = {}
    for name in model.lora.names if layer is not None else ():
        prefix = f"layers.{layer}.{name}"
        adapter = Adapter(a=lookup(f"{prefix}.{ADAPTER_A}.weight"), b_OR=lookup(f"{prefix}.{ADAPTER_B}.weight"))
        found[lookup(f"{prefix}.weight")] = adapter
    return Adapted(found, model.lora.scale, group)


class _Linear(torch.autograd.Function):
    """As that of `products`, with gradients of inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights_OI: tuple[Tensor, ...], biases_O: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        ctx.weights_OI, ctx.shape = weights_OI, x.shape
        return products_of(x, weights_OI, biases_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        slope_TI: Tensor | None = None
        for weight_OI, gradient in zip(ctx.weights_OI, gradients, strict=True):
            slope_TO = gradient.flatten(0, -2)
            slope_TI = slope_TO @ weight_OI if slope_TI is None else slope_TI.addmm_(slope_TO, weight_OI)
        assert slope_TI is not None
        return slope_TI.view(ctx.shape), None, None


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor]) -> Tensor:
        (ctx.weight_IO,), ctx.shape = weights, x.shape
        return x @ weights[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0].flatten(0, -2) @ ctx.weight_IO.t()).view(ctx.shape), None
