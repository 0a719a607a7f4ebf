"""Which exchanges of a plan go on beside computing. With none of these each rank exchanges, waits, and computes on.

Owns the value and its invariants. What overlapping hides is up to `hiding`, whether it pays to `overlap_choice`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_planner.algorithms import DIRECT
from shoal_planner.errors import InvalidField
from shoal_planner.groups import Group
from shoal_planner.job import Schedule
from shoal_planner.levels import Sharding

MOST_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """`stages`: what passes between stages is received ahead of its use. `shards`: weights that are split come together
    one unit ahead, and gradients go to their parts while the next unit computes. `gradients`: those that are whole are
    summed unit by unit as the last backward makes them, instead of after it. `tensor_chunks`: products whose parts
    tensor parallelism sums are computed in so many chunks of rows, each summed while the next one is computed; with
    more than one, sums of a backward also go on beside the products for gradients of weights."""

    stages: bool = False
    shards: bool = False
    gradients: bool = False
    tensor_chunks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.tensor_chunks <= MOST_CHUNKS:
            raise InvalidField("tensor_chunks", self.tensor_chunks, f"must be from 1 to {MOST_CHUNKS}")


NOTHING, AHEAD = Overlap(), Overlap(stages=True)


def check_overlap(overlap: Overlap, schedule: Schedule, sharding: Sharding, groups: tuple[Group, ...]) -> None:
    """Raises InvalidField where the rest of a plan leaves nothing to overlap, or no order to do it in."""
    if overlap.shards and sharding.weights == sharding.gradients == "none":
        problem = "must be false where sharding splits neither weights nor gradients: then nothing passes within a step"
        raise InvalidField("overlap.shards", True, problem)
    if not overlap.gradients:
        return
    if sharding.gradients != "none":
        problem = "must be false where sharding splits gradients: then they go to their parts by overlap.shards"
    elif schedule == "interleaved":
        problem = "must be false where the schedule is 'interleaved': a stage would wait for one that waits for it"
    elif any(group.collective != DIRECT for group in groups):
        problem = "must be false where groups name collectives: their rounds wait for each other"
    else:
        return
    raise InvalidField("overlap.gradients", True, problem)


def overlap_text(overlap: Overlap) -> str:
    """What goes on beside computing, as in "activations between stages, and sums of gradients"."""
    parts = [
        text
        for on, text in (
            (overlap.stages, "what passes between stages"),
            (overlap.shards, "split weights and gradients"),
            (overlap.gradients, "sums of gradients"),
            (overlap.tensor_chunks > 1, f"tensor parallelism in {overlap.tensor_chunks} chunks"),
        )
        if on
    ]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
