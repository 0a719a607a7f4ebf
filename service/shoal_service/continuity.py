"""Whether the loss went on as if nothing had happened where plans changed in flight. Pure.

A step that was rolled back and done again computes the same samples from the same state, so both losses should agree;
where nothing was done again, the first loss of the new plan should be no further from the one before than neighbours
usually are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

AGREES = 0.01  # relative; other layouts sum in another order, and in fewer bits where the job says so
_USUAL = 2.0  # times the largest change between neighbours before


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A step that was done twice: its loss before and after it was rolled back."""

    step: int
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """Losses of consecutive steps up to a change of plan, and of the first one after it."""

    step: int
    before: tuple[float, ...]
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuity:
    """`good` is None where there is nothing to judge by."""

    good: bool | None
    text: str


def continuity(pairs: Sequence[Pair], seams: Sequence[Seam]) -> Continuity:
    judged = [seam for seam in seams if len(seam.before) >= 3]
    if not pairs and not judged:
        return Continuity(good=None, text="no change of plan to judge by yet")
    worst = max(pairs, key=_difference, default=None)
    jumps = [seam for seam in judged if not _usual(seam)]
    parts = []
    if worst is not None:
        many = f"{len(pairs)} steps done again agree" if len(pairs) > 1 else "the step done again agrees"
        parts.append(f"{many} with what was rolled back {_within(worst)} (step {worst.step})")
    if judged:
        parts.append(
            f"at {_changes(len(judged))} the loss moved no more than usual"
            if not jumps
            else f"at step {jumps[-1].step} the loss moved more than usual"
        )
    good = not jumps and (worst is None or _difference(worst) <= AGREES)
    return Continuity(good=good, text="; ".join(parts))


def _changes(count: int) -> str:
    return "the change of plan" if count == 1 else f"{count} changes of plan"


def _within(pair: Pair) -> str:
    return f"within {_difference(pair):.2g}" if pair.after != pair.before else "exactly"


def _difference(pair: Pair) -> float:
    return abs(pair.after - pair.before) / max(abs(pair.before), 1e-9)


def _usual(seam: Seam) -> bool:
    largest = max(abs(right - left) for left, right in itertools.pairwise(seam.before))
    return abs(seam.after - seam.before[-1]) <= _USUAL * largest + 1e-6
