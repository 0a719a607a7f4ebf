"""What nodes of each pool have cost along the way, as the clusters stated it with each plan of a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_recovery.journal import PlanAdopted
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service.timeline import Event

MAX_POOLS = 8
_MOST_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceHistory:
    """Of one pool: nodes of one type and market in one zone. `points` are (seconds since the first plan, dollars an
    hour of the cheapest node), one where the price changed; `low`, `high` and `now` are of these."""

    name: str
    market: str
    zone: str
    points: tuple[tuple[float, float], ...]
    low: float
    high: float
    now: float

    def path(self, end_s: float, width: float = 100.0, height: float = 24.0) -> str:
        """Steps of an SVG path, from the first plan to `end_s`; the highest price of the pool is on top."""
        x = [round(width * min(1.0, at_s / end_s), 2) if end_s > 0 else 0.0 for at_s, _ in self.points]
        y = [round(height - (height - 3) * usd / self.high, 2) for _, usd in self.points]
        moves = "".join(f" H{right} V{up}" for right, up in zip(x[1:], y[1:], strict=True))
        return f"M{x[0]} {y[0]}{moves} H{width:g}"


def price_histories(events: Sequence[Event]) -> tuple[PriceHistory, ...]:
    """Pools with a price, the dearest now first; none where no node has ever had one."""
    seen: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    first_s = None
    for event in events:
        if event.kind not in (PlanAdopted.kind, WorkersStarted.kind):
            continue
        first_s = event.at_s if first_s is None else first_s
        for key, usd in _cheapest(event).items():
            points = seen.setdefault(key, [])
            if not points or points[-1][1] != usd:
                points.append((max(0.0, event.at_s - first_s), usd))
    found = [_history(key, points[-_MOST_POINTS:]) for key, points in seen.items()]
    return tuple(sorted(found, key=lambda pool: (-pool.now, pool.name, pool.zone))[:MAX_POOLS])


def _cheapest(event: Event) -> dict[tuple[str, str, str], float]:
    found: dict[tuple[str, str, str], float] = {}
    for node in event.payload["snapshot"]["nodes"]:
        usd = float(node.get("price_per_hour") or 0.0)
        if usd > 0:
            market = "spot" if node.get("spot") else "on demand"
            key = f"{node['devices']} x {node['device']}", market, str(node.get("zone") or "")
            found[key] = min(usd, found.get(key, usd))
    return found


def _history(key: tuple[str, str, str], points: list[tuple[float, float]]) -> PriceHistory:
    prices = [usd for _, usd in points]
    name, market, zone = key
    return PriceHistory(
        name=name, market=market, zone=zone, points=tuple(points), low=min(prices), high=max(prices), now=prices[-1]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSource:
    """Who states what `num_nodes` nodes of one type and market cost, and since when that holds for the oldest."""

    name: str
    market: str
    num_nodes: int
    usd_per_hour: float
    by: str
    since_s: float


BY_CLUSTER = "their cluster: a label of the node, or its cluster file"


def price_sources(events: Sequence[Event], pools: Mapping[str, str]) -> tuple[PriceSource, ...]:
    """Of the nodes of the newest plan that have a price, the dearest first. `pools`: by node, whose price it has."""
    plans = [event for event in events if event.kind in (PlanAdopted.kind, WorkersStarted.kind)]
    since_s: dict[tuple[str, float], float] = {}
    for event in plans:
        for node in event.payload["snapshot"]["nodes"]:
            since_s.setdefault((node["id"], float(node.get("price_per_hour") or 0.0)), event.at_s)
    found: dict[tuple[str, str, float, str], list[float]] = {}
    for node in plans[-1].payload["snapshot"]["nodes"] if plans else ():
        usd = float(node.get("price_per_hour") or 0.0)
        if usd > 0:
            market = "spot" if node.get("spot") else "on demand"
            key = f"{node['devices']} x {node['device']}", market, usd, pools.get(node["id"], BY_CLUSTER)
            found.setdefault(key, []).append(since_s[node["id"], usd])
    made = (
        PriceSource(name=name, market=market, num_nodes=len(ages), usd_per_hour=usd, by=by, since_s=min(ages))
        for (name, market, usd, by), ages in found.items()
    )
    return tuple(sorted(made, key=lambda each: (-each.usd_per_hour, each.name, each.by)))[:MAX_POOLS]
