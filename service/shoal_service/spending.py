"""What the nodes of a job have cost so far and cost now: their prices times the hours for which the job had them, by
its journal, and what was rented for it for as long as no plan of it knew that: machines that start, wait for others or
are idle.

Rounds nothing: how a cloud rounds hours is its own business. A node that several jobs have counts for each of them in
full. Prices are those that the cluster stated when the node came, and beside plans those of its pool. A price of 0 is
one that nobody stated: what such nodes cost is unknown, not nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal_recovery.journal import PlanAdopted
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service import jobs
from shoal_service.models import JobRow
from shoal_service.timeline import Event, Span, node_spans

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
    others the hours are known, and how many there are now. `beside_plans_usd` is the part of `usd` for what was rented
    and in no plan. `usd_per_million_tokens` is also None before a step is done."""

    usd: float | None
    beside_plans_usd: float
    usd_per_hour: float | None
    usd_per_million_tokens: float | None
    unpriced_node_hours: float
    unpriced_nodes_now: int
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """A machine that was rented for the job, at one price; `node` is None of one that has not joined, `until_at_s` of
    one that is there."""

    id: int
    node: str | None
    device: str
    devices: int
    spot: bool
    price_per_hour: float
    since_at_s: float
    until_at_s: float | None


def spending_of(row: JobRow, history: Sequence[Event], rented: Sequence[Rented]) -> Spending:
    """Of a job as it stands in the database, until now or until it ended."""
    ended = jobs.ended(row)
    end_at_s = row.since_at_s if ended else time.time()
    return spending(history, end_at_s=end_at_s, ended=ended, tokens=jobs.num_tokens(row), rented=rented)


def spending(
    events: Sequence[Event], *, end_at_s: float, ended: bool, tokens: int, rented: Sequence[Rented] = ()
) -> Spending:
    """`events` in order; `end_at_s` is now, or when the job ended; `tokens` are those of the steps that count. A node
    that was not `rented` and that no plan knows costs nothing, and one that the job had when it ended costs nothing any
    more."""
    kinds: dict[str, _Kind] = {}
    for event in events:
        if event.kind in (PlanAdopted.kind, WorkersStarted.kind):
            for node in event.payload["snapshot"]["nodes"]:
                price = float(node.get("price_per_hour", 0.0))
                kinds.setdefault(node["id"], (node["device"], node["devices"], bool(node.get("spot")), price))
    held: dict[_Kind, _Held] = {}
    spans = {node: found for node, found in node_spans(events, end_at_s).items() if node in kinds}
    for node, found in spans.items():
        held_s = sum(max(0.0, until_s - since_s) for since_s, until_s, _, _ in found)
        held.setdefault(kinds[node], _Held()).add(node, held_s, not ended and _is_here(found))
    beside_usd = 0.0
    for each in rented:
        planned = spans.get(each.node or "", ())
        beside_s = sum(until_s - since_s for since_s, until_s in beside_plans(each, planned, end_at_s))
        here = not ended and each.until_at_s is None and not _is_here(planned)
        if beside_s > 0 or here:
            kind = (each.device, each.devices, each.spot, each.price_per_hour)
            held.setdefault(kind, _Held()).add(each.node or f"#{each.id}", beside_s, here)
            beside_usd += each.price_per_hour * beside_s / _HOUR_S
    charges = tuple(_charge(kind, nodes) for kind, nodes in sorted(held.items()))
    usd = _sum([charge.usd for charge in charges])
    rates = [_times(charge.price_per_hour, charge.num_nodes_now) for charge in charges if charge.num_nodes_now]
    unpriced = [charge for charge in charges if charge.usd is None]
    return Spending(
        usd=usd,
        beside_plans_usd=beside_usd,
        usd_per_hour=_sum(rates),
        usd_per_million_tokens=None if usd is None or not tokens else usd / tokens * 1e6,
        unpriced_node_hours=sum(charge.node_hours for charge in unpriced),
        unpriced_nodes_now=sum(charge.num_nodes_now for charge in unpriced),
        charges=charges,
    )


def beside_plans(rented: Rented, planned: Sequence[Span], end_at_s: float) -> Iterator[tuple[float, float]]:
    """When it was rented, until this moment, and no plan knew the node: `planned` are its spans, in order."""
    at_s, until_s = rented.since_at_s, min(end_at_s, rented.until_at_s or end_at_s)
    for begin_s, end_s, _, _ in planned:
        if at_s < min(begin_s, until_s):
            yield at_s, min(begin_s, until_s)
        at_s = max(at_s, end_s)
    if at_s < until_s:
        yield at_s, until_s


@dataclass(slots=True)
class _Held:
    """Of one kind: for how long in all, by whom, and who is here."""

    held_s: float = 0.0
    nodes: set[str] = field(default_factory=set)
    here: set[str] = field(default_factory=set)

    def add(self, node: str, held_s: float, here: bool) -> None:
        self.held_s += held_s
        self.nodes.add(node)
        if here:
            self.here.add(node)


def _is_here(spans: Sequence[Span]) -> bool:
    return any(lost is None for _, _, lost, _ in spans)


def _charge(kind: _Kind, held: _Held) -> Charge:
    device, devices, spot, price = kind
    hours = held.held_s / _HOUR_S
    return Charge(
        device=device,
        devices=devices,
        spot=spot,
        price_per_hour=price or None,
        num_nodes=len(held.nodes),
        num_nodes_now=len(held.here),
        node_hours=hours,
        usd=_times(price or None, hours),
    )


def _times(price: float | None, count: float) -> float | None:
    return None if price is None else price * count


def _sum(parts: Sequence[float | None]) -> float | None:
    """Of the known ones; None where there are parts and all of them are unknown."""
    known = [part for part in parts if part is not None]
    return sum(known, 0.0) if known or not parts else None
