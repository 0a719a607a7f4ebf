"""Curves in a line of text."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

_BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))  # an eighth of a line high, two eighths, ...
_PLAIN = "_.-=+*%#"
_WIDTH = 60


def sparkline(values: Sequence[float], marks: str, width: int = _WIDTH) -> str:
    """At most so many signs, each the mean of as many values; the lowest one is the first mark."""
    columns = min(width, len(values))
    place = {index: index * columns // len(values) for index in range(len(values))}
    means = []
    for _, among in groupby(range(len(values)), key=lambda index: place[index]):
        each = [values[index] for index in among]
        means.append(sum(each) / len(each))
    lowest, span = min(means), max(means) - min(means)
    last = len(marks) - 1
    return "".join(marks[round((mean - lowest) / span * last) if span > 0 else 0] for mean in means)


def show_curves(points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """A line for each of these figures of which there are two at least: the first value, the curve, the last one."""
    marks = _BLOCKS if (sys.stdout.encoding or "").lower().replace("-", "") == "utf8" else _PLAIN
    for name in names:
        told = [point.get(name) for point in points]
        values = [float(value) for value in told if isinstance(value, int | float) and math.isfinite(value)]
        if len(values) > 1:
            print(f"{name:<14}{values[0]:>10.4g} {sparkline(values, marks)} {values[-1]:.4g}")
