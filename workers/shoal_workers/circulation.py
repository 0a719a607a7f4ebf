"""Within a step: the weights of a unit come together before it computes, and its gradients go to their parts after.

Owns when these are on their way. All ranks of a stage walk their units in one order, so whoever shares with whom
exchanges in step; weights are under way one unit ahead, in buffers of the wire, and gradients while the next unit
computes. Nothing of it is state: what was gathered is dropped after its use, and sums begin anew with every attempt at
a step. After an abandoned wait nothing is closed, as something may still arrive.

Does not own what passes once a step (`sharing`), nor who gives what to whom (`reduction`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from shoal_planner.job import ModelSpec
from shoal_planner.levels import Sharding
from shoal_planner.parameters import parameters
from shoal_planner.programs import Backward, Forward, InputGradient, Program
from shoal_recovery.state import ShardMap, Span, common
from shoal_workers.courier import STAGING, Courier, UnderWay
from shoal_workers.flat import FlatBuffer
from shoal_workers.forms import Blocks, Form, Plain, Source
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.reduction import (
    NO_ROUTES,
    Routes,
    UnitRoutes,
    by_user,
    fetch_routes,
    hop_routes,
    near_routes,
    scatter_routes,
)
from shoal_workers.tags import Purpose, tag

_ByUnit = Mapping[int, tuple[Span, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A unit's weights are needed, in a forward or in a backward."""

    unit: int
    backward: bool


def uses(program: Program, chunks: Sequence[Sequence[int]]) -> tuple[Use, ...]:
    """Of the weights of all units of a stage in one step, in order; `chunks` are its units."""
    found: list[Use] = []
    for item in program:
        if isinstance(item, Forward):
            found.extend(Use(unit=unit, backward=False) for unit in chunks[item.chunk])
        elif isinstance(item, Backward | InputGradient):
            found.extend(Use(unit=unit, backward=True) for unit in reversed(chunks[item.chunk]))
    return tuple(found)


class Part(Enum):
    """Of the gradients of a unit, those that are there at a time: of a block's matrices they may come later."""

    ALL = "all"
    VECTORS = "vectors"
    MATRICES = "matrices"


class Circulation:
    """Of one rank. `begin` comes before each attempt at a step and each run of forwards alone, `settle` after the last
    backward of a step. Unless units pass `ahead`, each is waited for where it is needed or made. `made` is told of each
    unit whose gradients a backward has added to."""

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
        made: Callable[[int], None] = lambda unit: None,
    ) -> None:
        self.blocks = range(1, model.layers + 1)
        self._gathering = _Gathering(shards, model, rank, live, courier, sharding, ahead=ahead)
        self._scattering = _Scattering(shards, model, rank, live, courier, memory, sharding, ahead=ahead)
        self._made = made

    def begin(self, wanted: tuple[Use, ...]) -> None:
        """What follows uses the weights of units in this order."""
        self._gathering.begin(wanted)
        self._scattering.begin()

    def weights(self, unit: int) -> AbstractContextManager[None]:
        """Inside it the weights of the unit are there; it is entered in the order of uses."""
        return self._gathering.weights(unit)

    @contextmanager
    def gradients(self, unit: int, part: Part = Part.ALL) -> Iterator[None]:
        """Inside it this part of the unit's gradients may add up; then it goes on to where it belongs."""
        with self._scattering.gradients(unit, part):
            yield
        self._made(unit)

    def settle(self) -> None:
        """Afterwards all gradients are in their parts."""
        self._scattering.settle()


class _Gathering:
    def __init__(
        self,
        shards: ShardMap,
        model: ModelSpec,
        rank: int,
        live: LiveState,
        courier: Courier,
        sharding: Sharding,
        *,
        ahead: bool,
    ) -> None:
        self._live = live
        self._courier = courier
        state = live.state
        plain = Plain(live.dtype)
        form: Form = plain if sharding.gather == "plain" else Blocks(8, live.dtype, model)
        # Who runs nothing gathers only what its node is to keep.
        self._target = live.whole_weight if state.holds else live.secondary_weight
        own = by_user(live.split_weights(common(state.keeps, state.holds or state.near)), model)
        fetched = _Way(routes=fetch_routes(shards, model, rank), own=own, form=form, source=live.weight)
        self._secondary: _ByUnit = {}
        self._ways = {False: fetched, True: fetched}
        if sharding.secondary:
            self._secondary = by_user(common(state.near, state.holds), model)
            near = near_routes(shards, model, rank)
            self._ways[True] = _Way(routes=near, own=self._secondary, form=plain, source=live.secondary_weight)
        self._shares = sharding.weights != "none"
        self._one_ahead = ahead
        self.begin(())

    def begin(self, wanted: tuple[Use, ...]) -> None:
        self._wanted = wanted
        self._next = 0
        self._ahead: UnderWay | None = None

    @contextmanager
    def weights(self, unit: int) -> Iterator[None]:
        if not self._shares:
            yield
            return
        use = self._wanted[self._next]
        assert use.unit == unit, (use, unit)
        here = self._ahead or self._start()
        self._fill(use, here)
        self._next += 1
        self._ahead = self._start() if self._one_ahead and self._next < len(self._wanted) else None
        yield
        self._live.close_weights(unit)

    def _start(self) -> UnderWay:
        """What is needed next."""
        use = self._wanted[self._next]
        way = self._ways[use.backward]
        number = tag(Purpose.FETCH, self._next)
        return self._courier.start(way.routes.get(use.unit, NO_ROUTES), number, way.form, way.source)

    def _fill(self, use: Use, came: UnderWay) -> None:
        """All compute with the same weights: what a rank keeps itself goes through the form of what it sends."""
        way, live = self._ways[use.backward], self._live
        arrivals = [parts for _, parts in self._courier.arrived(came)]
        live.open_weights(use.unit)
        if spans := way.own.get(use.unit):
            arrivals.append(way.form.unpack(way.form.pack(spans, way.source), spans))
        for parts in arrivals:
            for span, part in parts:
                self._target(span).copy_(part)
        self._courier.finish(came)
        if not use.backward:
            for span in self._secondary.get(use.unit, ()):
                live.secondary_weight(span).copy_(live.whole_weight(span))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How weights come together: what is given and taken, what the rank has itself, and how it is sent from where."""

    routes: Routes
    own: _ByUnit
    form: Form
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """Where gradients of one unit go: in one hop, straight to who sums them (`own`: to this rank itself). Or in two, by
    way of `relays`, of which a rank makes some itself (`own`) and sums some itself (`own_onward`)."""

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
    """Gradients of one unit under way; `arrive` is what becomes of them."""

    started: UnderWay
    arrive: Callable[[UnderWay], None]


class _Scattering:
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
        self._parts: dict[tuple[int, Part], _Path] = {}
        self._vectors = {parameter.fqn for parameter in parameters(model) if len(parameter.shape) == 1}
        self._shares = sharding.gradients != "none"
        self.begin()

    def begin(self) -> None:
        self._hops: list[_Hop] = []
        self._number = 0

    @contextmanager
    def gradients(self, unit: int, part: Part) -> Iterator[None]:
        if not self._shares:
            yield
            return
        self._live.open_gradients(unit)
        yield
        self._finish_started()
        self._start(self._path(unit, part))
        self._live.close_gradients(unit)
        if not self._ahead:
            self.settle()

    def settle(self) -> None:
        while self._hops:
            self._finish_started()

    def _path(self, unit: int, part: Part) -> _Path:
        key = unit, part
        if key not in self._parts:
            path = self._paths[unit]
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


def _paths(shards: ShardMap, model: ModelSpec, rank: int, live: LiveState) -> Mapping[int, _Path]:
    routes = scatter_routes(shards, model, rank)
    own = by_user(live.split_gradients(common(live.state.contributes, live.state.sums)), model)
    units = range(model.layers + 2)
    return {unit: _Path(first=routes.get(unit, NO_ROUTES), own=own.get(unit, ())) for unit in units}


def _relayed_paths(shards: ShardMap, model: ModelSpec, rank: int, live: LiveState) -> Mapping[int, _Path]:
    state = live.state
    first, onward = hop_routes(shards, model, rank)
    relays = by_user(state.relays, model)
    own = by_user(common(state.contributes, state.relays), model)
    own_onward = by_user(common(state.relays, state.sums), model)
    return {
        unit: _Path(
            first=first.get(unit, NO_ROUTES),
            own=own.get(unit, ()),
            onward=onward.get(unit, NO_ROUTES),
            relays=relays.get(unit, ()),
            own_onward=own_onward.get(unit, ()),
        )
        for unit in range(model.layers + 2)
    }
