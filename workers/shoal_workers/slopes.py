"""Backwards that begin with a given slope, the gradient of the loss by what they go back from.

`torch.autograd.backward` and `grad` import torch's symbolic shapes the first time that they are given one, and
`torch.optim.Optimizer` imports its compiler: 0.8 s and 1.5 s of the first step of every new process, so of every
recovery that starts one. A scalar needs no given slope.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def backward(leaving: Tensor, slope: Tensor | None) -> None:
    """As `torch.autograd.backward`. Without a slope `leaving` must be a scalar."""
    torch.autograd.backward(leaving if slope is None else _begin(leaving, slope))


def gradients(leaving: Tensor, inputs: tuple[Tensor, ...], slope: Tensor) -> tuple[Tensor, ...]:
    """As `torch.autograd.grad`, within another backward too."""
    return torch.autograd.grad(_begin(leaving, slope), inputs)


def _begin(leaving: Tensor, slope: Tensor) -> Tensor:
    with torch.enable_grad():
        begin: Tensor = _Begin.apply(leaving, slope)  # type: ignore[no-untyped-call]
    return begin


class _Begin(torch.autograd.Function):
    """A scalar whose gradient by `leaving` is `slope`, whatever it is itself."""

    @staticmethod
    def forward(ctx: Any, leaving: Tensor, slope: Tensor) -> Tensor:
        ctx.slope = slope
        return leaving.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.slope, None
