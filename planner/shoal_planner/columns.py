"""The templates that are worth having: generated from those that the packing uses, until no neighbour is better.

Owns the growing set of priced templates. A template is a sequence of options with a micro-batch size; what devices it
needs and what it gets done within a time are the columns of the packing (`packing`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shoal_planner.costs import CostModel
from shoal_planner.options import Figures, Floats, Kind, Option, sizes_of
from shoal_planner.packing import worth
from shoal_planner.templates import Sequence, as_table, first_sequences, neighbours, places, price

_GROWN_FROM, _MOST_GROWN_FROM = 20, 640  # templates of which neighbours are looked at, a round
_STALE = 0.9995  # a round that gains less has not helped
_ALONE_ROUNDS = 40
_HALVINGS = 16
_FIRST_SIZES = (1, 4)

Template = tuple[Sequence, int]  # and its micro-batch size


class Columns:
    """Templates on these kinds of node, `most` of them or so, for `batch` samples; `holders` pipelines share optimizer
    state."""

    def __init__(
        self,
        costs: CostModel,
        kinds: tuple[Kind, ...],
        options: tuple[Option, ...],
        holders: int,
        batch: int,
        most: int,
    ) -> None:
        self.costs = costs
        self.kinds = kinds
        self.options = options
        self.holders = holders
        self.stock = np.array([float(kind.devices) for kind in kinds])
        self.batch = batch
        self.most = most
        self.num_layers = costs.job.model.layers
        self.sizes = tuple(sizes_of(self.batch))
        self.templates: list[Template] = []
        self.needs: Floats = np.zeros((0, len(kinds)))
        self.period_s: Floats = np.zeros(0)
        self.fill_s: Floats = np.zeros(0)
        self.sync_s: Floats = np.zeros(0)
        self.size: Floats = np.zeros(0)
        self._known: set[Template] = set()
        self._figures: dict[int, tuple[Figures, Floats]] = {}
        places_of = {kind.number: place for place, kind in enumerate(kinds)}
        self._width = np.zeros((len(options) + 1, len(kinds)))  # the last row is for -1: no stage
        for index, option in enumerate(options):
            self._width[index, places_of[option.kind.number]] = option.width

    def start(self) -> None:
        first = list(first_sequences(self.options, self.num_layers))
        self.add((sequence, size) for size in _FIRST_SIZES if size <= self.batch for sequence in first)

    def add(self, templates: Iterable[Template]) -> None:
        by_size: dict[int, list[Sequence]] = {}
        for sequence, size in templates:
            if (sequence, size) not in self._known:
                self._known.add((sequence, size))
                by_size.setdefault(size, []).append(sequence)
        for size, sequences in by_size.items():
            self._add(sequences, size)

    def _add(self, sequences: list[Sequence], size: int) -> None:
        table = as_table(sequences)
        needs = self._width[table].sum(axis=1)
        within = np.flatnonzero((needs <= self.stock + 1e-9).all(axis=1))
        if not len(within):
            return
        table, needs = table[within], needs[within]
        figures, sync_s = self.figures(size)
        prices = price(table, figures, self.num_layers)
        fits = np.flatnonzero(np.isfinite(prices.period_s))
        blocks = prices.layers[fits] + figures.end_blocks[places(table[fits])]
        exchange = np.where(table[fits] >= 0, blocks * sync_s[table[fits]], 0.0).max(axis=1, initial=0.0)
        self.templates.extend((sequences[within[row]], size) for row in fits)
        self.needs = np.concatenate([self.needs, needs[fits]])
        self.period_s = np.concatenate([self.period_s, prices.period_s[fits]])
        self.fill_s = np.concatenate([self.fill_s, prices.fill_s[fits]])
        self.sync_s = np.concatenate([self.sync_s, exchange])
        self.size = np.concatenate([self.size, np.full(len(fits), float(size))])

    def figures(self, size: int) -> tuple[Figures, Floats]:
        if size not in self._figures:
            figures = Figures(self.costs, self.options, size, self.holders)
            self._figures[size] = (figures, figures.sync_s(self.costs, self.kinds))
        return self._figures[size]

    def values(self, time_s: float) -> Floats:
        """Samples that each template gets done within the time."""
        numbers = np.floor((time_s - self.sync_s - self.fill_s) / self.period_s * (1 + 1e-12)) + 1
        found: Floats = self.size * np.clip(numbers, 0, self.batch // self.size)
        return found

    def alone_s(self) -> Floats:
        """Seconds of a step with this one pipeline."""
        numbers = np.ceil(self.batch / self.size)
        found: Floats = self.fill_s + (numbers - 1) * self.period_s
        return found

    def least_time(self, high_s: float = 0.0) -> float:
        """The shortest time in which fractions of templates get the batch done; inf without any template."""
        if not len(self.period_s):
            return float("inf")
        high_s = high_s or float((self.alone_s() + self.sync_s).min())
        low_s = high_s / 1024
        for _ in range(_HALVINGS):
            middle = float(np.sqrt(low_s * high_s))
            if self._reached(middle)[0] >= self.batch:
                high_s = middle
            else:
                low_s = middle
        return high_s

    def grow(self) -> float:
        """Adds neighbours of the best templates, of more of them where that no longer helps, until there are `most`;
        the time in which all samples get done."""
        time_s, num_looked_at = self.least_time(), _GROWN_FROM
        while np.isfinite(time_s) and len(self.templates) < self.most and num_looked_at <= _MOST_GROWN_FROM:
            values = self.values(time_s)
            _, fractions, worths = worth(values, self.needs, self.stock)
            loss = (self.needs @ worths - values) / np.maximum(self.needs @ worths, 1e-12)
            used = np.flatnonzero(fractions > 1e-9)
            near = np.argsort(loss, kind="stable")[:num_looked_at]
            before = len(self.templates)
            self._add_neighbours(sorted({*map(int, used), *map(int, near)}))
            better_s = self.least_time(time_s)
            if len(self.templates) == before or better_s > time_s * _STALE:
                num_looked_at *= 2
            time_s = min(time_s, better_s)
        return time_s

    def grow_alone(self) -> None:
        """As `grow`, for the best single pipeline."""
        best = np.inf
        for _ in range(_ALONE_ROUNDS):
            seconds = self.alone_s()
            if not len(seconds) or not seconds.min() < best * 0.999:
                break
            best = float(seconds.min())
            self._add_neighbours([int(row) for row in np.argsort(seconds, kind="stable")[: 2 * _GROWN_FROM]])

    def _add_neighbours(self, rows: list[int]) -> None:
        new: list[Template] = []
        for row in rows:
            sequence, size = self.templates[row]
            at = self.sizes.index(size)
            new.extend((sequence, other) for other in self.sizes[max(0, at - 1) : at + 2] if other != size)
            new.extend((other, size) for other in neighbours(sequence, self.options, self.num_layers))
        self.add(new)

    def _reached(self, time_s: float) -> tuple[float, Floats, Floats]:
        return worth(self.values(time_s), self.needs, self.stock)
