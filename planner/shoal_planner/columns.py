"""The templates that are worth having: generated from those that the packing uses, until no neighbour is better.

Owns the growing set of priced templates. A template is a sequence of options with a micro-batch size; what devices it
needs and what it gets done within a time are the columns of the packing (`packing`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_planner.costs import CostModel
from shoal_planner.options import Basis, Figures, Floats, Ints, Kind, Option, side_by_side, sizes_of
from shoal_planner.packing import Simplex, worth
from shoal_planner.templates import (
    Sequence,
    all_sequences,
    as_table,
    fastest_s,
    first_sequences,
    neighbours,
    places,
    price,
    whole_sequences,
)

_GROWN_FROM, _MOST_GROWN_FROM = 20, 640  # templates of which neighbours are looked at, a round
_STALE = 0.9995  # a round that gains less has not helped
_ALONE_ROUNDS = 40
_ALONE_TRIES = 4
_DIVED_FROM, _DIVE_ROUNDS, _DIVE_PART = 20, 2, 0.3
# After this part of all templates, so far beyond the best round so far, a round is given up.
_GIVE_UP = ((0.2, 1.1), (0.4, 1.05), (0.7, 1.02))
_PRECISION = 1.0003  # to which times are found
_FAR = 1.3  # what begins so far from the best round so far is not grown
_CROWD, _HOPELESS_LOSS = 3000, 0.15  # of so many templates, those that lose more than this are dropped
# Bounds on the exchange that are tried: shares of the longest one, later of the best bound so far.
_FIRST_BOUNDS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.13, 0.09, 0.06)
_NEXT_BOUNDS = (1.0, 0.9, 1.1)
_FIRST_SIZES = (1, 4)
_COMPLETE, _MOST_COMPLETE = 8, 3000  # on so few devices all templates are tried, if they are no more than these
# Templates of like depth are priced together, unless they are so few that each call costs more than its rows.
_WIDTHS, _FEW = (0, 4, 10, 24, 48), 300

Template = tuple[Sequence, int]  # and its micro-batch size
_COLUMNS = ("needs", "period_s", "fill_s", "sync_s", "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """Of some `rows` of new templates what the columns below are of all."""

    rows: Ints
    needs: Floats
    period_s: Floats
    fill_s: Floats
    sync_s: Floats
    size: Floats


class Columns:
    """Templates on these kinds of node, `most` of them or so, for `batch` samples; `holders` pipelines share optimizer
    state, all of them `within` the same nodes or not. Columns of the same options may share their `bases`."""

    def __init__(
        self,
        costs: CostModel,
        kinds: tuple[Kind, ...],
        options: tuple[Option, ...],
        holders: int,
        batch: int,
        most: int,
        most_pipelines: int | None = None,
        within: bool = False,
        copies: int = 0,
        bases: dict[int, Basis] | None = None,
    ) -> None:
        self.costs = costs
        self.kinds = kinds
        self.options = options
        self.holders = holders
        # The number of pipelines, where it is limited, is one more thing of which every template needs one.
        self.stock = np.array([*(float(kind.devices) for kind in kinds), float(most_pipelines or 1 << 30)])
        self.batch = batch
        self.most = most
        self._within = within
        self._copies = copies
        self.num_layers = costs.job.model.layers
        self.sizes = tuple(sizes_of(self.batch))
        self.bound_s = float("inf")
        self._worths: tuple[float, Floats] | None = None  # a time, and what devices are worth in it
        self._simplex: Simplex | None = None
        self.num_priced = 0
        self.templates: list[Template] = []
        self.needs: Floats = np.zeros((0, len(kinds) + 1))
        self.period_s: Floats = np.zeros(0)
        self.fill_s: Floats = np.zeros(0)
        self.sync_s: Floats = np.zeros(0)
        self.size: Floats = np.zeros(0)
        self._bases = {} if bases is None else bases
        self._known: set[Template] = set()
        self._grown: set[Template] = set()
        self._figures: dict[int, tuple[Figures, Floats]] = {}
        places_of = {kind.number: place for place, kind in enumerate(kinds)}
        self._width = np.zeros((len(options), len(kinds) + 1))
        for index, option in enumerate(options):
            self._width[index, places_of[option.kind.number]] = option.width

    def start(self) -> None:
        first = None
        if self.stock[:-1].sum() <= _COMPLETE:
            first = all_sequences(self.options, self.num_layers, _MOST_COMPLETE)
        if first is not None:
            self._start(first)
            return
        figures, _ = self.figures(1)
        for rank in (-figures.capacity, -figures.block_s, figures.block_s):
            self._start(list(whole_sequences(self.options, rank, self.num_layers)))
        for more in (False, True):  # a large model fits only on many devices
            if not more or not self.templates:
                self._start(list(first_sequences(self.options, self.num_layers, more=more)))

    def _start(self, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        sizes = [size for size in _FIRST_SIZES if size <= self.batch]
        self.add((sequence, size) for size in sizes for sequence in sequences)

    def add(self, templates: Iterable[Template]) -> None:
        by_size: dict[int, list[Template]] = {}
        for template in templates:
            if template not in self._known:
                self._known.add(template)
                by_size.setdefault(template[1], []).append(template)
        new = [template for group in by_size.values() for template in group]
        if not new:
            return
        offset = {size: number * len(self.options) for number, size in enumerate(by_size)}
        offsets = np.array([offset[size] for _, size in new])
        figures, sync_s = self._side_by_side(tuple(by_size))
        if len(new) < _FEW:
            batches = [np.arange(len(new))]
        else:
            depth = np.array([len(sequence) for sequence, _ in new])
            batches = [np.flatnonzero((depth > least) & (depth <= most)) for least, most in itertools.pairwise(_WIDTHS)]
        found = [self._priced(new, rows, offsets[rows], figures, sync_s) for rows in batches if len(rows)]
        rows = np.concatenate([each.rows for each in found])
        order = np.argsort(rows)
        self.num_priced += len(new)
        self.templates.extend(new[row] for row in rows[order])
        for name in _COLUMNS:
            more = np.concatenate([getattr(each, name) for each in found])[order]
            setattr(self, name, np.concatenate([getattr(self, name), more]))

    def _priced(self, new: list[Template], rows: Ints, offsets: Ints, figures: Figures, sync_s: Floats) -> _Priced:
        """Those of these rows that fit and are not hopeless."""
        table = as_table([new[row][0] for row in rows])
        needs = self._needs(table)
        table = np.where(table >= 0, table + offsets[:, None], -1)
        within = np.flatnonzero((needs <= self.stock + 1e-9).all(axis=1) & self._promising(table, needs, figures))
        table = table[within]
        prices = price(table, figures, self.num_layers)
        fits = np.flatnonzero(np.isfinite(prices.period_s))
        table = table[fits]
        exchange_s = prices.layers[fits] * sync_s[-1, table] + sync_s[places(table), table]
        return _Priced(
            rows=rows[within[fits]],
            needs=needs[within[fits]],
            period_s=prices.period_s[fits],
            fill_s=prices.fill_s[fits],
            sync_s=np.where(table >= 0, exchange_s, 0.0).max(axis=1, initial=0.0),
            size=figures.size[table[:, 0]].astype(np.float64),
        )

    def _needs(self, table: Ints) -> Floats:
        """By row of option numbers and kind, the devices; and one pipeline."""
        slots = 1 + len(self.options)  # the first is for -1: no stage
        numbers = table + 1 + slots * np.arange(len(table))[:, None]
        counts = np.bincount(numbers.ravel(), minlength=slots * len(table)).reshape(-1, slots)
        needs: Floats = counts[:, 1:] @ self._width
        needs[:, -1] = 1.0
        return needs

    def _promising(self, table: Ints, needs: Floats, figures: Figures) -> NDArray[np.bool_]:
        """Whether templates could be worth what their devices are, by a bound that is quickly had."""
        if self._worths is None:
            return np.ones(len(table), dtype=np.bool_)
        time_s, worths = self._worths
        there = table >= 0
        fixed_s = np.where(there, figures.end_s[places(table), table], 0.0)
        period_s = fastest_s(figures.block_s[table], fixed_s, there, self.num_layers)
        fill_s = np.maximum(period_s, self.num_layers * np.where(there, figures.block_s[table], np.inf).min(axis=1))
        most = figures.size[table[:, 0]] * ((time_s - fill_s) / period_s + 1)
        found: NDArray[np.bool_] = most >= (1 - _HOPELESS_LOSS) * (needs @ worths)
        return found

    def _side_by_side(self, sizes: tuple[int, ...]) -> tuple[Figures, Floats]:
        parts = [self.figures(size) for size in sizes]
        return side_by_side([figures for figures, _ in parts]), np.concatenate([sync_s for _, sync_s in parts], axis=-1)

    def figures(self, size: int) -> tuple[Figures, Floats]:
        if size not in self._figures:
            if size not in self._bases:
                self._bases[size] = Basis(self.costs, self.options, size)
            figures = Figures(self._bases[size], self.costs, self.holders, self._copies)
            self._figures[size] = (figures, figures.sync_s(self.costs, self.kinds, within=self._within))
        return self._figures[size]

    def values(self, time_s: float) -> Floats:
        """Samples that each template gets done in the time, if none may be longer at the exchange than `bound_s`."""
        left_s = time_s - min(self.bound_s, float(self.sync_s.max(initial=0.0)))
        numbers = np.floor((left_s - self.fill_s) / self.period_s * (1 + 1e-12)) + 1
        found: Floats = self.size * np.clip(numbers, 0, self.batch // self.size)
        return np.where(self.sync_s <= self.bound_s, found, 0.0)

    def alone_s(self) -> Floats:
        """Seconds of a step with this one pipeline."""
        numbers = np.ceil(self.batch / self.size)
        found: Floats = self.fill_s + (numbers - 1) * self.period_s
        return found + self.sync_s

    def least_time(self, about_s: float = 0.0) -> float:
        """The shortest time in which fractions of templates get the batch done; inf without any template. `about_s` is
        where to look first."""
        allowed = self.sync_s <= self.bound_s
        if not allowed.any():
            return float("inf")
        high_s = float((self.alone_s() - self.sync_s)[allowed].min()) + self.bound_s
        low_s = high_s / (2 * float(self.stock[:-1].sum()))
        if low_s < about_s < high_s:
            low_s, high_s = self._bracket(about_s, high_s)
        while high_s > low_s * _PRECISION:
            middle = float(np.sqrt(low_s * high_s))
            if self._is_enough(middle):
                high_s = middle
            else:
                low_s = middle
        return high_s

    def _bracket(self, about_s: float, high_s: float) -> tuple[float, float]:
        if not self._is_enough(about_s):
            return about_s, min(high_s, about_s * 2)
        low_s = about_s
        while True:
            high_s, low_s = low_s, low_s * 0.97
            if not self._is_enough(low_s):
                return low_s, high_s

    def grow(self, worse_s: float = float("inf")) -> float:
        """Adds neighbours of the best templates, of more of them where that no longer helps, until there are `most`;
        the time in which all samples get done. Sets `bound_s` to what suits that time best. Gives up where it begins
        far beyond `worse_s`."""
        time_s = self.least_time_bounded()
        if time_s > worse_s * _FAR:
            return float("inf")
        return self._tightened(self._grow(time_s, _GROWN_FROM, worse_s))

    def least_time_bounded(self) -> float:
        """The least time over bounds on the exchange; sets `bound_s`."""
        return self._least_bounded(_FIRST_BOUNDS if not np.isfinite(self.bound_s) else _NEXT_BOUNDS, 0.0)

    def _grow(self, time_s: float, num_looked_at: int, worse_s: float) -> float:
        while np.isfinite(time_s) and self.num_priced < self.most and num_looked_at <= _MOST_GROWN_FROM:
            values = self.values(time_s)
            _, fractions, worths = worth(values, self.needs, self.stock)
            loss = (self.needs @ worths - values) / np.maximum(self.needs @ worths, 1e-12)
            grown = self._unseen(np.where(fractions > 1e-9, -1.0, loss), num_looked_at, _HOPELESS_LOSS)
            if not grown:
                break
            if len(loss) > _CROWD:
                self._keep(np.flatnonzero((loss < _HOPELESS_LOSS) | (fractions > 1e-9)))
            before = self.num_priced
            self._worths = (time_s, worths)
            self._add_neighbours(grown)
            better_s = self._least_bounded(_NEXT_BOUNDS, time_s)
            if self.num_priced == before or better_s > time_s * _STALE:
                num_looked_at *= 2
            time_s = min(time_s, better_s)
            if any(self.num_priced > self.most * part and time_s > worse_s * far for part, far in _GIVE_UP):
                return float("inf")
        return time_s

    def dive(self, time_s: float) -> tuple[float, dict[Template, int]]:
        """Whole numbers of templates, and what they are worth: the whole part of the fractional best is taken, and for
        what is left over templates are generated anew, until nothing fits any more."""
        rest, chosen, total = self.stock.copy(), dict[Template, int](), 0.0
        last = self.num_priced + self.most * _DIVE_PART
        looked = 0
        while True:
            values = np.where((self.needs <= rest + 1e-9).all(axis=1), self.values(time_s), 0.0)
            if not values.any():
                return total, chosen
            _, fractions, worths = worth(values, self.needs, rest)
            if looked < _DIVE_ROUNDS and self.num_priced < last:
                looked += 1
                loss = (self.needs @ worths - values) / np.maximum(self.needs @ worths, 1e-12)
                loss = np.where(fractions > 1e-9, -1.0, np.where(values > 0, loss, 1.0))
                grown = self._unseen(loss, _DIVED_FROM, _HOPELESS_LOSS)
                if grown:
                    self._worths = (time_s, worths)
                    self._add_neighbours(grown)
                    continue
            whole = np.floor(fractions + 1e-9)
            if not chosen and whole.any():  # one less of each leaves room to join the rest
                whole = np.maximum(whole - 1, 0)
            if not whole.any():
                whole[int(np.argmax(fractions))] = 1
            for row in np.flatnonzero(whole):
                template = self.templates[row]
                chosen[template] = chosen.get(template, 0) + int(whole[row])
            total += float(values @ whole)
            rest = rest - whole @ self.needs
            looked = 0

    def _tightened(self, time_s: float) -> float:
        """With the bound on the exchange at what the best templates need."""
        if not np.isfinite(time_s):
            return time_s
        used = self._reached(time_s)[1] > 1e-9
        bound_s, self.bound_s = self.bound_s, float(self.sync_s[used].max(initial=0.0))
        better_s = self.least_time(time_s)
        if better_s > time_s:
            self.bound_s = bound_s
        return min(time_s, better_s)

    def num_pipelines(self, time_s: float) -> int:
        """How many pipelines there are about, where they have so much time."""
        return max(1, round(float(self._reached(time_s)[1].sum())))

    def _unseen(self, loss: Floats, count: int, most: float) -> list[Template]:
        """Of the templates that lose no more than this, the best whose neighbours were not looked at before."""
        found: list[Template] = []
        for row in np.argsort(loss, kind="stable"):
            if len(found) == count or loss[row] > most:
                break
            if self.templates[row] not in self._grown:
                found.append(self.templates[row])
        self._grown.update(found)
        return found

    def _keep(self, rows: Ints) -> None:
        self.templates = [self.templates[row] for row in rows]
        self.needs = self.needs[rows]
        self.period_s, self.fill_s = self.period_s[rows], self.fill_s[rows]
        self.sync_s, self.size = self.sync_s[rows], self.size[rows]

    def _least_bounded(self, shares: tuple[float, ...], about_s: float) -> float:
        """The least time over some bounds on the exchange: shares of the present one, or of the longest there is."""
        longest_s = float(self.sync_s.max(initial=0.0))
        base_s = self.bound_s if np.isfinite(self.bound_s) else longest_s
        best_s, best_bound_s = float("inf"), self.bound_s
        for share in shares:
            self.bound_s = base_s * share
            if np.isfinite(best_s) and not self._is_enough(best_s * _STALE):
                continue
            time_s = self.least_time(about_s if not np.isfinite(best_s) else best_s)
            if time_s < best_s:
                best_s, best_bound_s = time_s, self.bound_s
        self.bound_s = best_bound_s
        return best_s

    def grow_alone(self, worse_s: float = float("inf")) -> None:
        """As `grow`, for the best single pipeline."""
        best = np.inf
        for number in range(_ALONE_ROUNDS):
            seconds = self.alone_s()
            if not len(seconds) or not seconds.min() < best * _STALE or self.num_priced > self.most:
                break
            if seconds.min() > worse_s * (_FAR if number > _ALONE_TRIES else _FAR**3):
                break
            best = float(seconds.min())
            self._add_neighbours(self._unseen(seconds / best - 1, _GROWN_FROM, _HOPELESS_LOSS))

    def _add_neighbours(self, templates: list[Template]) -> None:
        new: list[Template] = []
        for sequence, size in templates:
            at = self.sizes.index(size)
            new.extend((sequence, other) for other in self.sizes[max(0, at - 1) : at + 2] if other != size)
            new.extend((other, size) for other in neighbours(sequence, self.options, self.num_layers))
        self.add(new)

    def _is_enough(self, time_s: float) -> bool:
        """Whether fractions of templates get the batch done in the time."""
        if self._simplex is None or self._simplex.needs is not self.needs:
            self._simplex = Simplex(self.needs, self.stock)
        return self._simplex.best(self.values(time_s), self.batch) >= self.batch

    def _reached(self, time_s: float) -> tuple[float, Floats, Floats]:
        return worth(self.values(time_s), self.needs, self.stock)
