"""Entries of `devices` in a cluster file that no node uses: slips are refused, additions are taken; and links that are
told twice."""

from __future__ import annotations

import pytest

from shoal_planner.cluster import parse_cluster
from shoal_planner.errors import InvalidField


def _cluster(*names: str) -> dict[str, object]:
    nodes = [{"name": "a", "device": "A100-80G", "devices": 1}]
    return {"nodes": nodes, "devices": {name: {"efficiency": 0.4} for name in names}}


def test_a_slip_in_the_name_of_an_override_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidField, match=r"^devices\.A100-80GB = 'A100-80GB': .* did you mean 'A100-80G'\?$"):
        parse_cluster(_cluster("A100-80GB"))


@pytest.mark.parametrize("names", [("A100-80G",), ("A100-40G",), ("of-our-own",), ("A100-80G", "A100-80GB")])
def test_what_only_adds_a_type_is_taken(names: tuple[str, ...]) -> None:
    found = parse_cluster(_cluster(*names))
    assert {override.name for override in found.overrides} == set(names)


def test_a_link_told_twice_must_be_told_alike() -> None:
    nodes = [{"name": zone, "device": "L4", "zone": zone} for zone in ("east", "west")]
    there = {"from": "east", "to": "west", "gbit_per_s": 5, "latency_ms": 10}
    back = there | {"from": "west", "to": "east"}
    assert len(parse_cluster({"nodes": nodes, "links": [there, back]}).links) == 2
    with pytest.raises(InvalidField, match=r"^links\[1\] = 'west - east': contradicts links\[0\]"):
        parse_cluster({"nodes": nodes, "links": [there, back | {"gbit_per_s": 1}]})
