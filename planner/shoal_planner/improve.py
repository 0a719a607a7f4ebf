"""Betters sets of pipelines step by step, from the best that are known and from simple ones.

Owns from where and in which order steps are taken (`ways_steps` has the steps); what a set takes is judged elsewhere.
Tries are counted, so the same sets give the same answer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from shoal_planner.finish import Word
from shoal_planner.ways import Ground, Place, Way, Ways, words_of
from shoal_planner.ways_steps import steps

_UNFIT = 1 / 4  # of a try: what does not fit is soon known not to
HOPELESS = 1.25  # sets that take so many times the best would have too far to go: no steps are taken from them


class Improver:
    """Descents on one cluster, `judge` saying what sets of pipelines take; every set is judged once."""

    def __init__(
        self,
        ground: Ground,
        judge: Callable[[tuple[Word, ...]], float],
        tries: int,
        patience: int,
        *,
        hopeless: float = HOPELESS,
    ) -> None:
        """At most so many tries; one that does not fit counts as a part of one. Once so many in a row brought nothing
        better, a set is given up with what came of it, and the next best goes on, unless it takes `hopeless` times the
        best."""
        self.ground = ground
        self.left: float = tries
        self._patience, self._idle, self._best_s = patience, 0, math.inf
        self._judge, self._hopeless = judge, hopeless
        self._known: set[object] = set()
        self._queue: list[tuple[float, int, Iterator[Ways]]] = []
        self._numbers = itertools.count()

    def run(self, starts: Iterable[tuple[float, Ways]], ends: Callable[[], bool] = lambda: False) -> None:
        """From these, whose seconds are known, and from the simple ways to use the nodes, the best first: the next step
        is always one from the best set that has steps left; none once it `ends`."""
        for seconds, ways in starts:
            self._add(seconds, ways)
        for ways in simple(self.ground):
            if ends():
                return
            self._reach(ways)
        self._idle = 0
        while self._queue and self.left > 0 and self._queue[0][0] <= self._best_s * self._hopeless and not ends():
            found = next(self._queue[0][2], None)
            if found is None or self._idle >= self._patience:
                heapq.heappop(self._queue)
                self._idle = 0
            else:
                self._reach(found)

    def _reach(self, ways: Ways) -> None:
        if self.ground.named(ways) not in self._known:
            seconds = self._judge(words_of(ways))
            self.left -= 1 if math.isfinite(seconds) else _UNFIT
            self._idle = 0 if seconds < self._best_s else self._idle + 1
            self._add(seconds, ways)

    def _add(self, seconds: float, ways: Ways) -> None:
        self._known.add(self.ground.named(ways))
        self._best_s = min(self._best_s, seconds)
        if math.isfinite(seconds):
            heapq.heappush(self._queue, (seconds, next(self._numbers), steps(ways, self.ground)))


def simple(ground: Ground) -> Iterator[Ways]:
    """Equal units throughout: a pipeline per device, per node, per zone, per kind of node or one over all, of all nodes
    or of one kind."""
    names = list(ground.nodes)
    by_kind: dict[object, list[str]] = {}
    by_zone: dict[object, list[str]] = {}
    for name in names:
        by_kind.setdefault(ground.kind[name], []).append(name)
        by_zone.setdefault(ground.nodes[name].zone, []).append(name)
    for tp in ground.degrees:
        of = {name: (Place(name, tp),) * (ground.nodes[name].devices // tp) for name in names}
        for some in (names, *by_kind.values()):
            each = [of[name] for name in some if of[name]]
            if each:
                yield tuple(each)
                yield tuple((place,) for way in each for place in way)
                yield (tuple(itertools.chain.from_iterable(each)),)
        for some in by_kind.values():
            yield from _cut(of[some[0]])
        for groups in (by_kind, by_zone):
            ways = (tuple(itertools.chain.from_iterable(of[name] for name in some)) for some in groups.values())
            yield tuple(way for way in ways if way)


def _cut(units: Way) -> Iterator[Ways]:
    """Units of one node in equal pipelines, of every length."""
    for depth in range(1, len(units) + 1):
        yield tuple(units[at : at + depth] for at in range(0, len(units) - depth + 1, depth))
        yield (units[:depth],)
