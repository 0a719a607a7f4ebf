"""What range a number of a job or a cluster must lie in. Generous: the limits keep out mistakes and figures that no
arithmetic survives, not large machines."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal_planner.errors import InvalidField

Range = tuple[float, float]


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raises InvalidField unless least <= value <= most; a least above zero that is no whole number means any positive
    number that computers tell from zero."""
    if math.isnan(value):
        raise InvalidField(name, value, "must be a finite number")
    if value < least:
        raise InvalidField(name, value, f"must be {_floor(value, least)}")
    if value > most:
        raise InvalidField(name, value, f"must be at most {most:.16g}")


def check_ranges(owner: object, ranges: Mapping[str, Range]) -> None:
    """As `check_range` for these attributes; None passes."""
    for name, (least, most) in ranges.items():
        value = getattr(owner, name)
        if value is not None:
            check_range(name, value, least, most)


def check_positive(name: str, value: float) -> None:
    """Raises InvalidField for what is no number above zero."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidField(name, value, "must be more than zero")


def _floor(value: float, least: float) -> str:
    if least == 0:
        return "at least 0" if isinstance(value, int) else "zero or more"
    if least < 1 and value <= 0:
        return "more than zero"
    return f"at least {least:.16g}"
