"""Gradients of a portion of a unit on their way, from whoever made them to whoever sums them.

Owns their routes, and the relays of those that go in two hops. When they start is up to `circulation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from shoal_planner.job import ModelSpec
from shoal_planner.levels import Sharding
from shoal_planner.parameters import parameters
from shoal_planner.slices import Portion
from shoal_recovery.state import ShardMap, Span, common
from shoal_workers.courier import STAGING, Courier, UnderWay
from shoal_workers.flat import FlatBuffer
from shoal_workers.forms import Blocks, Form, Plain
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.reduction import NO_ROUTES, UnitRoutes, by_user, hop_routes, scatter_routes
from shoal_workers.tags import Purpose, tag


class Part(Enum):
    """Of the gradients of a unit, those that are there at a time: of a block's matrices they may come later."""

    ALL = "all"
    VECTORS = "vectors"
    MATRICES = "matrices"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """Where gradients of one portion go: in one hop, straight to who sums them (`own`: to this rank itself). Or in two,
    by way of `relays`, of which a rank makes some itself (`own`) and sums some itself (`own_onward`)."""

    first: UnitRoutes
    own: tuple[Span, ...]
    onward: UnitRoutes = NO_ROUTES
    relays: tuple[Span, ...] = ()
    own_onward: tuple[Span, ...] = ()

    def only(self, wanted: Callable[[Span], bool]) -> _Path:
        def spans(some: tuple[Span, ...]) -> tuple[Span, ...]:
            return tuple(filter(wanted, some))

        return _Path(
            first=self.first.only(wanted),
            own=spans(self.own),
            onward=self.onward.only(wanted),
            relays=spans(self.relays),
            own_onward=spans(self.own_onward),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hop:
    """Gradients of one portion under way; `arrive` is what becomes of them."""

    started: UnderWay
    arrive: Callable[[UnderWay], None]


class Scattering:
    """Of one rank: what adds up between `open` and `close` is on its way then. `settle` waits until it is there."""

    def __init__(
        self,
        shards: ShardMap,
        model: ModelSpec,
        rank: int,
        live: LiveState,
        courier: Courier,
        memory: DeviceMemory,
        sharding: Sharding,
        *,
        ahead: bool,
    ) -> None:
        self._live = live
        self._courier = courier
        self._memory = memory
        self._ahead = ahead
        self._form: Form = Plain(live.dtype, lasting=False)
        if sharding.scatter != "plain":
            self._form = Blocks(4, live.dtype, model)
        self._relayed = sharding.relayed
        self._paths = _relayed_paths(shards, model, rank, live) if self._relayed else _paths(shards, model, rank, live)
        self._parts: dict[tuple[Portion, Part], _Path] = {}
        self._vectors = {parameter.fqn for parameter in parameters(model) if len(parameter.shape) == 1}
        self._shares = sharding.gradients != "none"
        self.begin()

    def begin(self) -> None:
        self._hops: list[_Hop] = []
        self._number = 0

    def open(self, portion: Portion) -> None:
        if self._shares:
            self._live.open_gradients(portion)

    def close(self, portion: Portion, part: Part) -> None:
        if self._shares:
            self._finish_started()
            self._start(self._path(portion, part))
            self._live.close_gradients(portion)
            if not self._ahead:
                self.settle()

    def settle(self) -> None:
        while self._hops:
            self._finish_started()

    def _path(self, portion: Portion, part: Part) -> _Path:
        key = portion, part
        if key not in self._parts:
            path = self._paths.get(portion, _NO_PATH)
            if part is not Part.ALL:
                path = path.only(lambda span: (span.fqn in self._vectors) == (part is Part.VECTORS))
            self._parts[key] = path
        return self._parts[key]

    def _finish_started(self) -> None:
        """In the order in which all ranks started them; a first hop is followed by a second one."""
        hops, self._hops = self._hops, []
        for hop in hops:
            hop.arrive(hop.started)

    def _start(self, path: _Path) -> None:
        live = self._live
        number, self._number = self._number, self._number + 1
        started = self._courier.start(path.first, tag(Purpose.SCATTER, number), self._form, live.whole_gradient)
        if not self._relayed:
            for span in path.own:
                live.gradient(span).add_(live.whole_gradient(span))
            self._hops.append(_Hop(started=started, arrive=self._add))
            return
        relay = FlatBuffer(path.relays, torch.float32, live.device)
        self._memory.charge(STAGING, relay.num_bytes)
        for span in path.own:
            relay.view(span).copy_(live.whole_gradient(span))
        self._hops.append(_Hop(started=started, arrive=partial(self._pass_on, path, number, relay)))

    def _pass_on(self, path: _Path, number: int, relay: FlatBuffer, came: UnderWay) -> None:
        """What the node has summed goes to whoever sums it for all."""
        for _, parts in self._courier.arrived(came):
            for span, part in parts:
                relay.view(span).add_(part)
        self._courier.finish(came)
        started = self._courier.start(path.onward, tag(Purpose.RELAY, number), self._form, relay.view)
        for span in path.own_onward:
            self._live.gradient(span).add_(relay.view(span))
        self._memory.release(STAGING, relay.num_bytes)
        self._hops.append(_Hop(started=started, arrive=self._add))

    def _add(self, came: UnderWay) -> None:
        """In the order of ranks, after this one's own."""
        for _, parts in self._courier.arrived(came):
            for span, part in parts:
                self._live.gradient(span).add_(part)
        self._courier.finish(came)


_NO_PATH = _Path(first=NO_ROUTES, own=())


def _paths(shards: ShardMap, model: ModelSpec, rank: int, live: LiveState) -> Mapping[Portion, _Path]:
    state, routes = live.state, scatter_routes(shards, model, rank)
    own = by_user(live.split_gradients(common(state.contributes, state.sums)), model, state.slicing)
    portions = {*routes, *own}
    return {portion: _Path(first=routes.get(portion, NO_ROUTES), own=own.get(portion, ())) for portion in portions}


def _relayed_paths(shards: ShardMap, model: ModelSpec, rank: int, live: LiveState) -> Mapping[Portion, _Path]:
    state = live.state
    first, onward = hop_routes(shards, model, rank)
    relays, own, own_onward = (
        by_user(spans, model, state.slicing)
        for spans in (state.relays, common(state.contributes, state.relays), common(state.relays, state.sums))
    )
    return {
        portion: _Path(
            first=first.get(portion, NO_ROUTES),
            own=own.get(portion, ()),
            onward=onward.get(portion, NO_ROUTES),
            relays=relays.get(portion, ()),
            own_onward=own_onward.get(portion, ()),
        )
        for portion in {*first, *onward, *relays, *own, *own_onward}
    }
