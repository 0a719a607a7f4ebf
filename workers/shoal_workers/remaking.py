"""Selective recomputation: results that cost little are not kept for the backward, but made again when it asks.

Owns what autograd saves in their place. Does not own which results these are: a block says so (`model`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal_workers.slopes import gradients


class Making(Protocol):
    """How a block computes what could be made again."""

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> AbstractContextManager[Tensor]:
        """`function` of the inputs, contiguous; inside the context is everything that uses it."""


def keeping(function: Callable[..., Tensor], *inputs: Tensor) -> AbstractContextManager[Tensor]:
    """Autograd keeps what it wants."""
    return nullcontext(function(*inputs))


class Remaking:
    """Autograd keeps the inputs alone, where `pack` and `unpack` are its hooks. The backward makes each result once,
    with its graph, for all who use it."""

    def __init__(self) -> None:
        self._makers: dict[int, Any] = {}  # by the address of their result, as long as that is in use

    @contextmanager
    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Iterator[Tensor]:
        result: Tensor = _Remade.apply(function, *inputs)  # type: ignore[no-untyped-call]
        address = result.data_ptr()
        self._makers[address] = result.grad_fn
        try:
            yield result
        finally:
            del self._makers[address]

    def pack(self, tensor: Tensor) -> Any:
        """The tensor, or else who can make it again, and its shape: a matrix product saves its input as rows."""
        maker = self._makers.get(tensor.data_ptr())
        return tensor if maker is None else (maker, tensor.shape)

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        maker, shape = saved
        return _make_again(maker)[1].detach().view(shape)


class _Remade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.made = None
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        inputs, result = _make_again(ctx)
        ctx.made = None
        return None, *gradients(result, inputs, slopes[0])


def _make_again(ctx: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    if ctx.made is None:
        inputs = tuple(tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            ctx.made = inputs, ctx.function(*inputs)
    made: tuple[tuple[Tensor, ...], Tensor] = ctx.made
    return made
