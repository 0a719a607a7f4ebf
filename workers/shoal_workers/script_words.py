"""What passes between a script's processes and its supervisor: figures as JSON can carry them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

NODE_DIED = "its node has died"  # as Ray says it of an actor
_MOST_FIGURES = 200
_LONGEST = 500


def metrics_of(reported: Mapping[str, Any]) -> dict[str, Any]:
    """The reported figures: numbers as they are (also those of NumPy and PyTorch), what is no finite number as text,
    and anything else as short text."""
    return {str(name): _figure(value) for name, value in list(reported.items())[:_MOST_FIGURES]}


def loss_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """The figure of that name, where it is a number; a finite one, for curves."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _figure(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value[:_LONGEST]
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (TypeError, ValueError):
            return str(value)[:_LONGEST]
        return number if math.isfinite(number) else str(number)
    return str(value)[:_LONGEST]
