"""The Profile as a value: which figure goes first, what is kept of two, what holds for nodes of one kind."""

from __future__ import annotations

import pytest

from shoal_planner.cluster import GIB, Node
from shoal_planner.errors import InvalidField
from shoal_planner.profile import (
    KindLink,
    LinkFigure,
    Profile,
    UpdateRate,
    joined,
    link_kind,
    profile_from_mapping,
    profile_to_mapping,
)


def node(name: str, *, zone: str = "z", devices: int = 1, inter: float = 1e9) -> Node:
    return Node(
        id=name,
        device="T4",
        devices=devices,
        host_memory_bytes=GIB,
        intra_bytes_per_s=1e10,
        inter_bytes_per_s=inter,
        zone=zone,
    )


NODES = (node("a-0"), node("a-1"), node("b-0", zone="y"), node("c-0", devices=2))
A, B, C = (link_kind(NODES[index]) for index in (0, 2, 3))


def kind_link(here: str, there: str, bytes_per_s: float, *, within: bool = False) -> KindLink:
    return KindLink(
        from_kind=here, to_kind=there, latency_s=1e-4, bytes_per_s=bytes_per_s, source="probe", within=within
    )


def rate(profile: Profile, here: str, there: str) -> float | None:
    found = profile.link(here, there)
    return None if found is None else found.bytes_per_s


def test_nodes_that_are_linked_alike_share_a_figure_and_one_that_differs_has_its_own() -> None:
    slow = LinkFigure(from_node="a-1", to_node="b-0", latency_s=1e-3, bytes_per_s=5.0, source="probe")
    profile = Profile(
        links=(slow,),
        kind_links=(kind_link(A, A, 1.0), kind_link(A, B, 2.0), kind_link(C, C, 3.0, within=True)),
    )
    assert rate(profile, "a-0", "a-1") is None, "nobody said of which kind they are"
    known = profile.on(NODES)
    assert (rate(known, "a-0", "a-1"), rate(known, "b-0", "a-0"), rate(known, "a-0", "b-0")) == (1.0, 2.0, 2.0)
    assert (rate(known, "a-1", "b-0"), rate(known, "b-0", "a-1")) == (5.0, 5.0)
    assert (rate(known, "c-0", "c-0"), rate(known, "a-0", "a-0"), rate(known, "c-0", "a-0")) == (3.0, None, None)
    assert rate(known.on(NODES[:2]), "a-1", "b-0") is None
    assert profile_from_mapping(profile_to_mapping(known)) == known


def test_what_tells_kinds_apart() -> None:
    assert link_kind(node("x")) == link_kind(node("y"))
    for other in (node("x", zone="y"), node("x", devices=2), node("x", inter=2e9)):
        assert link_kind(other) != link_kind(node("x"))


def test_of_two_figures_of_one_thing_the_newer_is_kept() -> None:
    older = Profile(
        updates=(UpdateRate(device="T4", elements_per_s=1.0, source="old"),),
        kind_links=(kind_link(A, B, 1.0), kind_link(A, A, 1.0)),
        links=(LinkFigure(from_node="a-0", to_node="a-1", latency_s=0.0, bytes_per_s=1.0, source="old"),),
    )
    newer = Profile(
        updates=(UpdateRate(device="A100-40G", elements_per_s=3.0, source="new"),),
        kind_links=(kind_link(B, A, 2.0),),
        links=(LinkFigure(from_node="a-1", to_node="a-0", latency_s=0.0, bytes_per_s=2.0, source="new"),),
    )
    both = joined(older, newer)
    assert (both.update_rate("T4"), both.update_rate("A100-40G")) == (1.0, 3.0)
    assert sorted(figure.bytes_per_s for figure in both.kind_links) == [1.0, 2.0]
    assert [figure.bytes_per_s for figure in both.links] == [2.0]
    assert joined(both, newer) == both


def test_figures_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidField, match="bytes_per_s"):
        kind_link(A, A, 0.0)
    with pytest.raises(InvalidField, match="to_kind"):
        kind_link(A, B, 1.0, within=True)
