"""Models as users write them, for tests of modules of one's own: nothing in here knows of Shoal."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tokens(nn.Module):
    def __init__(self, vocab: int, width: int, most: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(most, width)
        self.register_buffer("order", torch.arange(most), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(self.order[: tokens.shape[1]])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.size = width // heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    tensor_parallel: ClassVar = {
        "attention.q": "column",
        "attention.k": "column",
        "attention.v": "column",
        "attention.o": "row",
        "up": "column",
        "down": "row",
    }

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.tensor_parallel_heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.fixed = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attention(self.before(x))
        return x + self.fixed * self.down(torch.relu(self.up(self.between(x))).square())


class Logits(nn.Module):
    def __init__(self, vocab: int, width: int, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab, bias=False)
        if weight is not None:
            self.out.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def build(layers: int = 6, width: int = 48, heads: int = 4, vocab: int = 256) -> list[nn.Module]:
    """All modules at once; the table of tokens is that of the logits, too."""
    first = Tokens(vocab, width, 64)
    with torch.no_grad():
        first.tokens.weight.mul_(1 / math.sqrt(width))
    return [first, *(Layer(width, heads) for _ in range(layers)), Logits(vocab, width, first.tokens.weight)]


def makers(layers: int = 6, width: int = 48, heads: int = 4, vocab: int = 256) -> list[Callable[[], nn.Module]]:
    """One maker for each module."""
    first, last = functools.partial(Tokens, vocab, width, 64), functools.partial(Logits, vocab, width)
    return [first, *(functools.partial(Layer, width, heads) for _ in range(layers)), last]
