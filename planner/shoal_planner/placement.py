"""On which other nodes copies of a node's state stand: who is sent its snapshots, and who has it live and need not be.
Pure and deterministic.

Here, and not where state is moved, because a plan must know whether the hosts have room for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from shoal_planner.cluster import Node
from shoal_planner.distinct import distinct
from shoal_planner.pools import pool_name, pools_of

# So many times less host memory per copy than elsewhere, and another zone is no reason any more.
_MUCH_SMALLER = 64
# The same of another pool: what a node receives in each step may take the time of a step, so load stays near to even.
_SMALLER = 2
# Rates of losses are estimates: those that differ less than so many times count as one.
_AS_SELDOM = 1.5


@functools.lru_cache(maxsize=256)  # the goodput of every plan asks for the same few
def backups(nodes: tuple[Node, ...], copies: int, *, apart: bool = True) -> Mapping[str, tuple[str, ...]]:
    """For each of `nodes` (those that own state), `copies` others that keep its snapshots too, the first choice first;
    fewer where there are not enough others.

    A zone that has no copy yet goes before one that has, because zones fail as a whole, unless hosts there are far too
    small; then the node with the most host memory for each copy that it would keep; then the next one in the order of
    ids, counted round from the node itself. Parts of the machine that has the state already go last: they fail with it.

    Of nodes that keep as few copies for their host memory, those of a pool that has no copy yet go first, as spot nodes
    of one pool are taken together; then those that are lost least often, by the rates that the cluster file states, or
    else what is known of such nodes everywhere. `apart`: also of nodes that keep up to twice as many as the fewest.
    Without it copies are spread as evenly as zones let them, for where hosts have no room for more.
    """
    ring = _Ring(tuple(sorted(nodes, key=lambda node: node.id)), apart=apart)
    # One copy of every node before the second of any: so the evenness of first choices does not hang on later ones.
    for _ in range(min(copies, len(nodes) - 1)):
        for place in range(len(nodes)):
            ring.choose(place)
    found = {
        node.id: tuple(ring.nodes[other].id for other in chosen)
        for node, chosen in zip(ring.nodes, ring.chosen, strict=True)
    }
    return MappingProxyType(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Other nodes that keep snapshots of some state: `live` ones take them of their own ranks' memory (a mirror), the
    others are `sent` them."""

    live: tuple[str, ...]
    sent: tuple[str, ...]


class Placement:
    """Where the copies of state on these nodes stand, one rule for those who plan and those who send.

    `by_owners`: nodes whose ranks own the same state take the place of backups that would have to be sent it, as long
    as copies stand in as many zones with them, unless their hosts are far smaller; those in other pools first, and then
    those that are lost least often. Without it they count only where they are backups anyway. `apart` as in `backups`.
    """

    def __init__(self, nodes: tuple[Node, ...], copies: int, *, by_owners: bool = True, apart: bool = True) -> None:
        self._backups = backups(nodes, copies, apart=apart)
        self._nodes = {node.id: node for node in nodes}
        self._lost_per_h = _lost_per_h(nodes)
        self._by_owners = by_owners
        self._found: dict[tuple[str, frozenset[str]], Copies] = {}

    def copies(self, home: str, owners: frozenset[str] = frozenset()) -> Copies:
        """Of state that `home` takes snapshots of, and ranks of these other nodes own, too. Raises KeyError for a node
        that is not there."""
        if (home, owners) not in self._found:
            chosen = self._chosen(home, owners)
            self._found[home, owners] = Copies(
                live=tuple(node for node in chosen if node in owners),
                sent=tuple(node for node in chosen if node not in owners),
            )
        return self._found[home, owners]

    def _chosen(self, home: str, owners: frozenset[str]) -> list[str]:
        chosen = list(self._backups[home])
        if not self._by_owners or owners.issuperset(chosen):
            return chosen
        others = owners.difference(chosen, (home,))
        seldom = _AS_SELDOM * min((self._lost_per_h[node] for node in others), default=0.0)

        def last(node: str) -> tuple[bool, bool, bool, str]:
            return self._pool(node) == self._pool(home), self._lost_per_h[node] > seldom, node < home, node

        left = sorted(others, key=last)
        for place, backup in enumerate(chosen):
            suiting = (owner for owner in left if backup not in owners and self._suits(home, chosen, place, owner))
            owner = next(suiting, None)
            if owner is not None:
                chosen[place] = owner
                left.remove(owner)
        return chosen

    def _suits(self, home: str, chosen: list[str], place: int, owner: str) -> bool:
        instead = [*chosen[:place], owner, *chosen[place + 1 :]]
        room = self._nodes[owner].host_memory_bytes * _MUCH_SMALLER >= self._nodes[chosen[place]].host_memory_bytes
        apart = self._machines(home, instead) >= self._machines(home, chosen)
        return room and apart and self._zones(home, instead) >= self._zones(home, chosen)

    def _machines(self, home: str, chosen: list[str]) -> int:
        return len({_machine(self._nodes[node]) for node in (home, *chosen)})

    def _zones(self, home: str, chosen: list[str]) -> int:
        return len({self._nodes[node].zone for node in (home, *chosen)})

    def _pool(self, node: str) -> str:
        return pool_name(self._nodes[node])


def placements(nodes: tuple[Node, ...], copies: int, *, shared: bool) -> Iterator[Placement]:
    """Those to try until hosts have room for one, best first, the last as it is: with owners, which are sent nothing,
    before backups, where nodes have any state in common (`shared`); and apart before merely even. A plan fits where
    there is room for the last one of all."""
    even = backups(nodes, copies, apart=False)
    for by_owners in (True, False) if shared else (True,):
        for apart in (True, False) if backups(nodes, copies, apart=True) != even else (False,):
            yield Placement(nodes, copies, by_owners=by_owners, apart=apart)


def _lost_per_h(nodes: tuple[Node, ...]) -> dict[str, float]:
    """By node id."""
    pools = pools_of(nodes)
    rates = {pool: rate.per_node_h for pool, rate in {found.pool: found.rate for found in pools.values()}.items()}
    return {node_id: rates[found.pool] for node_id, found in pools.items()}


def _machine(node: Node) -> tuple[bool, str]:
    """The same for nodes that fail together; hosts and nodes may have one name."""
    return (False, node.id) if node.host is None else (True, node.host)


class _Ring:
    """Nodes by place in the order of ids: what each has chosen, and how many copies each keeps."""

    def __init__(self, nodes: tuple[Node, ...], *, apart: bool) -> None:
        self.nodes = nodes
        self.chosen: list[list[int]] = [[] for _ in nodes]
        self._load = np.zeros(len(nodes))
        self._host = np.array([float(max(1, node.host_memory_bytes)) for node in nodes])
        numbers = {zone: number for number, zone in enumerate(sorted({node.zone for node in nodes}))}
        self._zone = np.array([numbers[node.zone] for node in nodes], dtype=np.int64)
        self._num_zones = len(numbers)
        machines = {machine: number for number, machine in enumerate(dict.fromkeys(map(_machine, nodes)))}
        self._machine = np.array([machines[_machine(node)] for node in nodes], dtype=np.int64)
        self._num_machines = len(machines)
        pools = {pool: number for number, pool in enumerate(dict.fromkeys(map(pool_name, nodes)))}
        self._pool = np.array([pools[pool_name(node)] for node in nodes], dtype=np.int64)
        lost_per_h = _lost_per_h(nodes)
        self._lost_per_h = np.array([lost_per_h[node.id] for node in nodes])
        self._alike = len(pools) == len(set(lost_per_h.values())) == 1
        self._slack = _SMALLER if apart else 1

    def choose(self, place: int) -> None:
        backup = self._best(place)
        self.chosen[place].append(backup)
        self._load[backup] += 1

    def _best(self, place: int) -> int:
        taken = [place, *self.chosen[place]]
        crowded = (self._load + 1) / self._host
        crowded[taken] = np.inf
        if self._num_machines < len(self.nodes):
            elsewhere = np.where(np.isin(self._machine, self._machine[taken]), np.inf, crowded)
            crowded = elsewhere if elsewhere.min() <= _MUCH_SMALLER * crowded.min() else crowded
        reached = distinct(self._zone[taken])
        if len(reached) < self._num_zones:
            fresh = ~np.isin(self._zone, reached) & (crowded <= _MUCH_SMALLER * crowded.min())
            crowded = np.where(fresh, crowded, np.inf) if fresh.any() else crowded
        if not self._alike:
            near = crowded <= self._slack * crowded.min()
            fresh = near & ~np.isin(self._pool, self._pool[taken])
            near = fresh if fresh.any() else near
            seldom = _AS_SELDOM * self._lost_per_h[near].min()
            crowded = np.where(near & (self._lost_per_h <= seldom), crowded, np.inf)
        least = np.flatnonzero(crowded <= crowded.min())
        after = least[least > place]
        return int(after[0] if len(after) else least[0])
