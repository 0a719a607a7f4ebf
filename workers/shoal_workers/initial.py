"""Step 0: the values that training begins with, a pure function of the seed and of an element's place in its parameter.

Drawn with numpy's Philox, whose numbers are the same on every kind of machine; torch's normal numbers depend on the
vector instructions of the CPU, and then holders of one interval would begin with different weights.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import Parameter

_BLOCK = 1 << 16  # elements drawn from one key; whole blocks are drawn, so that no layout shows in the values
_RESIDUAL = ("attention.o.weight", "mlp.down.weight")  # these write into the residual stream, twice per layer


def initial_values(parameter: Parameter, model: ModelSpec, seed: int, first: int, last: int) -> Tensor:
    """Elements [first, last) of the flattened parameter, fp32 on the host. Norms begin as ones,
    biases as zeros.

    Matrices are normal with a deviation of 1 / sqrt(hidden), about the usual 0.02 for wide models. A fixed 0.02 leaves
    narrow ones with gradients so small that AdamW divides rounding errors by them.
    """
    if len(parameter.shape) == 1:
        return torch.full((last - first,), 0.0 if parameter.fqn.endswith(".bias") else 1.0)
    values = np.empty(last - first, dtype=np.float32)
    for block in range(first // _BLOCK, (last - 1) // _BLOCK + 1):
        start = block * _BLOCK
        drawn = _draw(seed, parameter.fqn, block)
        low, high = max(first, start), min(last, start + _BLOCK)
        values[low - first : high - first] = drawn[low - start : high - start]
    std = model.hidden**-0.5
    if parameter.fqn.endswith(_RESIDUAL):
        std /= math.sqrt(2 * model.layers)
    return torch.from_numpy(values).mul_(std)


def _draw(seed: int, fqn: str, block: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    digest = hashlib.blake2b(f"{seed}/{fqn}/{block}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.standard_normal(_BLOCK, dtype=np.float32)
