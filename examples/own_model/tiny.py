"""A small transformer in plain PyTorch, as Shoal takes it: `build` returns the modules in order."""

import torch
import torch.nn.functional as F
from torch import nn


class Tokens(nn.Module):
    def __init__(self, vocab, width, most):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(most, width)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        # Optional: with these two lines a layer may also be split between the devices of a node.
        self.tensor_parallel = {**dict.fromkeys(("q", "k", "v", "up"), "column"), "o": "row", "down": "row"}
        self.tensor_parallel_heads = heads
        self.size = width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.before(x)
        # -1: as many heads as this device has.
        q, k, v = (one(normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


def build(layers, width, heads, vocab=256):
    return [Tokens(vocab, width, 2048), *(Layer(width, heads) for _ in range(layers)), nn.Linear(width, vocab)]
