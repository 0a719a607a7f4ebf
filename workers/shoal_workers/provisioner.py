"""Gets nodes for a cluster and gives them back, as the control plane wishes: tells it how pools stand, and has whoever
makes nodes here (Ray's autoscaler, KubeRay) obey. Decides nothing, and holds nothing that is not told again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import structlog

log = structlog.get_logger()

_AGAIN_S = 2.0
_MOST_WORDS = 2000  # as the control plane takes them


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
    is said while there may be (`said`). `unreached`: why nobody hears anything now; all else is of before."""

    starting: int = 0
    problem: str | None = None
    said: str | None = None
    unreached: str | None = None


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
    """`entries` are those of the POOLS file, read for each turn; `members` says which nodes of some pools there are,
    and raises PoolsUnreachable."""

    def __init__(
        self,
        entries: Callable[[], Sequence[Mapping[str, Any]]],
        maker: NodeMaker,
        members: Callable[[Collection[str]], Sequence[Member]],
    ) -> None:
        self._entries = entries
        self._maker = maker
        self._members = members
        self._lock = threading.Lock()
        self._orders: Mapping[str, PoolOrder] | None = None
        self._supplies: tuple[tuple[Mapping[str, Any], Supply], ...] | None = None
        self._joined: frozenset[str] = frozenset()

    def told(self, orders: Mapping[str, PoolOrder]) -> None:
        """What the control plane wants now; nothing is asked of anybody before it has said so once."""
        with self._lock:
            self._orders = dict(orders)

    def report(self) -> list[dict[str, Any]] | None:
        """For the control plane: each entry with what is known of the pool, and the nodes that it has now; None before
        anybody has looked. A node of a pool that is not told of as such would pass for one that costs no request."""
        with self._lock:
            supplies, joined = self._supplies, self._joined
        if supplies is None:
            return None
        try:
            members = self._members([entry["name"] for entry, _ in supplies])
        except PoolsUnreachable as error:
            log.warning("not known which nodes there are", why=str(error))
            return None
        return [self._told_of(entry, supply, members, joined) for entry, supply in supplies]

    def run(self) -> None:
        """Until the process ends."""
        while True:
            self.turn()
            time.sleep(_AGAIN_S)

    def turn(self) -> None:
        """Obeys, and looks what came of it."""
        entries = {entry["name"]: entry for entry in self._entries()}
        with self._lock:
            orders = self._orders
        supplies: Mapping[str, Supply]
        try:
            members = self._members(entries)
            if orders is not None:
                self._maker.obey({name: order for name, order in orders.items() if name in entries}, members)
            supplies = self._maker.look(list(entries), members)
            joined = frozenset(member.node for member in members)
        except PoolsUnreachable as error:
            log.warning("pools not reached", why=str(error))
            supplies, joined = self._of_before(entries, str(error)), self._joined
        with self._lock:
            self._joined = joined
            self._supplies = tuple((entry, supplies[name]) for name, entry in entries.items())

    def _of_before(self, names: Collection[str], why: str) -> Mapping[str, Supply]:
        """Who does not answer has refused nothing, and what it has made goes on to start."""
        with self._lock:
            known = {entry["name"]: supply for entry, supply in self._supplies or ()}
        return {name: replace(known.get(name, Supply()), unreached=why[:_MOST_WORDS]) for name in names}

    def _told_of(
        self, entry: Mapping[str, Any], supply: Supply, members: Sequence[Member], joined: frozenset[str]
    ) -> dict[str, Any]:
        """`joined` are the nodes that had when this was heard: others have started meanwhile."""
        nodes = sorted(member.node for member in members if member.pool == entry["name"])
        starting = max(0, supply.starting - len(set(nodes) - joined))
        return {"pool": dict(entry), "nodes": nodes, **asdict(replace(supply, starting=starting))}
