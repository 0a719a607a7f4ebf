"""Rotary positions: every pair of a head's elements is turned by an angle that grows with its position.

Owns the tables of angles, stretched to longer contexts as a model says. Does not own the turning (`fewer_passes`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal_planner.architecture import ModelSpec, RopeScaling
from shoal_workers.borders import Borders
from shoal_workers.compiling import Way, as_written
from shoal_workers.fewer_passes import turned


class Rotary:
    """For sequences of at most this length: pairs are (i, i + D/2)."""

    def __init__(self, model: ModelSpec, seq_len: int, device: torch.device, way: Way = as_written) -> None:
        scaling = model.rope_scaling
        rates = pair_rates(model)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), rates).repeat(1, 2)
        size = 1.0 if scaling is None else turned_size(scaling)
        self.cos_SD = angles.cos().mul_(size).float().to(device)
        self.sin_SD = angles.sin().mul_(size).float().to(device)
        self._turned = way(turned)

    def __call__(self, x_BNSD: Tensor, borders: Borders | None = None) -> Tensor:
        """By positions within sequences, or within what lies between these borders."""
        if borders is not None:
            return self._turned(x_BNSD, *borders.angles(self.cos_SD, self.sin_SD))
        length = x_BNSD.shape[-2]
        return self._turned(x_BNSD, self.cos_SD[:length], self.sin_SD[:length])


def pair_rates(model: ModelSpec) -> Tensor:
    """Radians per position of each pair, float64 [D/2]."""
    half = model.head_size // 2
    rates = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    scaling = model.rope_scaling
    if scaling is None:
        return rates
    if scaling.kind == "linear":
        return rates / scaling.factor
    kept = _kept_by_llama(rates, scaling) if scaling.kind == "llama3" else _kept_by_yarn(rates, scaling, model)
    return kept * rates + (1 - kept) * rates / scaling.factor


def turned_size(scaling: RopeScaling) -> float:
    """What queries and keys are multiplied by: longer contexts make attention flatter, and this sharpens it (YaRN,
    section 3.4)."""
    if scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1


def _kept_by_llama(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """How much of each pair's rate stays: none of those that turn seldom, linear in turns up to those that all stays
    of."""
    assert scaling.original_positions is not None
    turns = scaling.original_positions * rates / (2 * math.pi)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp_(0, 1)


def _kept_by_yarn(rates: Tensor, scaling: RopeScaling, model: ModelSpec) -> Tensor:
    """As for Llama, but linear in the number of the pair, between the whole numbers around the two limits."""
    assert scaling.original_positions is not None
    half = len(rates)

    def pair(turns: float) -> float:
        """The pair, as a fraction, that turns so many times."""
        assert scaling.original_positions is not None
        return half * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(model.rope_theta)

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), 2 * half - 1)
    return 1 - ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp_(0, 1)
