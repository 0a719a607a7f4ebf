"""Nodes of all clusters by pool: how many there are, what they do and cost, how often jobs have lost them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal_recovery.journal import NodeLost, NoticeEnded, PlanAdopted
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service.timeline import Event, node_spans

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Nodes of one type and market in one zone. `usd_per_hour` is of all of them, None where a price is not stated.
    `interruptions` in `node_hours` of jobs: nodes that were lost, or went as announced."""

    name: str
    market: str
    zone: str
    num_nodes: int
    num_devices: int
    num_working: int
    num_leaving: int
    prices: tuple[float, ...]
    usd_per_hour: float | None
    interruptions: int
    node_hours: float

    @property
    def per_node_day(self) -> float | None:
        """Interruptions of one node in a day; None where nobody held such nodes for long enough to say."""
        return 24 * self.interruptions / self.node_hours if self.node_hours >= 1 else None


@dataclass(slots=True)
class _Sum:
    nodes: list[Mapping[str, Any]] = field(default_factory=list)
    interruptions: int = 0
    held_s: float = 0.0


_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a job tells of its nodes, by their pool: when one was interrupted, and from when until when it had each."""

    interrupted: tuple[tuple[_Key, float], ...] = ()
    held: tuple[tuple[_Key, float, float], ...] = ()


def pools(nodes: Iterable[Mapping[str, Any]], records: Iterable[Record], since_s: float = 0.0) -> tuple[Pool, ...]:
    """`nodes` as REST lists them; of `records` what was since then. The largest pool first."""
    sums: defaultdict[_Key, _Sum] = defaultdict(_Sum)
    for node in nodes:
        sums[_key(node)].nodes.append(node)
    for record in records:
        for key, at_s in record.interrupted:
            sums[key].interruptions += at_s >= since_s
        for key, from_s, until_s in record.held:
            sums[key].held_s += max(0.0, until_s - max(from_s, since_s))
    found = (_pool(key, each) for key, each in sums.items())
    return tuple(sorted(found, key=lambda pool: (-pool.num_devices, pool.name, pool.market, pool.zone)))


def _key(node: Mapping[str, Any]) -> _Key:
    market = "spot" if node.get("spot") else "on demand"
    return f"{node['devices']} x {node['device']}", market, str(node.get("zone", ""))


def record_of(events: Sequence[Event], end_at_s: float) -> Record:
    """Of a job's history, which is told until `end_at_s`."""
    known: dict[str, _Key] = {}
    interrupted: list[tuple[_Key, float]] = []
    for event in events:
        if event.kind in (PlanAdopted.kind, WorkersStarted.kind):
            for node in event.payload["snapshot"]["nodes"]:
                known[node["id"]] = _key(node)
        elif _is_interruption(event) and event.payload["node"] in known:
            interrupted.append((known[event.payload["node"]], event.at_s))
    spans = ((name, each) for name, every in node_spans(events, end_at_s).items() for each in every if name in known)
    held = tuple((known[name], from_s, until_s) for name, (from_s, until_s, _, _) in spans)
    return Record(interrupted=tuple(interrupted), held=held)


def _is_interruption(event: Event) -> bool:
    if event.kind == NodeLost.kind:
        return not event.payload.get("ranks_alone")
    return event.kind == NoticeEnded.kind and bool(event.payload["outcome"] == "gone")


def _pool(key: _Key, found: _Sum) -> Pool:
    name, market, zone = key
    stated = [float(node.get("price_per_hour") or 0.0) for node in found.nodes]
    return Pool(
        name=name,
        market=market,
        zone=zone,
        num_nodes=len(found.nodes),
        num_devices=sum(int(node["devices"]) for node in found.nodes),
        num_working=sum(bool(node["jobs"]) for node in found.nodes),
        num_leaving=sum(bool(node.get("reclaim_at_s")) for node in found.nodes),
        prices=tuple(sorted({price for price in stated if price > 0})),
        usd_per_hour=sum(stated) if stated and all(price > 0 for price in stated) else None,
        interruptions=found.interruptions,
        node_hours=found.held_s / _HOUR_S,
    )
