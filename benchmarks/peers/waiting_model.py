"""A model of one's own that waits where another would compute: a step as it is on a GPU, with the cores free meanwhile.

Where nodes are shares of a machine's cores, whatever goes on beside the ranks takes these from them; on nodes with a
GPU it has cores of its own. `build` is what a job of Shoal's names, and what peers train: the same parameters, and the
same waits.
"""

from __future__ import annotations

import time
from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd, nn

VOCAB = 256


class _Wait(autograd.Function):
    """So many seconds a sample, and twice as many on the way back, as products of matrices take."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, sample_s: float) -> Tensor:
        ctx.seconds = 2 * sample_s * x_BSH.shape[0]
        time.sleep(sample_s * x_BSH.shape[0])
        return x_BSH.view_as(x_BSH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Layer(nn.Module):
    def __init__(self, width: int, sample_s: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.sample_s = sample_s

    def forward(self, x_BSH: Tensor) -> Tensor:
        waited_BSH: Tensor = _Wait.apply(x_BSH, self.sample_s)  # type: ignore[no-untyped-call]
        mixed_BSH: Tensor = self.down(F.gelu(self.up(self.norm(waited_BSH))))
        return waited_BSH + mixed_BSH


def build(layers: int, width: int, sample_s: float) -> list[nn.Module]:
    """`sample_s`: of a sample, forward and backward, over all layers."""
    blocks = (Layer(width, sample_s / layers / 3) for _ in range(layers))
    return [nn.Embedding(VOCAB, width), *blocks, nn.Linear(width, VOCAB)]
