"""Gradients to their owners, updated weights to their holders: the routes of `reduction`, executed on tensors.

Owns the buffers of the wire and their charges. Nothing is received into live state: gradients are summed and weights
copied from buffers, weights under the exchange's commit. Units come in the same order on all ranks; while one is on the
wire the one before it is finished, so two units' buffers exist at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_recovery.state import ShardMap, Span
from shoal_workers.exchange import Exchange, Pending
from shoal_workers.flat import FlatBuffer
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.reduction import Message, Routes, UnitRoutes, gather_routes, reduce_routes
from shoal_workers.tags import Purpose, tag

STAGING = "buffers for gradients and weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    message: Message
    buffer: Tensor
    pending: Pending

    def parts(self) -> Iterator[tuple[Span, Tensor]]:
        sizes = [span.numel for span in self.message.spans]
        yield from zip(self.message.spans, torch.split(self.buffer, sizes), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitUnderWay:
    arrivals: tuple[_Arrival, ...]
    sends: tuple[Pending, ...]
    finish: Callable[[tuple[_Arrival, ...]], None]
    num_bytes: int


class Sharing:
    """`reduce` and `gather` start a unit; `settle` returns when all that was started is done."""

    def __init__(
        self,
        shards: ShardMap,
        model: ModelSpec,
        rank: int,
        live: LiveState,
        exchange: Exchange,
        memory: DeviceMemory,
    ) -> None:
        self._rank = rank
        self._live = live
        self._exchange = exchange
        self._memory = memory
        self._reduces = reduce_routes(shards, model, rank)
        self._gathers = gather_routes(shards, model, rank)
        self._under_way: _UnitUnderWay | None = None

    def begin(self) -> None:
        """Before each step: forgets what a refused one left behind."""
        self._under_way = None

    def reduce(self, unit: int) -> None:
        """Afterwards the gradient of owned spans is the sum over all who contribute to them."""
        self._start(self._reduces, unit, Purpose.REDUCE, self._live.gradient, self._add)

    def gather(self, unit: int) -> None:
        """Afterwards all held weights are what their owners have."""
        self._start(self._gathers, unit, Purpose.GATHER, self._live.weight, self._take)

    def settle(self) -> None:
        started, self._under_way = self._under_way, None
        if started is None:
            return
        for arrival in started.arrivals:
            arrival.pending.wait()
        started.finish(started.arrivals)
        for sent in started.sends:
            sent.wait()
        self._memory.release(STAGING, started.num_bytes)

    def _start(
        self,
        routes: Routes,
        unit: int,
        purpose: Purpose,
        source: Callable[[Span], Tensor],
        finish: Callable[[tuple[_Arrival, ...]], None],
    ) -> None:
        wanted = routes.get(unit, UnitRoutes(sends=(), receives=()))
        dtype = self._live.dtype  # gradients travel in the job's precision, and are summed in fp32
        num_bytes = sum(message.numel for message in (*wanted.sends, *wanted.receives)) * dtype.itemsize
        self._memory.charge(STAGING, num_bytes)
        number = tag(purpose, unit)
        arrivals = tuple(self._receive(message, number, dtype) for message in wanted.receives)
        sends = tuple(
            self._exchange.isend(_pack([source(span) for span in message.spans], dtype), message.destination, number)
            for message in wanted.sends
        )
        self.settle()
        self._under_way = _UnitUnderWay(arrivals=arrivals, sends=sends, finish=finish, num_bytes=num_bytes)

    def _receive(self, message: Message, number: int, dtype: torch.dtype) -> _Arrival:
        buffer = torch.empty(message.numel, dtype=dtype)
        return _Arrival(message=message, buffer=buffer, pending=self._exchange.irecv(buffer, message.source, number))

    def _add(self, arrivals: tuple[_Arrival, ...]) -> None:
        """Sums in the order of ranks, this one's own contribution in its place. Where that comes first, or second of
        two (a sum of two has no order), it is already where the sum belongs."""
        if not arrivals:
            return
        if len(arrivals) == 1 or self._rank < arrivals[0].message.source:
            for arrival in arrivals:
                for span, part in arrival.parts():
                    self._live.gradient(span).add_(part.to(self._live.device))
            return
        spans = self._live.owned_spans(arrivals[0].message.unit)
        total = FlatBuffer(spans, torch.float32, self._live.device)
        for arrival in arrivals:
            if arrival.message.source > self._rank:
                break
            for span, part in arrival.parts():
                total.view(span).add_(part.to(self._live.device))
        for span in spans:
            self._live.gradient(span).copy_(total.view(span).add_(self._live.gradient(span)))
        for arrival in arrivals:
            if arrival.message.source > self._rank:
                for span, part in arrival.parts():
                    self._live.gradient(span).add_(part.to(self._live.device))

    def _take(self, arrivals: tuple[_Arrival, ...]) -> None:
        with self._exchange.commit():
            for arrival in arrivals:
                for span, part in arrival.parts():
                    self._live.weight(span).copy_(part)


def _pack(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One contiguous tensor on the host; the part itself where it is that already."""
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(device="cpu", dtype=dtype)
