"""All layers of a pipeline of one replica per stage with which it runs so many samples within some time.

Owns the enumeration under bounds; exact seconds come from `chain_times`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal_planner.chain_times import ChainTimes
from shoal_planner.options import Floats, Ints
from shoal_planner.shapes import Chain
from shoal_planner.stage_costs import Held

T = TypeVar("T", np.float64, np.int64)
_SLACK = 1 + 1e-9  # bounds allow for rounding
_NEVER_S = 1e15  # in place of inf, so that sums and differences stay numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterStage:
    """By stage, seconds of exchange and of update [S, 2]: of each block, and of the ends of the model."""

    per_block: Floats
    at_ends: Floats


class StageTimes(NamedTuple):
    """Sizes of micro-batches [Q], the seconds of stages with them by layers [S, L+1, Q], and those of all stages
    together that only the first one waits for [Q]."""

    sizes: Ints
    seconds: Floats
    hidden_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Layers [K, S], the seconds of the pipeline by samples [K, B+1], and what comes after it at least [K]."""

    layers: Ints
    seconds: Floats
    after_s: Floats

    def taken(self, which: Ints) -> Rows:
        return Rows(layers=self.layers[which], seconds=self.seconds[which], after_s=self.after_s[which])

    def within(self, within_s: float, least: int) -> Rows:
        """Those that run so many samples or more in this time."""
        kept = self.seconds[:, least:].min(axis=1, initial=np.inf) + self.after_s <= within_s * _SLACK
        return self if kept.all() else self.taken(np.flatnonzero(kept))

    def later(self, after: AfterStage) -> Rows:
        """With other figures of what comes after."""
        busy_s = self.layers[:, :, None] * after.per_block + after.at_ends
        return Rows(layers=self.layers, seconds=self.seconds, after_s=busy_s.max(axis=1).sum(axis=1))

    def samples(self, within_s: float) -> Ints:
        """Numbers that some of the rows run in this time."""
        return np.flatnonzero((self.seconds + self.after_s[:, None] <= within_s * _SLACK).any(axis=0))

    def most(self, within_s: float) -> int:
        """Samples in this time."""
        return int(self.samples(within_s).max(initial=0))


def rows_within(
    times: ChainTimes, chain: Chain, stages: StageTimes, held: Held, after: AfterStage, within_s: float, least: int
) -> Rows:
    """All layers with which the pipeline runs `least` samples or more, and what comes after takes no longer. `stages`
    have all sizes with which it may, and as many micro-batches in flight as there must be."""
    grown = _Growth(stages, after, min(within_s * _SLACK, _NEVER_S / 2), least)
    layers, after_s = grown.rows()
    seconds = times.row_table(chain, held, layers) if len(layers) else np.zeros((0, times.batch + 1))
    return Rows(layers=layers, seconds=seconds, after_s=after_s).within(within_s, least)


class _Growth:
    """Rows grown stage by stage, by what each would take at least."""

    def __init__(self, stages: StageTimes, after: AfterStage, limit_s: float, least: int) -> None:
        self._stages, counts, _ = stages.seconds.shape
        self._limit_s = limit_s
        self._others = -(-least // stages.sizes) - 1  # [Q], micro-batches that wait for the slowest stage
        self._table, self._hidden_s = np.minimum(stages.seconds, _NEVER_S), stages.hidden_s
        self._counts = np.arange(counts)
        self._after = after.per_block[:, None] * self._counts[:, None] + after.at_ends[:, None]  # [S, L+1, 2]
        self._lowest = np.zeros(self._stages, dtype=np.int64)
        self._lowest[1:-1] = 1
        self._first_s = self._table[np.arange(self._stages), self._lowest]  # [S, Q]
        added = np.where(self._table[:, 1:] < _NEVER_S, np.diff(self._table, axis=1), np.inf).min(axis=(0, 1))
        self._each_s = np.where(np.isfinite(added), added, 0.0)  # [Q], of a layer at least

    def rows(self) -> tuple[Ints, Floats]:
        """Layers [K, S], and what comes after [K]."""
        highest = self._highest()
        rest_s, rest, room = _following(self._first_s), _following(self._lowest), _following(highest)
        num_sizes = self._table.shape[2]
        made, left = np.zeros((1, 0), dtype=np.int64), self._counts[-1:]
        filled, peak, worst = np.zeros((1, num_sizes)), np.zeros((1, num_sizes)), np.zeros((1, 2))
        for s in range(self._stages):
            some = np.arange(self._lowest[s], highest[s] + 1)
            rows, layers = np.repeat(np.arange(len(left)), len(some)), np.tile(some, len(left))
            after_left = left[rows] - layers
            fits = (after_left >= rest[s]) & (after_left <= room[s])
            rows, layers, after_left = rows[fits], layers[fits], after_left[fits]
            here = self._table[s][layers]
            filled, peak = filled[rows] + here, np.maximum(peak[rows], here)
            worst = np.maximum(worst[rows], self._after[s][layers])
            least_s = filled + rest_s[s] + (after_left - rest[s])[:, None] * self._each_s + self._others * peak
            kept = (least_s + self._hidden_s).min(axis=1) + worst.sum(axis=1) <= self._limit_s
            made = np.concatenate([made[rows[kept]], layers[kept][:, None]], axis=1)
            left, filled, peak, worst = after_left[kept], filled[kept], peak[kept], worst[kept]
        return made, worst.sum(axis=1)

    def _highest(self) -> Ints:
        """[S]: the most layers of each stage, all others as quick as can be; -1 if there is no number."""
        found = np.full(self._stages, -1)
        total_s = self._first_s.sum(axis=0) + self._hidden_s
        for s in range(self._stages):
            free = self._counts[-1] - self._counts - (self._lowest.sum() - self._lowest[s])
            around = total_s - self._first_s[s] + (1 + self._others) * self._table[s]
            around = around + np.maximum(free, 0)[:, None] * self._each_s
            some = (around + self._after[s].sum(axis=-1)[:, None] <= self._limit_s).any(axis=1)
            some &= (self._counts >= self._lowest[s]) & (free >= 0)
            found[s] = np.flatnonzero(some).max(initial=-1)
        return found


def _following(figures: NDArray[T]) -> NDArray[T]:
    """By stage, the sum of those of the stages after it."""
    found: NDArray[T] = np.cumsum(figures[::-1], axis=0)[::-1] - figures
    return found
