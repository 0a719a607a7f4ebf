"""Who sends which gradients and which weights to whom: pure functions of the ShardMap.

Every rank derives the messages that concern it from the map of the whole world, so that each send has its receive, with
the same spans in the same order, by construction.

Once a step: gradients go from whoever summed an interval to the rank that vouches for it, who sums them in the order of
ranks; from there to the other owners; and updated weights from an owner to whoever keeps them. A parameter travels with
its first unit. Within a step, among the members of a circle and with whichever unit uses a parameter: weights go from
whoever keeps them to whoever computes with them, gradients from whoever made them to whoever sums them; one portion
after the other, as their stage cuts its units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_planner.slices import UNCUT, Portion, Slicing
from shoal_recovery.state import RankState, ShardMap, Span, common, without
from shoal_workers.portions import Cutter, cutter

_Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The spans of one portion of a unit that `source` packs, in this order, into one buffer for `destination`."""

    portion: Portion
    source: int
    destination: int
    spans: tuple[Span, ...]

    def only(self, wanted: Callable[[Span], bool]) -> Message:
        return replace(self, spans=tuple(filter(wanted, self.spans)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRoutes:
    """What one rank sends and receives for one portion, each in the order of the other ranks."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    def only(self, wanted: Callable[[Span], bool]) -> UnitRoutes:
        """Of these spans; messages without any are left out at both ends."""
        sends, receives = ([message.only(wanted) for message in some] for some in (self.sends, self.receives))
        return UnitRoutes(sends=_with_spans(sends), receives=_with_spans(receives))


def _with_spans(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.spans)


NO_ROUTES = UnitRoutes(sends=(), receives=())
Routes = Mapping[Portion, UnitRoutes]
_Between = Callable[[RankState, RankState], _Spans]  # what the first one gives the second


def reduce_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The gradients that `rank` sends to those who vouch, and receives as one; by unit (its portion 0), for units with
    any."""
    return _routes(shards, rank, _homes(model), lambda giver, taker: common(giver.sums, taker.vouches))


def spread_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The summed gradients that `rank` sends to other owners, and receives as one."""
    return _routes(shards, rank, _homes(model), lambda giver, taker: common(giver.vouches, taker.owns))


def gather_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The updated weights that `rank` sends to who keeps them, and receives; each from the owner in its circle."""

    def between(giver: RankState, taker: RankState) -> _Spans:
        if giver.circles.optimizer != taker.circles.optimizer:
            return ()
        return without(common(giver.owns, taker.keeps), taker.owns)

    return _routes(shards, rank, _homes(model), between)


def beside_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The updated weights that `rank` gives others of its replica, which keep them and have no gradients of them."""

    def between(giver: RankState, taker: RankState) -> _Spans:
        if giver.rank - giver.circles.tp_rank != taker.rank - taker.circles.tp_rank:
            return ()
        return without(common(giver.contributes, taker.keeps), taker.contributes)

    return _routes(shards, rank, _homes(model), between)


def fetch_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The weights of each unit that `rank` gives its circle before they are used, and takes: what it computes with, or
    where it runs nothing, what it is to keep near."""
    turn = _Turns(model)

    def between(giver: RankState, taker: RankState) -> _Spans:
        if giver.circles.weights != taker.circles.weights:
            return ()
        return turn.taken(without(common(giver.keeps, taker.holds or taker.near), taker.keeps), giver, taker)

    return _routes(shards, rank, _users(model, _slicing(shards, rank)), between)


def near_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """As `fetch_routes`, of what the node has gathered before."""
    turn = _Turns(model)

    def between(giver: RankState, taker: RankState) -> _Spans:
        if giver.circles.node != taker.circles.node:
            return ()
        return turn.taken(without(common(giver.near, taker.holds), taker.near), giver, taker)

    return _routes(shards, rank, _users(model, _slicing(shards, rank)), between)


def scatter_routes(shards: ShardMap, model: ModelSpec, rank: int) -> Routes:
    """The gradients of each unit that `rank` gives its circle after they are made, and takes."""

    def between(giver: RankState, taker: RankState) -> _Spans:
        if giver.circles.gradients != taker.circles.gradients or not taker.shares_gradients:
            return ()
        return without(common(giver.contributes, taker.sums), taker.alone)

    return _routes(shards, rank, _users(model, _slicing(shards, rank)), between)


def hop_routes(shards: ShardMap, model: ModelSpec, rank: int) -> tuple[Routes, Routes]:
    """As `scatter_routes`, in two hops: inside the node to whoever sums for it, and from there between nodes."""

    def inside(giver: RankState, taker: RankState) -> _Spans:
        return common(giver.contributes, taker.relays) if giver.circles.node == taker.circles.node else ()

    def onward(giver: RankState, taker: RankState) -> _Spans:
        return common(giver.relays, taker.sums) if giver.circles.gradients == taker.circles.gradients else ()

    users = _users(model, _slicing(shards, rank))
    return _routes(shards, rank, users, inside), _routes(shards, rank, users, onward)


class _Turns:
    """Of a replicated parameter all ranks of a replica keep the same: each gives it to some."""

    def __init__(self, model: ModelSpec) -> None:
        self._replicated = frozenset(parameter.fqn for parameter in parameters(model) if not parameter.cut)

    def taken(self, spans: _Spans, giver: RankState, taker: RankState) -> _Spans:
        if giver.circles.tp_rank == taker.circles.tp_rank % giver.circles.tp:
            return spans
        return tuple(span for span in spans if span.fqn not in self._replicated)


def by_user(spans: _Spans, model: ModelSpec, slicing: Slicing) -> Mapping[Portion, _Spans]:
    """These spans by the portions of units that use them, in the order of messages."""
    return _users(model, slicing).sorted(spans)


def of_home(spans: _Spans, unit: int, model: ModelSpec) -> _Spans:
    """Those that are exchanged once a step under this unit, in the order of messages."""
    order = {parameter.fqn: index for index, parameter in enumerate(parameters(model)) if parameter.units[0] == unit}
    return tuple(sorted((span for span in spans if span.fqn in order), key=lambda span: (order[span.fqn], span.first)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """With which units each parameter travels, in the order of the model, and in which portions of these."""

    units: Mapping[str, tuple[int, ...]]
    cut: Cutter

    def sorted(self, spans: _Spans) -> dict[Portion, _Spans]:
        """By portion; in the order of the model, then of elements."""
        places = {fqn: place for place, fqn in enumerate(self.units)}
        found: defaultdict[Portion, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda span: (places[span.fqn], span.first)):
            for number, part in self.cut(span):
                for unit in self.units[span.fqn]:
                    found[Portion(unit, number)].append(part)
        return {portion: tuple(some) for portion, some in found.items()}


def _homes(model: ModelSpec) -> _Order:
    units = {parameter.fqn: parameter.units[:1] for parameter in parameters(model)}
    return _Order(units=units, cut=cutter(model, UNCUT))


def _users(model: ModelSpec, slicing: Slicing) -> _Order:
    units = {parameter.fqn: parameter.units for parameter in parameters(model)}
    return _Order(units=units, cut=cutter(model, slicing))


def _state(shards: ShardMap, rank: int) -> RankState:
    return next(state for state in shards.ranks if state.rank == rank)


def _slicing(shards: ShardMap, rank: int) -> Slicing:
    """Of its stage: with ranks of others it exchanges nothing within a step."""
    return _state(shards, rank).slicing


def _routes(shards: ShardMap, rank: int, order: _Order, between: _Between) -> Routes:
    own = _state(shards, rank)
    sends: defaultdict[Portion, list[Message]] = defaultdict(list)
    receives: defaultdict[Portion, list[Message]] = defaultdict(list)
    for other in sorted((state for state in shards.ranks if state.rank != rank), key=lambda state: state.rank):
        for portion, spans in order.sorted(between(own, other)).items():
            sends[portion].append(Message(portion=portion, source=rank, destination=other.rank, spans=spans))
        for portion, spans in order.sorted(between(other, own)).items():
            receives[portion].append(Message(portion=portion, source=other.rank, destination=rank, spans=spans))
    return {
        portion: UnitRoutes(sends=tuple(sends[portion]), receives=tuple(receives[portion]))
        for portion in sorted({*sends, *receives})
    }
