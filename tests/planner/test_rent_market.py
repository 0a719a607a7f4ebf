"""The market file."""

from __future__ import annotations

from typing import Any

import pytest
from rent_ground import market, offer

from shoal_planner.errors import InvalidField
from shoal_planner.market import Market, parse_market


def test_an_offer_is_a_node_of_a_cluster_file_with_a_price_and_a_number() -> None:
    given = offer("A40", 3, devices=4, zone="east", spot=True, nics=2, preemptions_per_hour=0.1, host_memory_gib=100)
    found = parse_market(
        {
            "offers": [given, offer("RTX4090", 0)],
            "devices": {"A40": {"memory_gib": 44}},
            "links": [{"from": "east", "to": "default", "gbit_per_s": 1, "latency_ms": 30}],
        }
    )
    assert [made.name for made in found.offers] == ["a40", "rtx4090"]
    a40 = found.offer("a40")
    assert (a40.available, a40.node.preemptions_per_hour, a40.price_per_hour) == (3, 0.1, 0.55)
    assert (a40.node.devices, a40.node.zone, a40.node.spot, a40.node.nics) == (4, "east", True, 2)
    cluster = found.snapshot({"a40": 2, "rtx4090": 0})
    assert [node.id for node in cluster.nodes] == ["a40-0", "a40-1"]
    assert (cluster.overrides, cluster.links) == (found.overrides, found.links) and len(cluster.links) == 1
    assert found.price_per_hour({"a40": 2}) == pytest.approx(1.1)
    with pytest.raises(KeyError):
        found.offer("t4")


def test_two_offers_of_one_name() -> None:
    one = market((1, 1, 0, 0, 0, 0)).offer("a40")
    with pytest.raises(InvalidField, match="two offers have this name"):
        Market(offers=(one, one))


def changed(**fields: Any) -> dict[str, Any]:
    entry = {**offer("A40", 3), **fields}
    return {"offers": [{key: value for key, value in entry.items() if value != "left out"}]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "the market is empty"),
        ({}, "offers = None: must be a list of at least one offer"),
        ({"offers": []}, "offers = []"),
        ({"offers": ["a40"]}, "offers[0] = 'a40': must be a mapping"),
        ({"offers": [offer("A40", 1)], "nodes": []}, "nodes = []: is not a known field; known: offers, devices, links"),
        ({"offers": [offer("A40", 1)] * 2}, "two offers have this"),
        (changed(available="left out"), "offers[0].available = None: is required"),
        (changed(available=-1), "offers[0].available = -1: must be at least 0"),
        (changed(available=1.5), "offers[0].available = 1.5: must be a whole number"),
        (changed(available=5000), "offers[0].available = 5000: must be at most 4096"),
        (changed(count=3), "offers[0].count = 3: is not a field of an offer; did you mean 'available'?"),
        (changed(price_per_hour="left out"), "offers[0].price_per_hour = None: is required"),
        (changed(price_per_hour=0), "offers[0].price_per_hour = 0.0: must be more than zero"),
        (changed(price_per_hour=-2), "offers[0].price_per_hour = -2.0"),
        (changed(devics=2), "offers[0].devics = 2: is not a known field; did you mean 'devices'?"),
        (changed(devices=0), "offers[0].devices = 0: must be at least 1"),
        (changed(device="A41"), "offers[0].device = 'A41': is not a known device type; did you mean"),
        (changed(device_group=3), "offers[0].device_group = 3: must be at most devices (1)"),
        (changed(name="a b"), "'a b-0'"),
        (changed(name="x" * 61, available=3), None),
        (changed(name="x" * 61, available=30), "must be 1 to 63 letters"),
        (changed(preemptions_per_hour=0.1), "preemptions_per_hour = 0.1: is only for nodes with spot: true"),
        (changed(preemptions_per_hour=-1, spot=True), "offers[0].preemptions_per_hour = -1.0: must be zero or more"),
        ({**changed(), "devices": {"A40": {"memory_gib": -1}}}, "devices.A40.memory_gib = -1.0"),
        ({**changed(), "links": [{"from": "a"}]}, "links[0]"),
    ],
)
def test_what_is_wrong_is_named(given: Any, words: str | None) -> None:
    if words is None:
        assert parse_market(given).offers
        return
    with pytest.raises(InvalidField) as caught:
        parse_market(given)
    assert words in str(caught.value)
