"""How many samples a pipeline of one replica per stage runs within some time, at most: bounds that ask for no layers.

Owns closed forms over many pipelines at once: of crews by their ends alone, then of pipelines in their order. Times of
stages come from `unit_figures`; E pipelines, S stages, B sizes of micro-batches, Q of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal_planner.chain_times import Bools
from shoal_planner.crews import Crew, Ends, Lines
from shoal_planner.options import Floats, Ints
from shoal_planner.predict import vote_s
from shoal_planner.rows import StageTimes
from shoal_planner.shapes import Cell, Chain, Slots
from shoal_planner.unit_figures import Hops, UnitFigures, ends_of

_CELLS = 1 << 20  # of tables made at once
_HALVINGS, _WIDEST = 8, 2.0  # of the range in which the time of the slowest stage is looked for
_NEVER_S = 1e15
_SLACK = 1 + 1e-9  # bounds allow for rounding


class Paces(NamedTuple):
    """At least: of the slowest stage [E, Q], of one micro-batch through all stages [E, Q], and of what comes after all
    pipelines [E]."""

    period_s: Floats
    fill_s: Floats
    after_s: Floats

    def taken(self, which: Ints, sizes: Ints) -> Paces:
        """Of these pipelines, the sizes in these places."""
        places = np.ix_(which, sizes)
        return Paces(self.period_s[places], self.fill_s[places], self.after_s[which])

    def run(self, numbers: Ints, within_s: float) -> Bools:
        """[E, Q]: whether so many micro-batches of each size [Q] are done within the time."""
        with np.errstate(invalid="ignore"):
            whole_s = self.fill_s + (numbers - 1) * self.period_s + self.after_s[:, None]
        return np.isfinite(self.period_s) & (whole_s <= within_s * _SLACK)

    def most_samples(self, within_s: Floats | float) -> Ints:
        """[E]: within [E] seconds, in micro-batches of any size, if all of them are here."""
        batch = self.period_s.shape[1]
        sizes = np.arange(1, batch + 1)
        left_s = (within_s - self.after_s)[:, None] * _SLACK
        with np.errstate(invalid="ignore"):
            number = np.floor((left_s - self.fill_s) / self.period_s * _SLACK + 1e-9) + 1
        number = np.where((left_s >= self.fill_s) & np.isfinite(self.period_s), number, 0)
        found: Ints = (np.clip(number, 0, batch // sizes) * sizes).max(axis=1).astype(np.int64)
        return found


def least_layers(stages: int) -> Ints:
    """[S]: the first and the last stage may hold none."""
    found = np.ones(stages, dtype=np.int64)
    found[[0, -1]] = 0
    return found


def paces(figures: UnitFigures, types: Ints, hops: Hops, count: int, flights: Ints, sizes: Ints) -> Paces:
    """Of pipelines of these units [E, S], first and last in their places, where there are so many pipelines. `hops`
    [E, S-1, Q] are those to the next stage, `flights` [S, Q] the micro-batches in flight at least, of these sizes [Q].

    The slowest stage takes as long as its own fixed part, and as long as all stages together need for the layers if
    they end at the same time; then longer while whole layers do not fit.
    """
    layers, least = figures.times.num_layers, least_layers(types.shape[1])[:, None]
    block_s = figures.block_s[:, sizes - 1][types]  # [E, S, Q]
    fixed_s = figures.end_s[:, :, sizes - 1][types, ends_of(types.shape[1])]
    fixed_s[:, :-1] += hops.exposed_s
    even_s = (layers + (fixed_s / block_s).sum(axis=1)) / (1 / block_s).sum(axis=1)
    period_s = np.maximum((fixed_s + least * block_s).max(axis=1), even_s)
    caps = np.full_like(block_s, np.inf) if figures.ample else figures.most_layers(types, count, flights, sizes)
    period_s[(caps < least).any(axis=1) | (caps.sum(axis=1) < layers)] = np.inf
    for _ in range(types.shape[1]):
        with np.errstate(invalid="ignore"):
            held = np.floor((period_s[:, None] - fixed_s) / block_s * _SLACK + 1e-9)
        short = np.minimum(held, caps).sum(axis=1) < layers
        if not short.any():
            break
        longer_s = np.where(held >= caps, np.inf, fixed_s + (held + 1) * block_s).min(axis=1)
        period_s = np.where(short, longer_s, period_s)
    rest = layers - int(least.sum())
    fill_s = (fixed_s + least * block_s).sum(axis=1) + rest * block_s.min(axis=1) + hops.hidden_s.sum(axis=1)
    period_s = np.maximum(period_s, fill_s / types.shape[1])  # one more in flight only when one is back
    return Paces(period_s, fill_s, _after_s(figures, types, count))


def _after_s(figures: UnitFigures, types: Ints, count: int) -> Floats:
    """[E]: exchange and update, each as even as can be."""
    blocks, ends = figures.after(count)
    per_block, at_ends = blocks[types], ends[types, ends_of(types.shape[1])]  # [E, S, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        even_s = (figures.times.num_layers + (at_ends / per_block).sum(axis=1)) / (1 / per_block).sum(axis=1)
    even_s = np.where((per_block > 0).all(axis=1), even_s, 0.0)
    found: Floats = np.maximum(at_ends.max(axis=1), even_s).sum(axis=1)
    return found


def _least_vote_s(figures: UnitFigures, slots: Slots) -> float:
    """Whoever votes with the nodes of these slots: between nodes it may be quicker than within one."""
    times, names = figures.times, figures.times.names_of(slots)
    own_s = vote_s(times.costs, names)
    if len(names) > 1:
        return own_s
    others = {times.node_of(kind, number) for kind, _ in figures.units for number in (0, 1)} - {names[0], None}
    return min([own_s, *(vote_s(times.costs, (names[0], other)) for other in others if other is not None)])


class _Group(NamedTuple):
    """Crews of one size with each pair of ends: the crew's number, its units with those at the ends in their places,
    and the least that each may take to the next one."""

    owners: Ints
    types: Ints
    ends: list[tuple[Cell, Cell]]
    hops: Hops


class CrewBounds:
    """Of all crews."""

    def __init__(self, figures: UnitFigures, crews: tuple[Crew, ...]) -> None:
        self._figures, self._crews = figures, crews
        sizes = sorted({len(crew.cells) for crew in crews})
        self._groups = {size: self._group(size) for size in sizes}
        self._paces: dict[tuple[int, int], Paces] = {}
        votes_s = {slots: _least_vote_s(figures, slots) for slots in {crew.slots for crew in crews}}
        self.vote_s = np.array([votes_s[crew.slots] for crew in crews])

    def _group(self, size: int) -> _Group:
        owners, ends, ordered = [], [], []
        for number, crew in enumerate(self._crews):
            for first, last in crew.ends() if len(crew.cells) == size else ():
                owners.append(number)
                ends.append((first, last))
                ordered.append((first, *crew.between(first, last), last)[:size])
        types = np.array(
            [
                [self._figures.number[self._crews[number].kind(cell), cell.tp] for cell in order]
                for number, order in zip(owners, ordered, strict=True)
            ]
        )
        slots = np.array([[cell.slot for cell in order] for order in ordered])
        same = slots[:, :, None] == slots[:, None]
        here, there = np.broadcast_arrays(types[:, :, None], types[:, None])
        hops = self._figures.hops(here, there, same)  # [E, S, S, B]
        hops.exposed_s[:, np.arange(size), np.arange(size)] = np.inf
        exposed_s, whole_s = (
            some[:, :-1, 1:].min(axis=2) if size > 1 else some[:, :0, 0]
            for some in (hops.exposed_s, hops.exposed_s + hops.hidden_s)
        )
        with np.errstate(invalid="ignore"):
            hidden_s = np.where(np.isfinite(exposed_s), whole_s - exposed_s, 0.0)
        return _Group(np.array(owners), types, ends, Hops(exposed_s, hidden_s))

    def most(self, count: int, within_s: float, batch: int) -> tuple[Ints, dict[int, list[Ends]]]:
        """By crew, the most samples where there are so many pipelines, if all is done within these seconds; and the
        same by its ends."""
        best = np.zeros(len(self._crews), dtype=np.int64)
        by_ends: dict[int, list[Ends]] = {}
        for size, group in self._groups.items():
            if (size, count) not in self._paces:
                flights, every = np.ones((size, batch), dtype=np.int64), np.arange(1, batch + 1)
                self._paces[size, count] = paces(self._figures, group.types, group.hops, count, flights, every)
            found = self._paces[size, count].most_samples(within_s - self.vote_s[group.owners])
            np.maximum.at(best, group.owners, found)
            for place in np.flatnonzero(found):
                by_ends.setdefault(int(group.owners[place]), []).append(Ends(*group.ends[place], int(found[place])))
        return best, by_ends


class LineBound(NamedTuple):
    """A pipeline in its order, and seconds of its stages with those sizes of micro-batches that may do."""

    chain: Chain
    stages: StageTimes


def line_bounds(figures: UnitFigures, lines: Lines, count: int, within_s: float, least: int) -> list[LineBound]:
    """Those pipelines of one crew that may run `least` samples or more, where there are so many pipelines."""
    if not len(lines):
        return []
    types = np.array([figures.number[lines.slots[cell.slot].kind, cell.tp] for cell in lines.cells])[lines.orders]
    slots = np.array([cell.slot for cell in lines.cells])[lines.orders]
    every = np.arange(1, figures.times.batch + 1)
    sizes = every[-(-least // every) * every <= figures.times.batch]
    numbers = -(-least // sizes)
    every_hop = figures.hops(types[:, :-1], types[:, 1:], slots[:, :-1] == slots[:, 1:])
    hops = Hops(*(some[..., sizes - 1] for some in every_hop))
    hidden_s = hops.hidden_s.sum(axis=1)
    stages = types.shape[1]
    flights = np.minimum(np.arange(stages, 0, -1)[:, None], numbers)
    plain = paces(figures, types, hops, count, flights, sizes)
    runs = plain.run(numbers, within_s)
    kept, few = np.flatnonzero(runs.any(axis=1)), np.flatnonzero(runs.any(axis=0))
    found = []
    size = max(1, _CELLS // (stages * (figures.times.num_layers + 1) * max(1, len(few))))
    for part in (kept[begin : begin + size] for begin in range(0, len(kept), size)):
        tables = figures.tables(types[part], count, flights[:, few], sizes[few])
        tables[:, :-1] += hops.exposed_s[part][:, :, None, few]
        hidden = hidden_s[np.ix_(part, few)]
        enough = _sharper(tables, hidden, plain.taken(part, few)).run(numbers[few], within_s)
        for at in np.flatnonzero(enough.any(axis=1)):
            left = StageTimes(sizes[few][enough[at]], tables[at][..., enough[at]], hidden[at][enough[at]])
            found.append(LineBound(lines.chain(part[at]), left))
    return found


def _sharper(tables: Floats, hidden_s: Floats, plain: Paces) -> Paces:
    """With what is computed again, from seconds of stages [E, S, L+1, Q] and of what they hide [E, Q]. The slowest
    stage is found by bisection; in all stages together each layer adds what it adds in the best of places."""
    num, stages, counts, batch = tables.shape
    least = least_layers(stages)
    low, high = plain.period_s, plain.period_s * _WIDEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        held = (tables <= middle[:, None, None]).sum(axis=2)  # layers and one
        enough = (held > least[:, None]).all(axis=1) & (held.sum(axis=1) - stages >= counts - 1)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    added = np.diff(np.minimum(tables, _NEVER_S), axis=2)
    added[:, 1:-1, 0] = _NEVER_S  # in what each stage has at least
    first_s = tables[:, np.arange(stages), least].sum(axis=1)
    free = counts - 1 - int(least.sum())
    if free:
        first_s = first_s + np.partition(added.reshape(num, -1, batch), free - 1, axis=1)[:, :free].sum(axis=1)
    return Paces(low, np.maximum(plain.fill_s, first_s + hidden_s), plain.after_s)
