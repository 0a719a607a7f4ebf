"""The best plan with one replica per stage, proven: bounds first on who runs together in no order, then on the order,
then on layers, and at last all layers and deals of the batch that are left.

Owns the search. `crews` says who there is, `crew_bounds` how much each gets done at most, `rows` which layers are left,
`shape_exchange` what comes after.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from shoal_planner.chain_times import Bools, ChainTimes
from shoal_planner.cluster import Node
from shoal_planner.costs import CostModel
from shoal_planner.crew_bounds import CrewBounds, line_bounds
from shoal_planner.crews import Ends, Parts, crews, lines
from shoal_planner.options import Floats, Ints, tp_degrees
from shoal_planner.plan import Plan
from shoal_planner.rows import Rows, rows_within
from shoal_planner.shape_exchange import Exchanges, Shape, placed_on
from shoal_planner.shape_plan import have_ample_hosts, plan_of, rooms_of
from shoal_planner.shapes import Chain, Slots
from shoal_planner.unit_figures import UnitFigures

T = TypeVar("T")
# Nearer than this, two plans are as good.
_TIE = 1e-12
# Of the best time known, what is searched for first: less is left within less time, and what is found ends the search.
_SHARES = (0.7, 0.85, 0.94, 1.0)
# With state on hosts mostly nothing is won, but at times very much.
_HOSTED_SHARES = (0.5, 1.0)
# The same where no time is known: from far below any step, twice as much each time.
_SHORTEST_S, _LONGEST_S = 1e-4, 1e6
# Orders of units that are looked at, times layers and samples: some seconds. Beyond, nothing is proven.
_MOST_ORDERED = 8_000_000
# Ways to deal the batch that are tried; fewer while no plan is known, as then hardly anything bounds them.
_MOST_DEALS, _FIRST_DEALS = 50_000, 500
# Plans of pipelines that are cut alike which are looked at, and how much slower they may be before sums of gradients
# overlap.
_MOST_ALIKE, _ALIKE_SLACK = 60, 1.2
_CELLS = 1 << 18  # of an array over the layers of all pipelines


class Line(NamedTuple):
    """A pipeline with its layers that run enough samples in time, and the most samples that any of them runs."""

    chain: Chain
    rows: Rows
    most: int


class _Enough(Exception):
    """As many were looked at as may be."""


class CrewSearch:
    """One search, for what is faster than `best_s`; `consider` scores a plan."""

    def __init__(
        self,
        costs: CostModel,
        copies: int,
        nodes: tuple[Node, ...],
        consider: Callable[[Plan], float],
        away: float = 0.0,
    ) -> None:
        """`away`: the share of each stage's layers whose optimizer state is on hosts, which then have room for it."""
        self.costs, self.copies, self.consider = costs, copies, consider
        self.best_s = self.within_s = math.inf
        self._nodes, self._names = nodes, frozenset(node.id for node in nodes)
        self._batch = costs.job.train.global_batch
        self._shares = _HOSTED_SHARES if away else _SHARES
        ample_hosts = have_ample_hosts(nodes, costs)
        self._rooms = rooms_of(nodes, costs, apart=not ample_hosts)
        by_kind = {kind: tuple(nodes[place].id for place in room.nodes) for kind, room in self._rooms.items()}
        self.times = ChainTimes(costs, by_kind, away)
        self.exchanges = Exchanges(self.times, copies, ample_hosts=ample_hosts)
        degrees = tp_degrees(costs, max((room.devices for room in self._rooms.values()), default=0))
        self.crews = crews(self._rooms, degrees, costs.job.model.layers + 2)
        hosts = {kind: max(map(self.exchanges.host_elements, names)) for kind, names in by_kind.items()}
        self._figures = UnitFigures(self.times, self._rooms, degrees, hosts)
        self.bounds = CrewBounds(self._figures, self.crews)
        self._of_slots: dict[Slots, list[int]] = {}
        for number, crew in enumerate(self.crews):
            self._of_slots.setdefault(crew.slots, []).append(number)
        self._slots = sorted(self._of_slots)
        self.parts = Parts(self._rooms, self._slots)
        self._lines: dict[tuple[int, int], tuple[int, tuple[Line, ...]]] = {}
        self._told = False
        self._alike = 0  # so many pipelines that are cut alike may still be looked at, where these are looked for
        self._tries = 0  # layers of all pipelines together that were tried within the present time
        self._left = _MOST_ORDERED // (costs.job.model.layers * self._batch)  # orders

    @property
    def binds(self) -> bool:
        """Whether some device has no memory for all that it might be given."""
        return not self._figures.ample

    @property
    def whole(self) -> bool:
        """Whether all orders were looked at that had to be."""
        return self._left > 0

    def run(self, best_s: float) -> None:
        """Looks for what is done in ever more time, up to `best_s`. Where something is found that is done in that time,
        the best is; what comes up beside it and takes longer ends nothing, unless nothing was known: then it is where
        to begin anew."""
        self.best_s = best_s
        for within_s in _times_s(best_s, self._shares):
            before = self._tries
            self._look(within_s)
            is_first = math.isinf(best_s) and math.isfinite(self.best_s)
            if is_first or self.best_s <= within_s or (self._told and self.exchanges.nodes_lack(self._names)):
                break
            if math.isinf(best_s) and self._tries == before > 0:
                self._look(math.inf)  # twice the time allowed nothing more: perhaps no time does
                break
        if math.isinf(best_s) and math.isfinite(self.best_s):
            self.run(self.best_s)

    def run_alike(self, best_s: float, consider: Callable[[Plan], float]) -> None:
        """Looks for several pipelines that are cut at the same layers, so that sums of gradients may go on beside their
        backward: for what then takes less than `best_s`, as `consider` says. At so many at most, up to so much slower
        without that."""
        self._alike, self.best_s, self.consider = _MOST_ALIKE, best_s, consider
        with contextlib.suppress(_Enough):
            self._look(math.inf)
        self._alike = 0

    def _look(self, within_s: float) -> None:
        """At all that is done in this time."""
        self.within_s, self._tries = within_s, 0
        self._lines.clear()
        num_devices = sum(room.devices * len(room.nodes) for room in self._rooms.values())
        for count in range(2 if self._alike else 1, min(num_devices, self._batch) + 1):
            self._run(count)

    def _limit_s(self) -> float:
        return min(self.within_s, self.best_s * (_ALIKE_SLACK if self._alike else 1 - _TIE))

    def _run(self, count: int) -> None:
        """All sets of so many crews that can run the batch in time."""
        most, by_ends = self.bounds.most(count, self._limit_s(), self._batch)
        worth = np.array([*(max(most[n] for n in self._of_slots[slots]) for slots in self._slots), 0])
        least = self.costs.job.limits.min_devices
        for frame in self.parts.frames(worth, count, self._batch, least):
            some = [[(int(most[n]), n) for n in self._of_slots[self._slots[at]] if most[n]] for at, _ in frame]
            alike = [p > 0 and frame[p][0] == frame[p - 1][0] for p in range(count)]
            for picked in _picked(some, alike, self._batch):
                if self._alike and len({len(self.crews[n].cells) for n in picked}) > 1:
                    continue
                self._ordered(tuple(nodes for _, nodes in frame), picked, [int(most[n]) for n in picked], by_ends)

    def _ordered(
        self,
        nodes: tuple[tuple[int, ...], ...],
        picked: tuple[int, ...],
        most: list[int],
        by_ends: dict[int, list[Ends]],
    ) -> None:
        """All orders of these crews on these nodes, `most` being the samples of each."""
        total, found = sum(most), []
        for n, own in zip(picked, most, strict=True):
            least = max(1, self._batch - (total - own))
            options = [
                (line.most, line) for line in self._lines_of(n, len(picked), least, by_ends[n]) if line.most >= least
            ]
            if not options:
                return
            total += max(samples for samples, _ in options) - own
            found.append(options)
        alike = [p > 0 and picked[p] == picked[p - 1] for p in range(len(picked))]
        for some in _picked(found, alike, self._batch):
            shape = tuple(
                placed_on(line.chain, tuple(self._nodes[node].id for node in where))
                for line, where in zip(some, nodes, strict=True)
            )
            self.solve(shape, [line.rows for line in some])

    def _lines_of(self, n: int, count: int, least: int, by_ends: list[Ends]) -> tuple[Line, ...]:
        """Of a crew where there are so many pipelines: those that run so many samples, and perhaps others."""
        key = (n, count)
        if key not in self._lines or self._lines[key][0] > least:
            found = []
            held, within_s = self._figures.held(count), self._limit_s() - self.bounds.vote_s[n]
            ends = {(end.first, end.last) for end in by_ends if end.most >= least and self._left > 0}
            orders = lines(self.crews[n], ends, self._left)
            self._left -= len(orders)
            bounds = line_bounds(self._figures, orders, count, within_s, least)
            for bound in bounds:
                after = self._figures.after_stage(bound.chain, count)
                rows = rows_within(self.times, bound.chain, bound.stages, held, after, within_s, least)
                if len(rows.layers):
                    found.append(Line(bound.chain, rows, rows.most(within_s)))
            found.sort(key=lambda line: -line.most)
            self._lines[key] = (least, tuple(found))
        return self._lines[key][1]

    def solve(self, shape: Shape, rows: list[Rows]) -> None:
        """The best of these layers of each pipeline."""
        if (self._told or math.isfinite(self.best_s)) and self.exchanges.hosts_lack(shape):
            return
        within_s = self._limit_s() - self.exchanges.vote_s(shape)
        left = []
        for p, after in enumerate(self.exchanges.lone_after(shape)):
            held = self.exchanges.held(shape, p)
            some = rows[p].later(after).within(within_s, 1)
            if held != self._figures.held(len(shape)) and not self.times.ample(shape[p].chain):
                seconds = self.times.row_table(shape[p].chain, held, some.layers)
                some = Rows(layers=some.layers, seconds=seconds, after_s=some.after_s)
            left.append(some)
        self._joined(shape, _in_common(left) if self._alike else left)

    def _joined(self, shape: Shape, rows: list[Rows]) -> None:
        """Those that are left within the time, all at once or by halves."""
        within_s = self._limit_s() - self.exchanges.vote_s(shape)
        most = [some.most(within_s) for some in rows]
        spare = sum(most) - self._batch
        if spare < 0 or not all(most):
            return
        rows = [some.within(within_s, max(1, own - spare)) for some, own in zip(rows, most, strict=True)]
        longest = max(range(len(rows)), key=lambda p: len(rows[p].layers))
        if math.prod(len(some.layers) for some in rows) <= _CELLS or len(rows[longest].layers) == 1:
            self._tried(shape, rows, within_s)
            return
        order = np.argsort(rows[longest].seconds.min(axis=1) + rows[longest].after_s, kind="stable")
        for part in np.array_split(order, 2):
            self._joined(shape, [some.taken(part) if p == longest else some for p, some in enumerate(rows)])

    def _tried(self, shape: Shape, rows: list[Rows], within_s: float) -> None:
        """All of these layers with all deals of the batch, until nothing better is left."""
        self._tries += math.prod(len(some.layers) for some in rows)
        limit = _MOST_DEALS if math.isfinite(self.best_s) else _FIRST_DEALS
        dealt = _deals(_few([some.samples(within_s).tolist() for some in rows], self._batch, limit), self._batch)
        if not len(dealt):
            return
        network_s = self._network_s(shape, dealt)
        after = self.exchanges.after(shape, [some.layers for some in rows])
        seconds = np.full(after.seconds.shape, np.inf)
        for number, deal in enumerate(dealt):
            slowest = network_s[number]
            for samples, some in zip(deal, rows, strict=True):
                slowest = np.maximum(slowest[..., None], some.seconds[:, samples])
            np.minimum(seconds, slowest, out=seconds)
        seconds = seconds + after.seconds
        if self._alike:  # what is summed up, half of what is exchanged where state is split, may take no time
            promised = seconds - after.seconds * (0.5 if self.times.split else 1.0)
            seconds = np.where(_same([some.layers for some in rows]), promised, np.inf)
        refused = np.where(after.lacking, seconds, np.inf)
        if math.isinf(self.best_s) and not self._told and np.isfinite(refused).any():
            self._told = True  # so that it is known what plans fail for, if all do
            self._try(shape, rows, np.unravel_index(int(np.argmin(refused)), refused.shape), dealt, network_s)
        seconds = np.where(after.lacking, np.inf, seconds)
        for flat in np.argsort(seconds, axis=None, kind="stable"):
            if not seconds.flat[flat] < self.best_s * (1 - _TIE):
                return
            self._try(shape, rows, np.unravel_index(int(flat), seconds.shape), dealt, network_s)

    def _try(self, shape: Shape, rows: list[Rows], place: tuple[np.intp, ...], dealt: Ints, network_s: Floats) -> None:
        own_s = [some.seconds[at, dealt[:, p]] for p, (some, at) in enumerate(zip(rows, place, strict=True))]
        deal = dealt[int(np.argmin(np.maximum.reduce([network_s, *own_s])))]
        layers = [some.layers[at] for some, at in zip(rows, place, strict=True)]
        choices = [
            self.times.choice(
                placed.chain,
                layers[p],
                self.times.least_owned(placed.chain, self.exchanges.held(shape, p)),
                int(deal[p]),
            )
            for p, placed in enumerate(shape)
        ]
        made = plan_of(shape, layers, choices, self.copies, split=self.times.split, away=self.times.away)
        self.best_s = min(self.best_s, self.consider(made))
        if self._alike:
            self._alike -= 1
            if not self._alike:
                raise _Enough

    def _network_s(self, shape: Shape, dealt: Ints) -> Floats:
        """By deal, what the busiest node's interfaces need for all activations."""
        busy: dict[str, Floats] = {}
        for p, placed in enumerate(shape):
            for node, per_sample_s in zip(placed.nodes, self.times.network_s(placed.chain), strict=True):
                busy[node] = busy.get(node, np.zeros(len(dealt))) + per_sample_s * dealt[:, p]
        found: Floats = np.maximum.reduce([np.zeros(len(dealt)), *busy.values()])
        return found


def _in_common(rows: list[Rows]) -> list[Rows]:
    """Those with layers that all pipelines may have."""
    layers = [list(map(tuple, some.layers.tolist())) for some in rows]
    common = set(layers[0]).intersection(*layers[1:])
    return [some.taken(np.flatnonzero([row in common for row in own])) for some, own in zip(rows, layers, strict=True)]


def _same(layers: list[Ints]) -> Bools:
    """[K1, .., KP]: where all pipelines have the same layers [K, S]."""
    found = np.ones((1,) * len(layers), dtype=bool)
    for p, some in enumerate(layers[1:], 1):
        same = (layers[0][:, None] == some).all(axis=2)
        found = found & same.reshape(tuple(len(layers[q]) if q in (0, p) else 1 for q in range(len(layers))))
    return found


def _times_s(best_s: float, shares: tuple[float, ...]) -> Iterator[float]:
    if math.isfinite(best_s):
        yield from (best_s * share for share in shares)
        return
    within_s = _SHORTEST_S
    while within_s < _LONGEST_S:
        yield within_s
        within_s *= 2
    yield math.inf


def _picked(options: list[list[tuple[int, T]]], alike: list[bool], batch: int) -> Iterator[tuple[T, ...]]:
    """One of the (samples, what) of each place so that they can run the batch; places that are like the one before in
    one order alone."""
    tops = [max((samples for samples, _ in some), default=0) for some in options]
    rest = [sum(tops[place:]) for place in range(len(tops) + 1)]

    def extended(place: int, before: int, samples: int, picked: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
        if place == len(options):
            yield picked
            return
        for number in range(before if alike[place] else 0, len(options[place])):
            own, what = options[place][number]
            if samples + own + rest[place + 1] >= batch:
                yield from extended(place + 1, number, samples + own, (*picked, what))

    yield from extended(0, 0, 0, ())


def _few(allowed: list[list[int]], batch: int, limit: int) -> list[list[int]]:
    """The same, but of more ways to deal the batch than this, those closest to shares of the most that each runs."""
    whole = sum(max(some, default=0) for some in allowed)
    near = [sorted(some, key=lambda own: (abs(own - batch * some[-1] / whole), own)) for some in allowed]
    most = max(map(len, near))
    while most > 1 and _ways([some[:most] for some in near], batch) > limit:
        most = most * 3 // 4
    return [sorted(some[:most]) for some in near]


def _ways(allowed: list[list[int]], batch: int) -> int:
    """How many ways to deal the batch there are."""
    counts = [1] + [0] * batch
    for some in allowed:
        counts = [sum(counts[total - own] for own in some if own <= total) for total in range(batch + 1)]
    return counts[batch]


def _deals(allowed: list[list[int]], batch: int) -> Ints:
    """[M, P]: all ways to deal the batch, of these numbers of samples to each pipeline."""
    reach = [{0}]
    for some in reversed(allowed):
        reach.append({own + rest for own in some for rest in reach[-1] if own + rest <= batch})
    reach.reverse()

    def dealt(p: int, left: int) -> Iterator[tuple[int, ...]]:
        if p == len(allowed):
            yield ()
            return
        for own in allowed[p]:
            if left - own in reach[p + 1]:
                yield from ((own, *rest) for rest in dealt(p + 1, left - own))

    found = list(dealt(0, batch)) if batch in reach[0] else []
    return np.array(found, dtype=np.int64).reshape(-1, len(allowed))
