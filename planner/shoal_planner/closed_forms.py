"""Seconds of a pipeline under the schedules other than 1F1B, from those of its stages: sums and maxima, so that nothing
that gets faster makes a step slower. On equal stages they give the published bubbles. 1F1B itself stands in `predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of a micro-batch in a stage: forward, gradient of the input, gradients of the weights; the first two with
    what the stage sends on and gets back."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s


def interleaved_s(stages: Sequence[Sequence[float]], micro_batches: int) -> float:
    """`stages` are seconds by chunk, forward and backward (Narayanan et al. 2021b, 2.2: on equal stages the bubble is
    (p - 1) t / v).

    A stage works on all micro-batches after the first one came through the first chunks before it, and before the last
    one goes through those after it. With fewer micro-batches than stages it waits between its chunks too: one of them
    takes its way through all chunks, and the others follow at the pace of the slowest chunk.
    """
    slowest_s, first_s = 0.0, 0.0
    after_s = sum(chunks[-1] for chunks in stages)
    for chunks in stages:
        after_s -= chunks[-1]
        slowest_s = max(slowest_s, first_s + micro_batches * sum(chunks) + after_s)
        first_s += chunks[0]
    way_s = sum(sum(chunks) for chunks in stages)
    return max(slowest_s, way_s + (micro_batches - 1) * max(max(chunks) for chunks in stages))


def zero_bubble_s(stages: Sequence[Passes], micro_batches: int) -> float:
    """ZB-H1 (Qi et al. 2024, 2: on equal stages the bubble is (p - 1)(f + b - w), a third of 1F1B's where all three are
    equal).

    For each stage: the way of the first micro-batch to the end and back, or the stage's own warm-up if that is longer;
    then all its work but the gradients of weights that it is behind; then these, or the way of the last micro-batch to
    one of the stages before it and what that one is behind.
    """
    longest_s, arrived_s = 0.0, 0.0
    for s, stage in enumerate(stages):
        arrived_s += stage.forward_s
        beyond_s = sum(later.forward_s + later.input_s for later in stages[s + 1 :])
        ahead, behind = min(len(stages) - s, micro_batches) - 1, min(s, micro_batches - 1)
        back_s = arrived_s + max(ahead * stage.forward_s, beyond_s)
        rest_s = (micro_batches - 1 - ahead) * stage.forward_s + micro_batches * stage.input_s
        rest_s += (micro_batches - 1 - behind) * stage.weight_s
        longest_s = max(longest_s, back_s + rest_s + _tail_s(stages[: s + 1], micro_batches))
    return longest_s


def _tail_s(stages: Sequence[Passes], micro_batches: int) -> float:
    """From the last gradient of the input in the last of these stages until all that come before it are done."""
    longest_s = way_s = 0.0
    for s in range(len(stages) - 1, -1, -1):
        longest_s = max(longest_s, way_s + (min(s, micro_batches - 1) + 1) * stages[s].weight_s)
        way_s += stages[s - 1].input_s if s else 0.0
    return longest_s
