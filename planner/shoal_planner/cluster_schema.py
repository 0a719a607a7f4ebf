"""The JSON Schemas of CLUSTER and MARKET documents, for editors and for checks before anything is sent. What only the
whole of one can tell (whether a zone or a device type is there) it leaves to those who read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_planner.cluster import (
    DEVICE_ENTRY_RANGES,
    ENTRY_RANGES,
    INCAST_RANGES,
    LINK_ENTRY_RANGES,
    DeviceEntry,
    NodeEntry,
)
from shoal_planner.cluster_words import DEVICES, DOCUMENT, LINKS, NODES
from shoal_planner.datasheets import DATASHEETS
from shoal_planner.market import AVAILABLE, MAX_RENTED, OFFERED_PRICE
from shoal_planner.ranges import Range
from shoal_planner.rented_pools import POOL_NAME
from shoal_planner.value_schema import DIALECT, Shaper

# With a number behind it, it is the id of a node.
_NAME = {"type": "string", "pattern": "^[a-z0-9A-Z][a-z0-9A-Z._-]{0,60}$"}
# Editors complete what the catalogue knows; `devices` may have others.
_DEVICE = {"anyOf": [{"enum": sorted(DATASHEETS)}, {"type": "string"}]}


def cluster_schema() -> dict[str, Any]:
    """Of a CLUSTER, as plain JSON values."""
    return _document("Shoal cluster", "Which nodes there are to plan for, or to start.", "nodes", _node())


def market_schema() -> dict[str, Any]:
    """Of a MARKET, as plain JSON values."""
    return _document(
        "Shoal market", "Which nodes can be rented, how many of each and at what price.", "offers", _offer()
    )


def _offer() -> dict[str, Any]:
    offer = _node()
    for name in ("count", "host"):
        del offer["properties"][name]
    price = _number(OFFERED_PRICE) | {"description": DOCUMENT["offered_price"]}
    available = _number(AVAILABLE) | {"type": "integer", "description": DOCUMENT["available"]}
    offer["properties"] |= {"price_per_hour": price, "available": available}
    offer["required"] += ["price_per_hour", "available"]
    return offer


def pool_schema() -> dict[str, Any]:
    """Of an entry of a POOLS file (`rented_pools`), whose node is that of an offer."""
    node = _offer()
    for name in ("name", "available"):
        del node["properties"][name]
        node["required"].remove(name)
    count = {"type": "integer", "minimum": 0, "maximum": MAX_RENTED}
    return {
        "title": "Shoal pool",
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": f"^{POOL_NAME.pattern}$"},
            "node": node,
            "min": {**count, "default": 0},
            "max": {**count, "minimum": 1},
            "instance_type": {"type": ["string", "null"]},
            "zones": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "node", "max"],
        "additionalProperties": False,
    }


def _document(title: str, description: str, name: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    device = Shaper(words=DEVICES, ranges={DeviceEntry: DEVICE_ENTRY_RANGES}).of(DeviceEntry)
    properties = {
        name: {"type": "array", "minItems": 1, "items": shape, "description": DOCUMENT[name]},
        "devices": {
            "type": ["object", "null"],
            "additionalProperties": device,
            "description": DOCUMENT["devices"],
        },
        "links": {"type": ["array", "null"], "items": _link(), "description": DOCUMENT["links"]},
    }
    return {
        "$schema": DIALECT,
        "title": title,
        "description": description,
        "type": "object",
        "properties": properties,
        "required": [name],
        "additionalProperties": False,
    }


def _node() -> dict[str, Any]:
    shapes: dict[tuple[type[Any], str], dict[str, Any]] = {(NodeEntry, "name"): _NAME, (NodeEntry, "device"): _DEVICE}
    return Shaper(words=NODES, ranges={NodeEntry: ENTRY_RANGES}, shapes=shapes).of(NodeEntry)


def _link() -> dict[str, Any]:
    """What two zones have between them; `cluster.Link` has other units."""
    zone = {"type": "string"}
    made: dict[str, Any] = {"from": zone, "to": zone}
    made |= {name: _number(limits) for name, limits in LINK_ENTRY_RANGES.items()}
    made |= {"incast": _number(INCAST_RANGES["incast"]) | {"default": 0.0}}
    made |= {"fan_in": _number(INCAST_RANGES["fan_in"]) | {"type": "integer", "default": 2}}
    return {
        "type": "object",
        "properties": {name: {**each, "description": LINKS[name]} for name, each in made.items()},
        "required": ["from", "to", *LINK_ENTRY_RANGES],
        "additionalProperties": False,
    }


def _number(limits: Range) -> dict[str, Any]:
    return {"type": "number", "minimum": limits[0], "maximum": limits[1]}
