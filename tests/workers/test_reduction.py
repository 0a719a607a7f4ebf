"""Sends and receives of all ranks match by construction, and bring every gradient and weight where it belongs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from engine_runs import LAYOUTS, job
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import models, plans

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_planner.plan import Plan
from shoal_planner.programs import Gather, Reduce
from shoal_planner.schedule import programs
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import RankState, ShardMap, Span
from shoal_workers.reduction import Message, Routes, gather_routes, reduce_routes

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
    for routes in (reduce_routes, gather_routes):
        sends, receives = _all(shards, model, routes)
        key = lambda message: (message.source, message.destination, message.unit)  # noqa: E731
        assert sorted(sends, key=key) == sorted(receives, key=key)
        assert len({key(message) for message in sends}) == len(sends), "one tag, one message"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_owners_hear_from_every_contributor_and_holders_from_every_owner(data: st.DataObject) -> None:
    model = data.draw(models())
    shards = shard_map(data.draw(plans(model)), model)
    _check(shards, model, reduce_routes, lambda state: state.contributes, lambda state: state.owns)
    _check(shards, model, gather_routes, lambda state: state.owns, lambda state: state.holds)


Choice = Callable[[RankState], tuple[Span, ...]]


def _check(shards: ShardMap, model: ModelSpec, routes: RouteFunction, gives: Choice, takes: Choice) -> None:
    """Element by element: what comes to a rank, its own included, is what all ranks give of what it takes."""
    _, receives = _all(shards, model, routes)
    for state in shards.ranks:
        for parameter in parameters(model):
            wanted = _count(takes(state), parameter.fqn, parameter.numel)
            given_by_all = sum(_count(gives(other), parameter.fqn, parameter.numel) for other in shards.ranks)
            came = _count(gives(state), parameter.fqn, parameter.numel) * wanted
            for message in receives:
                if message.destination == state.rank:
                    came += _count(message.spans, parameter.fqn, parameter.numel)
            np.testing.assert_array_equal(came, wanted * given_by_all)


def _count(spans: tuple[Span, ...], fqn: str, numel: int) -> np.ndarray:
    count = np.zeros(numel, dtype=int)
    for span in spans:
        if span.fqn == fqn:
            count[span.first : span.last] += 1
    return count


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
            assert set(routes(shards, model, rank)) <= set(units)
            pairs[kind].update(itertools.combinations(units, 2))
    for found in pairs.values():
        assert not any((other, one) in found for one, other in found), "all ranks in one order"
