"""Messages of routes on their way: packed, sent, received into buffers of the wire, and handed over.

Owns these buffers and their charges. Nothing is received into anything else; what becomes of it is up to the caller.
On the host, messages to ranks of the same node are packed where those can read them, and read where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from shoal_recovery.state import Span
from shoal_workers.devices import HOST, Wire
from shoal_workers.exchange import Arriving, Exchange, Passing, Pending
from shoal_workers.forms import Form, Parts, Source
from shoal_workers.memory import DeviceMemory
from shoal_workers.reduction import Message, UnitRoutes

STAGING = "buffers for gradients and weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    message: Message
    buffer: Tensor
    pending: Arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """What was sent and will be received for one unit, until it is finished."""

    form: Form
    arrivals: tuple[_Arrival, ...]
    sends: tuple[Passing, ...]
    num_bytes: int


class Courier:
    """All ranks start the same units in the same order, and finish what they started."""

    def __init__(self, exchange: Exchange, memory: DeviceMemory, *, wire: Wire = HOST) -> None:
        self._exchange = exchange
        self._memory = memory
        self._wire = wire
        self._computes_on_host = wire.device.type == "cpu"

    def start(self, routes: UnitRoutes, number: int, form: Form, source: Source) -> UnderWay:
        """`number` is the tag of these messages. What has the same spans is packed once."""
        peers: dict[tuple[Span, ...], list[int]] = {}
        for message in routes.sends:
            peers.setdefault(message.spans, []).append(message.destination)
        packed = {
            spans: self._wire.leaving(form.pack(spans, source, self._room(form, spans, destinations)))
            for spans, destinations in peers.items()
        }
        buffers = [self._buffer(form, message.spans) for message in routes.receives]
        num_bytes = sum(tensor.nbytes for tensor in (*packed.values(), *buffers))
        self._memory.charge(STAGING, num_bytes)
        return UnderWay(
            form=form,
            arrivals=tuple(
                _Arrival(message=message, buffer=buffer, pending=self._exchange.irecv(buffer, message.source, number))
                for message, buffer in zip(routes.receives, buffers, strict=True)
            ),
            sends=tuple(
                self._exchange.isend(packed[message.spans], message.destination, number) for message in routes.sends
            ),
            num_bytes=num_bytes,
        )

    def has_passed(self, started: UnderWay) -> bool:
        """Whether neither `arrived` nor `finish` would wait."""
        under_way: tuple[Passing, ...] = (*(arrival.pending for arrival in started.arrivals), *started.sends)
        return all(passing.has_passed() for passing in under_way)

    def arrived(self, started: UnderWay) -> Iterator[tuple[int, Parts]]:
        """Once everything is here: from whom, and what, in the order of ranks."""
        contents = [self._content(arrival) for arrival in started.arrivals]
        for arrival, content in zip(started.arrivals, contents, strict=True):
            yield arrival.message.source, started.form.unpack(self._wire.arrived(content), arrival.message.spans)

    def finish(self, started: UnderWay) -> None:
        """After everything that arrived was used: returns when all that was sent has been taken."""
        _wait(arrival.pending for arrival in started.arrivals)
        _wait(started.sends)
        self._memory.release(STAGING, started.num_bytes)

    def _room(self, form: Form, spans: tuple[Span, ...], peers: list[int]) -> Tensor | None:
        numel, dtype = form.size(spans)
        return self._exchange.room(numel, dtype, peers) if self._computes_on_host else None

    def _content(self, arrival: _Arrival) -> Tensor:
        if self._computes_on_host:
            return arrival.pending.content()
        arrival.pending.wait()  # a device copies from pinned memory, which that of another rank is not
        return arrival.buffer

    def _buffer(self, form: Form, spans: tuple[Span, ...]) -> Tensor:
        count, dtype = form.size(spans)
        return self._wire.empty(count, dtype=dtype)


def _wait(some: Iterable[Pending]) -> None:
    for pending in some:
        pending.wait()
