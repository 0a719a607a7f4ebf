"""Successive halving: the best of many candidates, when judging one well is dear and judging it roughly is cheap.

Owns the order of evaluations and who goes on. Does not own what is evaluated: each fidelity is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from shoal_planner.errors import InvalidField

T = TypeVar("T")


def halve(candidates: Sequence[T], fidelities: Sequence[Callable[[T], float]], keep: Sequence[int]) -> list[T]:
    """The candidates that the last fidelity judged, best first; those it finds impossible (infinite) are left out.

    Fidelities come from the cheapest to the truest; after each, its best `keep` go on. Of equals the earlier candidate
    goes on, so the same arguments give the same answer. Raises InvalidField.
    """
    if len(keep) != len(fidelities) or min(keep, default=0) < 1:
        raise InvalidField("keep", list(keep), f"must be {len(fidelities)} numbers of at least 1, one per fidelity")
    left = list(candidates)
    for judge, number in zip(fidelities, keep, strict=True):
        judged = [(judge(candidate), index) for index, candidate in enumerate(left)]
        possible = sorted(entry for entry in judged if math.isfinite(entry[0]))
        left = [left[index] for _, index in possible[:number]]
    return left
