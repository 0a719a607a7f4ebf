"""Once a step: gradients to their owners, updated weights to those who keep them, by the routes of `reduction`.

Nothing is received into live state: gradients are summed and weights copied from buffers, weights under the exchange's
commit. Units come in the same order on all ranks; while one is on the wire the one before it is finished, so two units'
buffers exist at most. Does not own what passes within a step (`circulation`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal_planner.job import ModelSpec
from shoal_recovery.state import ShardMap, Span
from shoal_workers.courier import Courier, UnderWay
from shoal_workers.exchange import Exchange
from shoal_workers.flat import FlatBuffer
from shoal_workers.forms import Parts, Plain
from shoal_workers.live import LiveState
from shoal_workers.reduction import NO_ROUTES, Routes, gather_routes, reduce_routes, spread_routes
from shoal_workers.tags import Purpose, tag


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    unit: int
    started: UnderWay
    finish: Callable[[int, UnderWay], None]


class Sharing:
    """`reduce` and `gather` start a unit; `settle` returns when all that was started is done."""

    def __init__(
        self, shards: ShardMap, model: ModelSpec, rank: int, live: LiveState, exchange: Exchange, courier: Courier
    ) -> None:
        self._rank = rank
        self._live = live
        self._exchange = exchange
        self._courier = courier
        self._form = Plain(live.dtype)  # gradients travel in the job's precision, and are summed in fp32
        self._reduces = reduce_routes(shards, model, rank)
        self._spreads = spread_routes(shards, model, rank)
        self._gathers = gather_routes(shards, model, rank)
        self._tasks: list[_Task] = []

    def begin(self) -> None:
        """Before each step: forgets what a refused one left behind."""
        self._tasks.clear()

    def reduce(self, unit: int) -> None:
        """Afterwards the gradient of owned spans is the sum over all who have a part of it."""
        self._start(self._reduces, unit, Purpose.REDUCE, self._live.gradient, self._sum)

    def gather(self, unit: int) -> None:
        """Afterwards all kept weights are what their owners have."""
        self._start(self._gathers, unit, Purpose.GATHER, self._live.master, self._take)

    def settle(self) -> None:
        while self._tasks:
            self._finish_first()

    def _start(
        self,
        routes: Routes,
        unit: int,
        purpose: Purpose,
        source: Callable[[Span], torch.Tensor],
        finish: Callable[[int, UnderWay], None],
    ) -> None:
        """What was started before is finished while this is on the wire."""
        before = len(self._tasks)
        started = self._courier.start(routes.get(unit, NO_ROUTES), tag(purpose, unit), self._form, source)
        self._tasks.append(_Task(unit=unit, started=started, finish=finish))
        for _ in range(before):
            self._finish_first()

    def _finish_first(self) -> None:
        task = self._tasks.pop(0)
        task.finish(task.unit, task.started)

    def _sum(self, unit: int, started: UnderWay) -> None:
        self._add(unit, list(self._courier.arrived(started)))
        self._courier.finish(started)
        routes = self._spreads.get(unit, NO_ROUTES)
        for span in {span for message in routes.sends for span in message.spans}:
            gradient = self._live.gradient(span)  # all owners must have the same one, to the bit
            gradient.copy_(gradient.to(self._live.dtype))
        if routes != NO_ROUTES:
            number = tag(Purpose.SPREAD, unit)
            spread = self._courier.start(routes, number, self._form, self._live.gradient)
            self._tasks.append(_Task(unit=unit, started=spread, finish=self._take_sums))

    def _add(self, unit: int, arrivals: list[tuple[int, Parts]]) -> None:
        """Sums in the order of ranks, this one's own contribution in its place. Where that comes first, or second of
        two (a sum of two has no order), it is already where the sum belongs."""
        if not arrivals:
            return
        first = [parts for source, parts in arrivals if source < self._rank]
        if first and len(arrivals) > 1:
            spans = self._live.vouched_spans(unit)
            total = FlatBuffer(spans, torch.float32, self._live.device)
            for parts in first:
                for span, part in parts:
                    total.view(span).add_(part.to(self._live.device))
            for span in spans:
                self._live.gradient(span).copy_(total.view(span).add_(self._live.gradient(span)))
            arrivals = arrivals[len(first) :]
        for _, parts in arrivals:
            for span, part in parts:
                self._live.gradient(span).add_(part.to(self._live.device))

    def _take_sums(self, unit: int, started: UnderWay) -> None:
        for _, parts in self._courier.arrived(started):
            for span, part in parts:
                self._live.gradient(span).copy_(part)
        self._courier.finish(started)

    def _take(self, unit: int, started: UnderWay) -> None:
        arrivals = list(self._courier.arrived(started))
        with self._exchange.commit():
            for _, parts in arrivals:
                for span, part in parts:
                    self._live.weight(span).copy_(part)
        self._courier.finish(started)
