"""Which pool each node of a cluster fails with, and how often nodes are lost there.

A pool is what fails together: nodes of one device type in one zone, bought in one way. Owns which source of a rate goes
before which, and what a running cluster has seen itself; not what a rate is (`preemption`) nor what losses cost
(`goodput`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.pool_history import event_history, observe
from shoal_planner.preemption import ON_DEMAND, PreemptionRate, estimates, known_rate, unknown_rate

# Losses in a pool so soon after the first of them are one shock: nodes are not taken all in the same instant.
SHOCK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNode:
    """The pool that a node fails with, and the losses there."""

    pool: str
    rate: PreemptionRate


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRate:
    """As answers tell it: how many nodes of the cluster are in the pool, how often one of them is lost in an hour, how
    sure that is (a standard deviation), and where it comes from."""

    pool: str
    num_nodes: int
    per_node_h: float
    deviation_per_h: float
    source: str


Pools = Mapping[str, PoolNode]  # by node id


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """At this moment a node had come to a running cluster (`there`), or was found to be lost."""

    at_s: float
    node: Node
    there: bool


def pool_name(node: Node) -> str:
    return f"{node.device} in {node.zone}" + ("" if node.spot else ", on demand")


def node_pools(snapshot: ClusterSnapshot, seen: Pools | None = None) -> dict[str, PoolNode]:
    """For each node what was `seen` of it, else what the cluster file states, else what holds for such nodes
    everywhere."""
    return pools_of(snapshot.nodes, seen)


def pools_of(nodes: Iterable[Node], seen: Pools | None = None) -> dict[str, PoolNode]:
    """As `node_pools`."""
    found: dict[str, PoolNode] = {}
    made: dict[object, PoolNode] = {}
    for node in nodes:
        if seen and node.id in seen:
            found[node.id] = seen[node.id]
            continue
        key = (pool_name(node), node.preemptions_per_hour)
        if key not in made:
            made[key] = _pool(node)
        found[node.id] = made[key]
    return found


def _pool(node: Node) -> PoolNode:
    stated = node.preemptions_per_hour
    if stated is None or not node.spot:
        return PoolNode(pool=pool_name(node), rate=unknown_rate() if node.spot else ON_DEMAND)
    # Nodes of which different rates are stated do not fail alike, so not together either.
    return PoolNode(pool=f"{pool_name(node)}, {stated:g} an hour", rate=known_rate(stated))


def rates_known(snapshot: ClusterSnapshot, seen: Pools | None = None) -> bool:
    """Whether anybody knows more of a node of this cluster than what holds for such nodes everywhere."""
    there = {node.id for node in snapshot.nodes}
    stated = any(node.spot and node.preemptions_per_hour is not None for node in snapshot.nodes)
    return stated or any(node_id in there for node_id in seen or ())


def interruptions_per_h(nodes: Iterable[PoolNode]) -> float:
    """Moments at which at least one of these nodes is lost."""
    rates: dict[str, PreemptionRate] = {}
    counts: Counter[str] = Counter()
    for node in nodes:
        rates[node.pool] = node.rate
        counts[node.pool] += 1
    return sum(rates[pool].interruptions_per_h(count) for pool, count in counts.items())


def pool_rates(pools: Pools) -> tuple[PoolRate, ...]:
    """In the order of their names."""
    counts = Counter(node.pool for node in pools.values())
    rates = {node.pool: node.rate for node in pools.values()}
    return tuple(
        PoolRate(
            pool=pool,
            num_nodes=counts[pool],
            per_node_h=rates[pool].per_node_h,
            deviation_per_h=rates[pool].deviation_per_h,
            source=rates[pool].reason,
        )
        for pool in sorted(counts)
    )


def seen_pools(sightings: Sequence[Sighting], until_s: float) -> dict[str, PoolNode]:
    """What a cluster knows of all spot nodes that were ever there, from the losses among them up to a moment; nothing
    as long as there was none. `sightings` in the order of time."""
    pools = {seen.node.id: pool_name(seen.node) for seen in sightings if seen.node.spot}
    rows = _rows(sightings, pools)
    if not any(op == "remove" for found in rows.values() for _, op, _ in found):
        return {}
    histories = (event_history(pool, sorted(found, key=_moment), end_s=until_s) for pool, found in rows.items())
    _, rates = estimates([observe(history) for history in histories])
    return {node_id: PoolNode(pool=pool, rate=rates[pool]) for node_id, pool in sorted(pools.items())}


_Row = tuple[float, str, str]


def _moment(row: _Row) -> float:
    return row[0]


def _rows(sightings: Sequence[Sighting], pools: Mapping[str, str]) -> dict[str, list[_Row]]:
    """By pool, what its history consists of; what is lost in one shock is lost at the moment of its first loss."""
    rows: defaultdict[str, list[_Row]] = defaultdict(list)
    came: dict[str, float] = {}
    shock_s: dict[str, float] = {}
    for seen in sightings:
        node_id = seen.node.id
        if node_id not in pools or seen.there == (node_id in came):
            continue
        pool, at_s = pools[node_id], seen.at_s
        if seen.there:
            came[node_id] = at_s
        else:
            first_s = shock_s.get(pool, at_s)
            at_s = first_s if came.pop(node_id) < first_s >= at_s - SHOCK_S else at_s
            shock_s[pool] = at_s
        rows[pool].append((at_s, "add" if seen.there else "remove", node_id))
    return dict(sorted(rows.items()))
