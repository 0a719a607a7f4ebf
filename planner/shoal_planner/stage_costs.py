"""Seconds and bytes of one replica in one place of its pipeline, for all layers and samples that it may have.

Owns the reading of `costs` and `memory` into arrays; what stages and pipelines make of them is in `chain_times`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal_planner.again import Kinds
from shoal_planner.costs import CostModel
from shoal_planner.memory import BACKWARD_BLOCKS, RECOMPUTED_BLOCKS, stage_bytes, unit_elements, usable_bytes
from shoal_planner.options import Floats


class Held(NamedTuple):
    """What decides how much optimizer state a replica owns: how many replicas of *other* pipelines hold a block that it
    holds, how many of all hold the embedding, and how many the head."""

    others: int
    first: int
    last: int


class Cost(NamedTuple):
    """Seconds and bytes of a replica in one place of its pipeline, by layers [L+1] and samples [B+1]."""

    plain_s: Floats  # [L+1, B+1]
    kinds: Kinds  # [B+1] of computing a block again, of one micro-batch in flight
    fixed_bytes: Floats  # [L+1], all that does not hang on samples or on who else holds what
    flight_bytes: Floats  # [L+1, B+1] of each micro-batch in flight
    once_bytes: Floats  # [B+1], once, and as much more if any block is computed again
    again_bytes: Floats
    room_bytes: float
    end_elements: tuple[float, float]  # of the embedding and of the head
    block_elements: float


def stage_cost(costs: CostModel, node: str, tp: int, first: bool, last: bool) -> Cost:
    """Of `tp` devices of this node in a stage at these ends of its pipeline."""
    train, model = costs.job.train, costs.job.model
    batch = train.global_batch
    counts, samples = np.arange(model.layers + 1.0), np.arange(batch + 1.0)
    block, selective, full, end = np.zeros((4, batch + 1))
    for rows in range(1, batch + 1):
        block[rows] = costs.part("block", node, tp, rows).total_s
        selective[rows] = costs.part("block", node, tp, rows, "selective").total_s - block[rows]
        full[rows] = costs.part("block", node, tp, rows, "full").total_s - block[rows]
        end[rows] = costs.stage(node, tp, rows, {}, embedding=first, head=last).total_s
    line = stage_bytes(model, train.seq_len, train.precision, tp, 1, embedding=first, head=last)
    kept = line.block_flight
    once, anew = (
        samples * line.border + np.maximum(samples * line.logits, line.staging + blocks * samples * line.backward)
        for blocks in (BACKWARD_BLOCKS, BACKWARD_BLOCKS + RECOMPUTED_BLOCKS)
    )  # as `StageBytes.once`
    return Cost(
        plain_s=end + counts[:, None] * block,
        kinds=Kinds(
            selective,
            full,
            samples * (kept["none"] - kept["selective"]),
            samples * (kept["none"] - kept["full"]),
        ),
        fixed_bytes=(line.end_elements + counts * line.block_elements) * line.state_size
        + (line.frozen_ends + counts * line.frozen_block),
        flight_bytes=samples * (line.flight + counts[:, None] * kept["none"]),
        once_bytes=once,
        again_bytes=anew - once,
        room_bytes=usable_bytes(costs.device(node)),
        end_elements=(unit_elements(model, 0, tp), unit_elements(model, model.layers + 1, tp)),
        block_elements=line.block_elements,
    )
