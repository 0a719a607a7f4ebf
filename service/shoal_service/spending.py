"""What the nodes of a job have cost so far and cost now: their prices times the hours for which the job had them, by
its journal.

Rounds nothing: how a cloud rounds hours is its own business. A node that several jobs have counts for each of them in
full, and prices are those that the cluster stated when the node came. A price of 0 is one that nobody stated: what such
nodes cost is unknown, not nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_recovery.journal import PlanAdopted
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service import jobs
from shoal_service.models import JobRow
from shoal_service.timeline import Event, node_spans

_HOUR_S = 3600.0
_Kind = tuple[str, int, bool, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """All nodes of one type, market and price. `num_nodes` were there at some time, for `node_hours` in all, and
    `num_nodes_now` are still there. `price_per_hour` and `usd` are None where no price was stated."""

    device: str
    devices: int
    spot: bool
    price_per_hour: float | None
    num_nodes: int
    num_nodes_now: int
    node_hours: float
    usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The sums are those of the nodes with a price, and None where there are nodes and none of them has one; of the
    others the hours are known, and how many there are now. `usd_per_million_tokens` is also None before a step is done.
    """

    usd: float | None
    usd_per_hour: float | None
    usd_per_million_tokens: float | None
    unpriced_node_hours: float
    unpriced_nodes_now: int
    charges: tuple[Charge, ...]


def spending_of(row: JobRow, history: Sequence[Event]) -> Spending:
    """Of a job as it stands in the database, until now or until it ended."""
    ended = jobs.ended(row)
    end_at_s = row.since_at_s if ended else time.time()
    return spending(history, end_at_s=end_at_s, ended=ended, tokens=jobs.num_tokens(row))


def spending(events: Sequence[Event], *, end_at_s: float, ended: bool, tokens: int) -> Spending:
    """`events` in order; `end_at_s` is now, or when the job ended; `tokens` are those of the steps that count. A node
    that no plan knows costs nothing, and one that the job had when it ended costs nothing any more."""
    kinds: dict[str, _Kind] = {}
    for event in events:
        if event.kind in (PlanAdopted.kind, WorkersStarted.kind):
            for node in event.payload["snapshot"]["nodes"]:
                price = float(node.get("price_per_hour", 0.0))
                kinds.setdefault(node["id"], (node["device"], node["devices"], bool(node.get("spot")), price))
    held: dict[_Kind, list[tuple[float, bool]]] = {}
    for node_id, spans in node_spans(events, end_at_s).items():
        if node_id in kinds:
            held_s = sum(max(0.0, until_s - since_s) for since_s, until_s, _, _ in spans)
            here = not ended and any(lost is None for _, _, lost, _ in spans)
            held.setdefault(kinds[node_id], []).append((held_s, here))
    charges = tuple(_charge(kind, nodes) for kind, nodes in sorted(held.items()))
    usd = _sum([charge.usd for charge in charges])
    rates = [_times(charge.price_per_hour, charge.num_nodes_now) for charge in charges if charge.num_nodes_now]
    unpriced = [charge for charge in charges if charge.usd is None]
    return Spending(
        usd=usd,
        usd_per_hour=_sum(rates),
        usd_per_million_tokens=None if usd is None or not tokens else usd / tokens * 1e6,
        unpriced_node_hours=sum(charge.node_hours for charge in unpriced),
        unpriced_nodes_now=sum(charge.num_nodes_now for charge in unpriced),
        charges=charges,
    )


def _charge(kind: _Kind, nodes: Sequence[tuple[float, bool]]) -> Charge:
    device, devices, spot, price = kind
    hours = sum(held_s for held_s, _ in nodes) / _HOUR_S
    return Charge(
        device=device,
        devices=devices,
        spot=spot,
        price_per_hour=price or None,
        num_nodes=len(nodes),
        num_nodes_now=sum(here for _, here in nodes),
        node_hours=hours,
        usd=_times(price or None, hours),
    )


def _times(price: float | None, count: float) -> float | None:
    return None if price is None else price * count


def _sum(parts: Sequence[float | None]) -> float | None:
    """Of the known ones; None where there are parts and all of them are unknown."""
    known = [part for part in parts if part is not None]
    return sum(known, 0.0) if known or not parts else None
