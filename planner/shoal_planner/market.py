"""Market: which kinds of nodes can be rented, how many of each and at what price; and clusters made of them.

Owns the market file. What an offered node is made of is the cluster file's business (`cluster`), and read by it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, DeviceOverride, Link, Node, parse_cluster
from shoal_planner.errors import InvalidField
from shoal_planner.ranges import Range, check_range
from shoal_planner.strict import check_document, check_known, number, read

_KEYS = ("offers", "devices", "links")
OFFERED_PRICE: Range = (1e-9, 1e6)  # dollars an hour: what is offered for nothing cannot be weighed
MAX_RENTED = 4096  # nodes, of one offer and together: mixes of them are searched
AVAILABLE: Range = (0, MAX_RENTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Nodes of one shape that can be had at one price; `available` counts those already rented, too.

    `node` is the first of them.
    """

    name: str
    node: Node
    available: int

    @property
    def price_per_hour(self) -> float:
        return self.node.price_per_hour

    def nodes(self, count: int) -> tuple[Node, ...]:
        return tuple(dataclasses.replace(self.node, id=f"{self.name}-{index}", host=None) for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """Sorted by the names of offers: equal markets are equal values."""

    offers: tuple[Offer, ...]
    overrides: tuple[DeviceOverride, ...] = ()
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.offers, key=lambda offer: offer.name))
        object.__setattr__(self, "offers", ordered)
        for before, after in itertools.pairwise(ordered):
            if before.name == after.name:
                raise InvalidField("offers", after.name, "two offers have this name")

    def offer(self, name: str) -> Offer:
        """Raises KeyError."""
        for offer in self.offers:
            if offer.name == name:
                return offer
        raise KeyError(name)

    def snapshot(self, counts: Mapping[str, int]) -> ClusterSnapshot:
        """The cluster of so many nodes of each offer, by name. Raises KeyError."""
        nodes = (node for name, count in counts.items() for node in self.offer(name).nodes(count))
        return ClusterSnapshot(nodes=tuple(nodes), overrides=self.overrides, links=self.links)

    def price_per_hour(self, counts: Mapping[str, int]) -> float:
        return sum(self.offer(name).price_per_hour * count for name, count in sorted(counts.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Availability:
    """What an offer says beyond its node."""

    available: int

    def __post_init__(self) -> None:
        check_range("available", self.available, *AVAILABLE)


_OFFER_KEYS = tuple(field.name for field in dataclasses.fields(_Availability))


def parse_market(value: object) -> Market:
    """The market in a mapping of the published format (`offers`, `devices`, `links`). Raises InvalidField."""
    value = check_document(value, "market")
    check_known(value, _KEYS)
    entries = value.get("offers")
    if not isinstance(entries, list | tuple) or not entries:
        raise InvalidField("offers", entries, "must be a list of at least one offer")
    figures = [_figures(entry, f"offers[{index}]") for index, entry in enumerate(entries)]
    cluster = _cluster(entries, value)
    nodes = {node.id: node for node in cluster.nodes}
    offers = []
    for index, (entry, said) in enumerate(zip(entries, figures, strict=True)):
        offer = Offer(
            name=entry["name"],
            node=nodes[f"{entry['name']}-0"],
            available=said.available,
        )
        _check(offer, cluster, f"offers[{index}]")
        offers.append(offer)
    return Market(offers=tuple(offers), overrides=cluster.overrides, links=cluster.links)


def _figures(entry: object, path: str) -> _Availability:
    if not isinstance(entry, Mapping):
        raise InvalidField(path, entry, "must be a mapping of fields to values")
    if "count" in entry:
        raise InvalidField(f"{path}.count", entry["count"], "is not a field of an offer; did you mean 'available'?")
    if "host" in entry:
        raise InvalidField(
            f"{path}.host", entry["host"], "is not a field of an offer: what is rented is whole machines"
        )
    if "price_per_hour" not in entry:
        raise InvalidField(f"{path}.price_per_hour", None, "is required")
    check_range(f"{path}.price_per_hour", number(entry["price_per_hour"], f"{path}.price_per_hour"), *OFFERED_PRICE)
    return read(_Availability, {name: entry[name] for name in _OFFER_KEYS if name in entry}, path)


def _cluster(entries: list[Any] | tuple[Any, ...], value: Mapping[Any, Any]) -> ClusterSnapshot:
    """One node of each offer, as the cluster file's reader sees it; what it refuses is told of the offer."""
    nodes = [{name: item for name, item in entry.items() if name not in _OFFER_KEYS} for entry in entries]
    try:
        return parse_cluster({"nodes": nodes, **{name: value[name] for name in ("devices", "links") if name in value}})
    except InvalidField as error:
        field = f"offers{error.field.removeprefix('nodes')}" if error.field.startswith("nodes") else error.field
        raise InvalidField(field, error.value, error.problem.replace("two nodes", "two offers")) from error


def _check(offer: Offer, cluster: ClusterSnapshot, path: str) -> None:
    """What the cluster's reader leaves to others, or does not ask of nodes that are there already."""
    try:
        device_type(offer.node.device, cluster.overrides)
        if offer.available > 1:
            dataclasses.replace(offer.node, id=f"{offer.name}-{offer.available - 1}")
    except InvalidField as error:
        raise InvalidField(f"{path}.{error.field}", error.value, error.problem) from error
