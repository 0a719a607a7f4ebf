"""Small functions that pass through memory several times, made into kernels that do so once (`train.compile`).

Owns when that happens and what is said if it cannot. Compiled are norms, activation functions and rotary positions:
products with weights are kernels already, and what is between them (weights that come and go, sums over ranks,
gradients that are put off) has to stay as it is written. A function is compiled when it is first called with tensors of
a kind, once for all layers, epochs and jobs of the process; torch keeps the kernels on disk for other processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shoal_planner.errors import InvalidField

Function = Callable[..., Tensor]
Way = Callable[[Function], Function]
_COMPILERS = ("torch._dynamo", "torch._inductor")


def as_written(function: Function) -> Function:
    return function


@functools.cache
def compiled(function: Function) -> Function:
    """Gives what `function` gives, but for rounding. Raises InvalidField where nothing can be compiled."""
    kernel = torch.compile(function, options={"compile_threads": 1})  # else torch starts processes that stay

    @functools.wraps(function)
    def call(*arguments: Tensor, **named: float) -> Tensor:
        try:
            result: Tensor = kernel(*arguments, **named)
        except Exception as error:  # torch's compilers share no base class; all else is passed on as it is
            if not type(error).__module__.startswith(_COMPILERS):
                raise
            # The first words say which compiler and what about it; what follows is for those who wrote torch.
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise InvalidField("train.compile", True, f"needs a compiler that works on every node: {reason}") from error
        return result

    return call
