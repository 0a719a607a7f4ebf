"""Gets nodes for a cluster and gives them back, as the control plane wishes: tells it how pools stand, and has whoever
makes nodes here (Ray's autoscaler, KubeRay) obey. Decides nothing, and holds nothing that is not told again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from shoal_planner.rented_pools import parse_pools

log = structlog.get_logger()

_AGAIN_S = 2.0


class PoolsUnreachable(Exception):
    """Whoever makes nodes does not answer now, or refuses; the message is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node of a pool that has joined: its id, which life of it, and the name of its host (of a pod: the pod's)."""

    node: str
    incarnation: str
    pool: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What is heard of a pool: nodes that are made and have not joined, why there will be no more (`problem`), and what
    is said while there may be (`said`)."""

    starting: int = 0
    problem: str | None = None
    said: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOrder:
    """`target` nodes are wanted of a pool, not counting those to `release`."""

    target: int
    release: frozenset[str]


class NodeMaker(Protocol):
    """Both raise PoolsUnreachable."""

    def obey(self, orders: Mapping[str, PoolOrder], members: Sequence[Member]) -> None:
        """To be called again and again with the same; what is done already is done no more."""

    def look(self, pools: Sequence[str], members: Sequence[Member]) -> Mapping[str, Supply]:
        """One for each of these."""


class Provisioner:
    """`entries` are those of the POOLS file; `members` says which nodes are there, and raises PoolsUnreachable. Raises
    InvalidField."""

    def __init__(
        self, entries: Sequence[Mapping[str, Any]], maker: NodeMaker, members: Callable[[], Sequence[Member]]
    ) -> None:
        self._entries = list(entries)
        self._names = [pool.name for pool in parse_pools(self._entries)]
        self._maker = maker
        self._members = members
        self._lock = threading.Lock()
        self._orders: Mapping[str, PoolOrder] | None = None
        self._supplies: Mapping[str, Supply] | None = None

    def told(self, orders: Mapping[str, PoolOrder]) -> None:
        """What the control plane wants now; nothing is asked of anybody before it has said so once."""
        with self._lock:
            self._orders = {name: order for name, order in orders.items() if name in self._names}

    def report(self) -> list[dict[str, Any]] | None:
        """For the control plane: each entry with what is known of the pool, and the nodes that it has now; None before
        anybody has looked. A node of a pool that is not told of as such would pass for one that costs no request."""
        with self._lock:
            supplies = self._supplies
        if supplies is None:
            return None
        try:
            members = self._members()
        except PoolsUnreachable as error:
            log.warning("not known which nodes there are", why=str(error))
            return None
        return [self._told_of(entry, supplies[entry["name"]], members) for entry in self._entries]

    def run(self) -> None:
        """Until the process ends."""
        while True:
            self.turn()
            time.sleep(_AGAIN_S)

    def turn(self) -> None:
        """Obeys, and looks what came of it."""
        with self._lock:
            orders = self._orders
        supplies: Mapping[str, Supply]
        try:
            members = self._members()
            if orders is not None:
                self._maker.obey(orders, members)
            supplies = self._maker.look(self._names, members)
        except PoolsUnreachable as error:
            log.warning("pools not reached", why=str(error))
            supplies = {name: Supply(problem=str(error)) for name in self._names}
        with self._lock:
            self._supplies = supplies

    def _told_of(self, entry: Mapping[str, Any], supply: Supply, members: Sequence[Member]) -> dict[str, Any]:
        nodes = sorted(member.node for member in members if member.pool == entry["name"])
        about = {"starting": supply.starting, "problem": supply.problem, "said": supply.said}
        return {"pool": dict(entry), "nodes": nodes, **about}
