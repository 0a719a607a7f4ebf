"""Which blocks of a stage are computed again where memory is short: counts of selective and of full recomputation.

Selective recomputation mostly saves more bytes per second, full saves more of each block. So there are two mixes to
choose from: every block selectively before the first one fully, or full ones alone. Both grow with the bytes that are
missing, so more memory never makes a stage slower. Owns the counts; what a block costs and saves is up to `costs` and
`memory`, and what of three kinds and more is best exactly, to `mixes`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal_planner.costs import CostModel
from shoal_planner.memory import StageBytes
from shoal_planner.plan import Override, Recompute

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Figure: TypeAlias = Floats | float


class Kinds(NamedTuple):
    """Of one block: seconds that each kind adds to a micro-batch, and bytes that it gives back of all in flight."""

    selective_s: Figure
    full_s: Figure
    selective_bytes: Figure
    full_bytes: Figure

    def of(self, samples: Ints) -> Kinds:
        """Those of so many samples, where the figures are by samples."""
        return Kinds(*(np.asarray(figure)[samples] for figure in self))


def kinds_of(costs: CostModel, node: str, tp: int, samples: int, in_flight: int, line: StageBytes) -> Kinds:
    """Of blocks on these devices, `in_flight` micro-batches of so many samples at a time."""
    plain_s = costs.part("block", node, tp, samples).total_s
    kept = line.block_flight
    return Kinds(
        costs.part("block", node, tp, samples, "selective").total_s - plain_s,
        costs.part("block", node, tp, samples, "full").total_s - plain_s,
        in_flight * (kept["none"] - kept["selective"]),
        in_flight * (kept["none"] - kept["full"]),
    )


class Mix(NamedTuple):
    """How many blocks are computed again selectively, and fully: inf where no number suffices."""

    selective: Figure
    full: Figure

    def seconds(self, kinds: Kinds) -> Figure:
        return self.selective * kinds.selective_s + self.full * kinds.full_s

    def at(self, place: int | tuple[int, int]) -> tuple[int, int]:
        """The two counts there."""
        return int(np.asarray(self.selective)[place]), int(np.asarray(self.full)[place])

    def saved(self, kinds: Kinds) -> Figure:
        return self.selective * kinds.selective_bytes + self.full * kinds.full_bytes


def steps(over: Floats, layers: Floats, kinds: Kinds) -> Floats:
    """How many steps up a ladder give so many bytes back: first one after the other of the layers is computed again
    selectively, then one after the other fully. Beyond the last step where even that is too little."""
    first = np.ceil(over / np.maximum(kinds.selective_bytes, 1e-9))
    more = np.maximum(np.subtract(kinds.full_bytes, kinds.selective_bytes), 1e-9)
    second = layers + np.maximum(np.ceil((over - layers * kinds.selective_bytes) / more), 1.0)
    found: Floats = np.where(over <= 0, 0.0, np.where(first <= layers, np.maximum(first, 1.0), second))
    return found


def fulls(over: Floats, kinds: Kinds) -> Floats:
    """How many blocks give so many bytes back if all are computed again fully."""
    wanted = np.maximum(np.ceil(over / np.maximum(kinds.full_bytes, 1e-9)), 1.0)
    found: Floats = np.where(over <= 0, 0.0, wanted)
    return found


def mixes(steps: Floats, fulls: Floats, layers: Floats) -> tuple[Mix, Mix]:
    """What these steps and these full ones are in counts."""
    up = np.maximum(steps - layers, 0.0)
    ladder = Mix(
        np.where(steps <= layers, steps, np.maximum(layers - up, 0.0)), np.where(steps <= 2 * layers, up, np.inf)
    )
    return ladder, Mix(np.zeros_like(fulls), np.where(fulls <= layers, fulls, np.inf))


def cheapest(over: Floats, layers: Floats, kinds: Kinds) -> Mix:
    """The quicker of the two mixes that give so many bytes back."""
    if not (over > 0).any():  # as it would come out, and far sooner
        return Mix(np.zeros_like(over), np.zeros_like(over))
    ladder, full = mixes(steps(over, layers, kinds), fulls(over, kinds), layers)
    better = ladder.seconds(kinds) <= full.seconds(kinds)
    return Mix(np.where(better, ladder.selective, full.selective), np.where(better, ladder.full, full.full))


def marked(first: int, last: int, selective: int, full: int) -> tuple[Recompute, tuple[Override, ...]]:
    """What a stage of these layers says: full ones first, then selective ones, the rest as they are."""
    middle, end = first + full, first + full + selective
    rest: Recompute = "none" if end < last else "selective" if selective else "full" if full else "none"
    runs: tuple[tuple[int, int, Recompute], ...] = ((first, middle, "full"), (middle, end, "selective"))
    overrides = (
        Override(layers=(low, high), recompute=kind) for low, high, kind in runs if low < high and kind != rest
    )
    return rest, tuple(overrides)
