"""Once a step: gradients to their owners, updated weights to those who keep them, round by round (`collective_routes`).

Nothing is received into live state: gradients are summed and weights copied from buffers, weights under the exchange's
commit. Units come in the same order on all ranks, each a turn behind the one before it: when a unit is in its first
round the one before is in its second. Does not own what passes within a step (`circulation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal_recovery.state import Span
from shoal_workers.collective_routes import Rounds, Ways, joined
from shoal_workers.courier import Courier, UnderWay
from shoal_workers.devices import Pace
from shoal_workers.exchange import Exchange
from shoal_workers.flat import FlatBuffer
from shoal_workers.forms import Parts, Plain, Source
from shoal_workers.live import LiveState
from shoal_workers.reduction import NO_ROUTES, UnitRoutes
from shoal_workers.tags import Purpose, tag

_Arrivals = Iterable[tuple[int, Parts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Of one unit: what goes from where under which tag, and what becomes of what comes."""

    routes: UnitRoutes
    number: int
    source: Source
    take: Callable[[UnitRoutes, _Arrivals], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A round under way, and those of its unit that come after it."""

    turn: int
    round: _Round
    started: UnderWay
    rest: tuple[_Round, ...]


class Sharing:
    """`reduce` and `gather` start a unit; `settle` returns when all that was started is done. Messages of no more than
    two turns are under way at a time. `order` are all units, as weights are gathered; gradients are reduced the other
    way round.

    A round's turn is the place of its unit and its own number. Nobody waits for a round before all of its own rounds of
    that turn or an earlier one are under way, and turns are the same on all ranks: so no ranks wait in a circle.
    """

    def __init__(self, ways: Ways, order: Sequence[int], live: LiveState, exchange: Exchange, courier: Courier) -> None:
        self._ways = ways
        self._place = {unit: place for place, unit in enumerate(order)}
        self._live = live
        self._exchange = exchange
        self._courier = courier
        self._form = Plain(live.dtype)  # gradients travel in the job's precision, and are summed in fp32
        self._tasks: list[_Task] = []
        self._pace = Pace(live.device)

    def begin(self) -> None:
        """Before each step: forgets what a refused one left behind."""
        self._tasks.clear()

    def reduce(self, unit: int) -> None:
        """Afterwards the gradient of owned spans is the sum over all who have a part of it."""
        self._start(self._reduce_turn(unit), self._reduce_rounds(unit))

    def try_reduce(self, unit: int) -> bool:
        """As `reduce`, if that is possible without waiting for anybody. Whether it was."""
        self._pace.keep()
        while self._two_turns:
            if not self._courier.has_passed(self._first().started):
                return False
            self._finish_first()
        self._begin(self._reduce_turn(unit), self._reduce_rounds(unit))
        return True

    @property
    def _two_turns(self) -> bool:
        """Whether rounds of more than one turn are under way."""
        return len({task.turn for task in self._tasks}) > 1

    def _reduce_turn(self, unit: int) -> int:
        return len(self._place) - self._place[unit]

    def _reduce_rounds(self, unit: int) -> tuple[_Round, ...]:
        reduces = self._ways.reduces.get(unit, (NO_ROUTES,))
        spreads = self._ways.spreads.get(unit, ())
        return (
            *self._rounds(unit, Purpose.REDUCE, reduces, self._live.gradient, self._add),
            *self._rounds(unit, Purpose.SPREAD, spreads, self._rounded, self._take_sums),
        )

    def gather(self, unit: int) -> None:
        """Afterwards all kept weights are what their owners have."""
        gathers = self._ways.gathers.get(unit, (NO_ROUTES,))
        first, *later = self._rounds(unit, Purpose.GATHER, gathers, self._live.weight, self._take)
        first = replace(first, source=self._live.master)  # an owner need not keep the weights that it makes
        self._start(self._place[unit], (first, *later))

    def settle(self) -> None:
        while self._tasks:
            self._finish_first()

    def _rounds(
        self,
        unit: int,
        purpose: Purpose,
        rounds: Rounds,
        source: Source,
        take: Callable[[UnitRoutes, _Arrivals], None],
    ) -> Iterator[_Round]:
        for number, routes in enumerate(rounds):
            its_tag = tag(purpose, number * len(self._place) + unit)
            yield _Round(routes=routes, number=its_tag, source=source, take=take)

    def _start(self, turn: int, rounds: tuple[_Round, ...]) -> None:
        """What has an earlier turn is finished while this is on the wire."""
        while self._two_turns:
            self._finish_first()
        self._begin(turn, rounds)
        while self._first().turn < turn:
            self._finish_first()

    def _begin(self, turn: int, rounds: tuple[_Round, ...]) -> None:
        first, *rest = rounds
        started = self._courier.start(first.routes, first.number, self._form, first.source)
        self._tasks.append(_Task(turn=turn, round=first, started=started, rest=tuple(rest)))

    def _first(self) -> _Task:
        return min(self._tasks, key=lambda task: task.turn)

    def _finish_first(self) -> None:
        task = self._first()
        self._tasks.remove(task)
        task.round.take(task.round.routes, self._courier.arrived(task.started))
        self._courier.finish(task.started)
        if task.rest:
            self._begin(task.turn + 1, task.rest)

    def _rounded(self, span: Span) -> Tensor:
        """All owners must have the same sums, to the bit."""
        gradient = self._live.gradient(span)
        return gradient.copy_(gradient.to(self._live.dtype))

    def _add(self, routes: UnitRoutes, arrivals: _Arrivals) -> None:
        """Sums in the order of ranks, this one's own contribution in its place. A sum of two has no order: where
        no two come before it, it is already where the sum belongs."""
        came = list(arrivals)
        before = [parts for source, parts in came if source < self._exchange.rank]
        if len(before) > 1:
            spans = joined(span for message in routes.receives for span in message.spans)
            total = FlatBuffer(spans, torch.float32, self._live.device)
            for parts in before:
                for span, part in parts:
                    total.view(span).add_(part)
            for span in spans:
                self._live.gradient(span).add_(total.view(span))
            came = came[len(before) :]
        for _, parts in came:
            for span, part in parts:
                self._live.gradient(span).add_(part)

    def _take_sums(self, routes: UnitRoutes, arrivals: _Arrivals) -> None:
        for _, parts in arrivals:
            for span, part in parts:
                self._live.gradient(span).copy_(part)

    def _take(self, routes: UnitRoutes, arrivals: _Arrivals) -> None:
        came = list(arrivals)
        with self._exchange.commit():
            for _, parts in came:
                for span, part in parts:
                    self._live.weight(span).copy_(part)
