"""Step 0: the values that training begins with, a pure function of the seed and of an element's place in its parameter.

Drawn with numpy's Philox, whose numbers are the same on every kind of machine; torch's normal numbers depend on the
vector instructions of the CPU, and then holders of one interval would begin with different weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import ADAPTER_A, ADAPTER_B, Parameter

_BLOCK = 1 << 16  # elements drawn from one key; whole blocks are drawn, so that no layout shows in the values
_Block = np.ndarray[tuple[int], np.dtype[np.float32]]
_RESIDUAL = ("attention.o.weight", "mlp.down.weight")  # these write into the residual stream, twice per layer


def initial_values(parameter: Parameter, model: ModelSpec, seed: int, first: int, last: int) -> Tensor:
    """Elements [first, last) of the flattened parameter, fp32 on the host. Norms begin as ones,
    biases as zeros.

    Matrices are normal with a deviation of 1 / sqrt(hidden), about the usual 0.02 for wide models. A fixed 0.02 leaves
    narrow ones with gradients so small that AdamW divides rounding errors by them. The second of two adapters begins as
    zeros, so that both together add nothing, the first uniformly within 1 / sqrt(its inputs) of zero.
    """
    if len(parameter.shape) == 1:
        return torch.full((last - first,), 0.0 if parameter.fqn.endswith(".bias") else 1.0)
    if f".{ADAPTER_B}." in parameter.fqn:
        return torch.zeros(last - first)
    if f".{ADAPTER_A}." in parameter.fqn:
        inputs = parameter.shape[0] if parameter.cut else parameter.shape[1]
        return _drawn(_uniform, seed, parameter, first, last).mul_(inputs**-0.5)
    std = model.hidden**-0.5
    if parameter.fqn.endswith(_RESIDUAL):
        std /= math.sqrt(2 * model.layers)
    return _drawn(_normal, seed, parameter, first, last).mul_(std)


def _drawn(
    draw: Callable[[np.random.Generator], _Block], seed: int, parameter: Parameter, first: int, last: int
) -> Tensor:
    values = np.empty(last - first, dtype=np.float32)
    for block in range(first // _BLOCK, (last - 1) // _BLOCK + 1):
        start = block * _BLOCK
        drawn = draw(_generator(seed, parameter.fqn, block))
        low, high = max(first, start), min(last, start + _BLOCK)
        values[low - first : high - first] = drawn[low - start : high - start]
    return torch.from_numpy(values)


def _normal(generator: np.random.Generator) -> _Block:
    return generator.standard_normal(_BLOCK, dtype=np.float32)


def _uniform(generator: np.random.Generator) -> _Block:
    """Within 1 of zero."""
    return generator.random(_BLOCK, dtype=np.float32) * np.float32(2) - np.float32(1)


def _generator(seed: int, fqn: str, block: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}/{fqn}/{block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
