"""Sends and receives of all ranks match by construction, and bring every gradient and weight where it belongs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from engine_runs import LAYOUTS, job
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import count, models, plans

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_planner.plan import Plan
from shoal_planner.programs import Gather, Reduce
from shoal_planner.schedule import programs
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import RankState, ShardMap, Span
from shoal_workers.reduction import (
    Message,
    Routes,
    fetch_routes,
    gather_routes,
    reduce_routes,
    scatter_routes,
    spread_routes,
)

RouteFunction = Callable[[ShardMap, ModelSpec, int], Routes]


def _all(shards: ShardMap, model: ModelSpec, routes: RouteFunction) -> tuple[list[Message], list[Message]]:
    sends, receives = [], []
    for state in shards.ranks:
        for unit in routes(shards, model, state.rank).values():
            sends.extend(unit.sends)
            receives.extend(unit.receives)
    return sends, receives


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_send_has_its_receive(data: st.DataObject) -> None:
    model = data.draw(models())
    shards = shard_map(data.draw(plans(model)), model)
    for routes in (reduce_routes, spread_routes, gather_routes, fetch_routes, scatter_routes):
        sends, receives = _all(shards, model, routes)
        key = lambda message: (message.source, message.destination, message.portion)  # noqa: E731
        assert sorted(sends, key=key) == sorted(receives, key=key)
        assert len({key(message) for message in sends}) == len(sends), "one tag, one message"


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_everything_comes_where_it_is_needed_exactly_once(data: st.DataObject) -> None:
    """Whoever vouches hears of every circle's sum, other owners from who vouches, and weights come from one owner;
    within a step, the parts of a circle come together, and the gradients of all its members."""
    model = data.draw(models())
    shards = shard_map(data.draw(plans(model)), model)
    ranks = shards.ranks

    def all_sums(state: RankState) -> Arrays:
        return _add(_counts(other.sums, model) for other in ranks)

    def circle_sums(state: RankState) -> Arrays:
        circle = [other for other in ranks if other.circles.gradients == state.circles.gradients]
        return _add(_counts(other.contributes, model) for other in circle)

    def once(state: RankState) -> Arrays:
        return {parameter.fqn: np.ones(parameter.numel, dtype=int) for parameter in parameters(model)}

    _check(shards, model, reduce_routes, lambda state: state.vouches, lambda state: state.sums, all_sums)
    _check(shards, model, spread_routes, lambda state: state.owns, lambda state: state.vouches, once)
    _check(shards, model, gather_routes, lambda state: state.keeps, lambda state: state.owns, once)
    _check(shards, model, fetch_routes, lambda state: state.holds, lambda state: state.keeps, once)
    _check(shards, model, scatter_routes, lambda state: state.sums, lambda state: state.contributes, circle_sums)


Choice = Callable[[RankState], tuple[Span, ...]]
Arrays = dict[str, np.ndarray]


def _check(
    shards: ShardMap,
    model: ModelSpec,
    routes: RouteFunction,
    takes: Choice,
    has: Choice,
    given: Callable[[RankState], Arrays],
) -> None:
    """Element by element: what comes to a rank, with what it has, is what there is to come of what it takes."""
    for state in shards.ranks:
        came, seen = _counts(has(state), model), set()
        for unit in routes(shards, model, state.rank).values():
            for message in unit.receives:
                spans = [span for span in message.spans if (message.source, span) not in seen]  # tied: for either unit
                seen |= {(message.source, span) for span in spans}
                came = _add((came, _counts(tuple(spans), model)))
        wanted, there = _counts(takes(state), model), given(state)
        for fqn, mask in wanted.items():
            np.testing.assert_array_equal(came[fqn] * mask, there[fqn] * mask, err_msg=f"{fqn} of {state.rank}")
            assert not (came[fqn] - _counts(has(state), model)[fqn])[mask == 0].any(), "comes, and is not taken"


def _counts(spans: tuple[Span, ...], model: ModelSpec) -> Arrays:
    return {parameter.fqn: count(spans, parameter.fqn, parameter.numel) for parameter in parameters(model)}


def _add(some: Iterable[Arrays]) -> Arrays:
    first, *others = some
    return {fqn: sum((other[fqn] for other in others), start=array.copy()) for fqn, array in first.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_message_is_in_the_programs_of_both_sides(layout: str, tied: bool) -> None:
    """A rank sends and receives when its program comes to the unit; so its program must come to it."""
    plan: Plan = LAYOUTS[layout]
    model = job(tied=tied).model
    shards = shard_map(plan, model)
    pairs: dict[type, set[tuple[int, int]]] = {Reduce: set(), Gather: set()}
    for rank, program in enumerate(programs(plan, model)):
        for kind, routes in ((Reduce, reduce_routes), (Gather, gather_routes)):
            units = [item.unit for item in program if isinstance(item, kind)]
            assert {portion.unit for portion in routes(shards, model, rank)} <= set(units)
            pairs[kind].update(itertools.combinations(units, 2))
    for found in pairs.values():
        assert not any((other, one) in found for one, other in found), "all ranks in one order"
