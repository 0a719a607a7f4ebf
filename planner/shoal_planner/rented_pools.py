"""Pools of a running cluster: nodes of one shape, more of which can be had from a cloud or given back to it.

Owns the file that names them. What a node is made of is said as in a market file (`market`), and read by it; what is
asked of a pool is `provisioning`'s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal_planner.cluster import Node
from shoal_planner.errors import InvalidField
from shoal_planner.market import MAX_RENTED, Offer, parse_market
from shoal_planner.ranges import check_range
from shoal_planner.strict import read

# What names a group of Kubernetes, a type of nodes of Ray's, and a resource of both.
POOL_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
MAX_POOLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedPool:
    """`least` nodes are always there, at most `most`. `node` is what each is like; `instance_type` and `zones` are how
    the cloud calls it, for its prices; no zone: those of all zones count."""

    name: str
    node: Node
    least: int
    most: int
    instance_type: str | None = None
    zones: tuple[str, ...] = ()

    def offer(self, available: int) -> Offer:
        return Offer(name=self.name, node=self.node, available=available)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    name: str
    node: dict[str, Any]
    max: int
    min: int = 0
    instance_type: str | None = None
    zones: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not POOL_NAME.fullmatch(self.name):
            problem = "must be 1 to 40 lower-case letters, digits or '-', with a letter or digit at both ends"
            raise InvalidField("name", self.name, problem)
        check_range("max", self.max, 1, MAX_RENTED)
        check_range("min", self.min, 0, MAX_RENTED)
        if self.min > self.max:
            raise InvalidField("min", self.min, f"must be at most max ({self.max})")
        for field in ("name", "count", "available"):
            if field in self.node:
                raise InvalidField(f"node.{field}", self.node[field], "is said of the pool: 'name', 'min' and 'max'")


def parse_pools(value: object) -> tuple[RentedPool, ...]:
    """The list of a POOLS file, in its order. Raises InvalidField."""
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField("pools", value, "must be a list of at least one pool")
    if len(value) > MAX_POOLS:
        raise InvalidField("pools", len(value), f"must be at most {MAX_POOLS}")
    found: list[RentedPool] = []
    for index, entry in enumerate(value):
        pool = _pool(read(_Entry, entry, f"pools[{index}]"), f"pools[{index}]")
        if any(other.name == pool.name for other in found):
            raise InvalidField(f"pools[{index}].name", pool.name, "two pools have this name")
        found.append(pool)
    return tuple(found)


def _pool(entry: _Entry, path: str) -> RentedPool:
    zone = {"zone": entry.zones[0]} if len(entry.zones) == 1 else {}
    offered = {"name": entry.name, "available": entry.max, **zone, **entry.node}
    try:
        market = parse_market({"offers": [offered]})
    except InvalidField as error:
        field = error.field.removeprefix("offers[0].")
        raise InvalidField(f"{path}.node.{field}", error.value, error.problem) from error
    return RentedPool(
        name=entry.name,
        node=market.offers[0].node,
        least=entry.min,
        most=entry.max,
        instance_type=entry.instance_type,
        zones=entry.zones,
    )


def pool_resource(pool: str) -> str:
    """What each node of a type has one of, where Ray's autoscaler makes them."""
    return f"shoal-pool-{pool}"


def pool_of(labels: Mapping[str, str], resources: Collection[str], known: Collection[str]) -> str | None:
    """Which pool a node is of: by our label, else by the group that Ray's own autoscaler and KubeRay name, else by the
    resource that it is asked for by."""
    name = labels.get("shoal.io/pool") or labels.get("ray.io/node-group")
    if name in known:
        return name
    return next((pool for pool in sorted(known) if pool_resource(pool) in resources), None)
