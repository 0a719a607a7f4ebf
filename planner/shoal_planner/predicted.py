"""What the model says of a plan: the values alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Where the predicted seconds of a step go; they add up to `step_s`."""

    compute_s: float = 0.0
    bubble_s: float = 0.0
    tensor_s: float = 0.0
    pipeline_s: float = 0.0
    gradient_s: float = 0.0
    optimizer_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`memory_bytes` maps devices (`node:index`) to their peak, `host_bytes` those whose ranks keep state on their host
    to what it takes there; pairs, so that it stays hashable."""

    step_s: float
    tokens_per_s: float
    mfu: float
    price_per_million_tokens: float
    terms: Terms
    memory_bytes: tuple[tuple[str, float], ...]
    host_bytes: tuple[tuple[str, float], ...] = ()
