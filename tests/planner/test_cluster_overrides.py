"""Entries of `devices` in a cluster file that no node uses: slips are refused, additions are taken."""

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
