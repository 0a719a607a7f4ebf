"""Whether a job's loss is odd: no number, or far above what it was. Pure: a frozen LossWatch, and how each step
advances it. What is told of it, and to whom, is journal.py's and the pages'."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

NO_NUMBER, SPIKE = "no_number", "spike"
_NEWEST = 0.05  # share of the newest step in what is usual: about twenty steps count
_LEARNT = 20  # steps before anything is said
_SPREADS = 8.0  # above what is usual, by how much losses differ from it on average
_SHARE = 0.2  # and by at least this share of it
_GIVEN_IN = 50  # steps in a row that are odd: then that is how it is


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWatch:
    """`usual` and `spread` are of the newest of `num_steps`. `odd` is `no_number` or `spike` while the loss is that,
    for `num_odd` steps; it became so `alarms` times, at last at `step` with `loss` (None: no number)."""

    usual: float = 0.0
    spread: float = 0.0
    num_steps: int = 0
    odd: str = ""
    num_odd: int = 0
    alarms: int = 0
    step: int | None = None
    loss: float | None = None

    @property
    def sentence(self) -> str:
        """For people; empty while nothing is odd."""
        if self.odd == NO_NUMBER:
            return f"The loss is not a number since step {self.step}."
        if self.odd == SPIKE:
            return f"The loss jumped to {self.loss:.4g} at step {self.step}, from about {self.usual:.4g}."
        return ""


def watched(before: LossWatch, step: int, loss: float) -> LossWatch:
    """After one more step."""
    odd = _odd(before, loss)
    if odd and before.num_odd >= _GIVEN_IN and odd == SPIKE:
        return LossWatch(alarms=before.alarms, step=before.step, loss=before.loss)
    if odd == before.odd and odd:
        return replace(before, num_odd=before.num_odd + 1)
    if odd:
        told = None if odd == NO_NUMBER else loss
        return replace(before, odd=odd, num_odd=1, alarms=before.alarms + 1, step=step, loss=told)
    first = before.num_steps == 0
    usual = loss if first else before.usual + _NEWEST * (loss - before.usual)
    spread = 0.0 if first else before.spread + _NEWEST * (abs(loss - before.usual) - before.spread)
    return replace(before, usual=usual, spread=spread, num_steps=before.num_steps + 1, odd="", num_odd=0)


def _odd(before: LossWatch, loss: float) -> str:
    if not math.isfinite(loss):
        return NO_NUMBER
    above = loss - before.usual
    far = max(_SPREADS * before.spread, _SHARE * abs(before.usual))
    return SPIKE if before.num_steps >= _LEARNT and above > far else ""
