"""losses(): what counts as the loss of a node, as scenarios, and what may never count, as properties."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_recovery.evidence import CutOff, Member, Patience, Sight, Witness, losses, may_be_cut_off

PATIENCE = Patience()
CONFIRMED_S, ALONE_S, OUT_OF_SIGHT_S = 0.5, 2.0, 12.0
NODES = ("a", "b", "c")


def member(node: str, silent_s: float = 0.0, *, kind: str = "agent", connected: bool = True) -> Member:
    return Member(node=node, name=f"the {kind} of {node}", connected=connected, silent_s=silent_s)


def witness(node: str, **silent_s: float) -> Witness:
    return Witness(node=node, silent=tuple(sorted(silent_s.items())))


def sight(*members: Member, **fields: Any) -> Sight:
    """Three nodes compute; those that are not named show signs of life."""
    others = tuple(member(node) for node in NODES if node not in {each.node for each in members})
    whole = Sight(
        members=(*members, *others),
        witnesses=(),
        vital=frozenset(NODES),
        computing=frozenset(NODES),
        troubled=frozenset(),
        since_step_s=math.inf,
    )
    return dataclasses.replace(whole, **fields)


AB_MISS_C = (witness("a", b=0.0, c=0.6), witness("b", a=0.0, c=0.6))
TWO_SILENT = (member("b", ALONE_S), member("c", ALONE_S))
SPARES = (member("d"), member("e"))
SPARES_MISS_ALL = (witness("d", a=0.6, b=0.6, c=0.6, e=0.0),)
SCENARIOS: dict[str, tuple[Sight, set[str]]] = {
    "all is well": (sight(), set()),
    "closed": (sight(member("c", connected=False)), {"c"}),
    "two do not hear it": (sight(member("c", 0.5), witnesses=AB_MISS_C), {"c"}),
    "not for long": (sight(member("c", 0.4), witnesses=AB_MISS_C), set()),
    "others miss it, but not the supervisor": (sight(witnesses=AB_MISS_C), set()),
    "its rank is silent, its agent not": (
        sight(member("c", 1.9, kind="rank"), member("c"), witnesses=AB_MISS_C),
        set(),
    ),
    "its rank is silent for long": (sight(member("c", ALONE_S, kind="rank"), member("c")), {"c"}),
    "nobody else listens": (sight(member("c", 1.9)), set()),
    "nobody else listens, for long": (sight(member("c", ALONE_S)), {"c"}),
    "a peer is in trouble": (sight(member("c", 0.5), troubled=frozenset({"a"})), {"c"}),
    "it is in trouble itself": (sight(member("c", 0.5), troubled=frozenset({"c"})), set()),
    "a witness that hears nobody": (sight(member("c", 1.9), witnesses=(witness("a", b=9.0, c=9.0),)), set()),
    "a witness that knows only this one": (sight(member("c", 1.9), witnesses=(witness("a", c=9.0),)), set()),
    "a witness that never heard it": (sight(member("c", 1.9), witnesses=(witness("a", b=0.0),)), set()),
    "its own word": (sight(member("c", 1.9), witnesses=(witness("c", a=0.0, b=0.0, c=9.0),)), set()),
    "another one hears it": (sight(member("c", 11.9), witnesses=(witness("b", a=0.0, c=0.1),)), set()),
    "another one heard it, too long ago": (sight(member("c", 12.0), witnesses=(witness("b", a=0.0, c=0.1),)), {"c"}),
    "steps are done with it": (sight(member("c", 9.0), witnesses=AB_MISS_C, since_step_s=0.3), set()),
    "steps were done with it": (sight(member("c", 9.0), witnesses=AB_MISS_C, since_step_s=0.5), {"c"}),
    "all but one": (sight(*TWO_SILENT), set()),
    "all but one, for long": (sight(member("b", OUT_OF_SIGHT_S), member("c", OUT_OF_SIGHT_S)), {"b", "c"}),
    "all but one, and one in trouble": (sight(*TWO_SILENT, troubled=frozenset({"a"})), set()),
    "all but one, closed": (sight(member("b", connected=False), member("c", connected=False)), {"b", "c"}),
    "the other one of two": (
        sight(member("b", ALONE_S), members=(member("a"), member("b", ALONE_S)), vital=frozenset("ab")),
        {"b"},
    ),
    "the only one that computes": (
        sight(member("c", 11.9), computing=frozenset("c"), witnesses=AB_MISS_C),
        set(),
    ),
    "the only one that computes, out of sight": (
        sight(member("c", 12.0), computing=frozenset("c"), witnesses=AB_MISS_C),
        {"c"},
    ),
    "all that compute, where others are well": (
        sight(*(member(node, 11.9) for node in NODES), *SPARES, witnesses=SPARES_MISS_ALL),
        set(),
    ),
    "all that compute, out of sight": (
        sight(*(member(node, 12.0) for node in NODES), *SPARES, witnesses=SPARES_MISS_ALL),
        set(NODES),
    ),
    "one that computes has died": (
        sight(member("a", connected=False), member("b", 0.5), member("c", 0.5), *SPARES, witnesses=SPARES_MISS_ALL),
        set(NODES),
    ),
    "of all that were silent one is heard again, its rank not yet": (
        sight(*TWO_SILENT, member("a"), member("a", ALONE_S, kind="rank")),
        set(),
    ),
    "not needed": (sight(member("d", 9.0)), set()),
}


@pytest.mark.parametrize(("seen", "lost"), SCENARIOS.values(), ids=SCENARIOS)
def test_scenarios(seen: Sight, lost: set[str]) -> None:
    assert losses(seen, PATIENCE).keys() == lost


def test_evidence_names_who_observed() -> None:
    assert losses(sight(member("c", 0.61), witnesses=AB_MISS_C), PATIENCE) == {
        "c": "the agent of c has been silent for 0.6 s, and the agent of a, b does not hear its node either"
    }
    assert losses(sight(member("c", 2.0)), PATIENCE) == {"c": "the agent of c has been silent for 2.0 s"}


times_s = st.sampled_from((0.0, 0.3, 0.49, 0.5, 1.99, 2.0, 3.0, 11.9, 12.0, 1e6))
names = st.sampled_from("abcd")
sets = st.frozensets(names)
members_of = st.lists(st.builds(member, names, times_s, connected=st.booleans()), max_size=8).map(tuple)
witnesses_of = st.lists(
    st.builds(witness, names, a=times_s, b=times_s, c=times_s, d=times_s), max_size=4, unique_by=lambda one: one.node
).map(tuple)
sights = st.builds(
    Sight,
    members=members_of,
    witnesses=witnesses_of,
    vital=sets,
    computing=sets,
    troubled=sets,
    since_step_s=times_s,
)


def connected(seen: Sight) -> Sight:
    return dataclasses.replace(seen, members=tuple(dataclasses.replace(one, connected=True) for one in seen.members))


@given(sights)
def test_only_what_is_needed_and_silent_or_closed_is_lost(seen: Sight) -> None:
    suspects = {one.node for one in seen.members if not one.connected or one.silent_s >= CONFIRMED_S}
    assert losses(seen, PATIENCE).keys() <= suspects & seen.vital
    assert all(losses(seen, PATIENCE).values())


@given(sights)
def test_whoever_takes_part_in_steps_is_not_lost(seen: Sight) -> None:
    assert not losses(dataclasses.replace(connected(seen), since_step_s=0.49), PATIENCE)


@given(sights, names)
def test_one_observer_that_hears_nobody_condemns_nobody_early(seen: Sight, blind: str) -> None:
    """Neither a witness that lost its network, nor a supervisor for which all but its own node went dark."""
    deaf = witness(blind, **dict.fromkeys("abcd", 1e6))
    short = tuple(dataclasses.replace(one, silent_s=min(one.silent_s, 1.99)) for one in connected(seen).members)
    alone = dataclasses.replace(seen, members=short, witnesses=(deaf,), troubled=frozenset())
    assert not losses(alone, PATIENCE)
    dark = tuple(member(node, 11.9) for node in "abcd" if node != blind)
    isolated = dataclasses.replace(seen, members=(member(blind), *dark), witnesses=(deaf,))
    assert may_be_cut_off(dataclasses.replace(isolated, since_step_s=math.inf), PATIENCE)
    assert not losses(isolated, PATIENCE)


@given(sights)
def test_an_epoch_that_may_go_on_out_of_sight_is_not_given_up_before_it_has_stopped(seen: Sight) -> None:
    unseen = tuple(dataclasses.replace(one, silent_s=min(one.silent_s, 11.9)) for one in connected(seen).members)
    hidden = dataclasses.replace(seen, members=unseen, since_step_s=math.inf)
    lit = {one.node for one in unseen if one.silent_s < CONFIRMED_S}
    known = {one.node for one in unseen}
    if hidden.computing and hidden.computing <= known and not hidden.computing & lit:
        assert not losses(hidden, PATIENCE).keys() & hidden.computing


@given(sights)
def test_more_silence_is_never_less_evidence(seen: Sight) -> None:
    """Of a node that is alone dark, where others are heard; whether all are dark at once is another question."""
    longer = tuple(dataclasses.replace(one, silent_s=one.silent_s + 20.0) for one in seen.members)
    silent = dataclasses.replace(seen, members=longer, since_step_s=math.inf)
    assert losses(silent, PATIENCE).keys() == {one.node for one in seen.members} & seen.vital


def test_a_crash_is_named() -> None:
    crashed = dataclasses.replace(member("c", kind="rank", connected=False), ended_by="SIGSEGV")
    assert losses(sight(crashed), PATIENCE) == {"c": "the connection to the rank of c closed: SIGSEGV"}
    assert losses(sight(member("c", connected=False)), PATIENCE) == {"c": "the connection to the agent of c closed"}


@pytest.mark.parametrize(("dark_s", "ends"), [(0.2, False), (1.4, False), (1.5, True), (30.0, True)])
def test_that_a_supervisor_was_cut_off_for_long_ends_once(dark_s: float, ends: bool) -> None:
    now_s = 100.0
    cut_off = CutOff(PATIENCE, lambda: now_s)
    assert not cut_off.ends(False)
    for part in range(5):
        now_s = 100.0 + dark_s * part / 4
        assert not cut_off.ends(True)
    assert cut_off.ends(False) is ends
    assert not cut_off.ends(False)
