"""Where copies go."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.cluster import Node
from shoal_recovery.placement import backups


def _node(name: str, zone: str = "z") -> Node:
    return Node(
        id=name,
        device="cpu",
        devices=1,
        host_memory_bytes=0,
        intra_bytes_per_s=1.0,
        inter_bytes_per_s=1.0,
        zone=zone,
    )


@given(st.lists(st.sampled_from("xyz"), max_size=9), st.integers(0, 4))
def test_copies_stand_on_other_nodes_and_other_zones_come_first(zones: list[str], copies: int) -> None:
    nodes = tuple(_node(f"n{index}", zone) for index, zone in enumerate(zones))
    zone_of = {node.id: node.zone for node in nodes}
    chosen = backups(nodes, copies)
    assert set(chosen) == set(zone_of)
    for node, others in chosen.items():
        assert len(others) == len(set(others)) == min(copies, len(nodes) - 1)
        assert node not in others
        reached = {zone_of[node], *(zone_of[other] for other in others)}
        assert len(reached) == min(1 + len(others), len(set(zones)))
    assert backups(tuple(reversed(nodes)), copies) == chosen


@given(st.integers(2, 12), st.integers(1, 4))
def test_equal_nodes_keep_equally_many_copies(num_nodes: int, copies: int) -> None:
    chosen = backups(tuple(_node(f"n{index:02}") for index in range(num_nodes)), copies)
    kept = Counter(other for others in chosen.values() for other in others)
    assert set(kept.values()) == {min(copies, num_nodes - 1)}


def test_four_nodes_in_two_zones() -> None:
    nodes = tuple(_node(name, zone) for name, zone in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "y")))
    assert backups(nodes, 1) == {"a": ("c",), "b": ("d",), "c": ("a",), "d": ("b",)}
