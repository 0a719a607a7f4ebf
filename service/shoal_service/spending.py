"""What the nodes of a job have cost so far: their prices times the hours for which the job had them, by its journal.

Rounds nothing: how a cloud rounds hours is its own business. A node that several jobs have counts for each of them in
full, and prices are those that the cluster stated when the node came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_recovery.journal import NodeJoined, NodeLost, PlanAdopted
from shoal_service.timeline import Event, node_spans

KINDS = (PlanAdopted.kind, NodeLost.kind, NodeJoined.kind)
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """All nodes of one type, market and price. `num_nodes` were there at some time, for `node_hours` in all."""

    device: str
    devices: int
    spot: bool
    price_per_hour: float
    num_nodes: int
    node_hours: float
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    usd: float
    charges: tuple[Charge, ...]


def spending(events: Sequence[Event], end_at_s: float) -> Spending:
    """`events` in order; `end_at_s` is now, or when the job ended. A node that no plan knows costs nothing."""
    kinds: dict[str, tuple[str, int, bool, float]] = {}
    for event in events:
        if event.kind == PlanAdopted.kind:
            for node in event.payload["snapshot"]["nodes"]:
                price = float(node.get("price_per_hour", 0.0))
                kinds.setdefault(node["id"], (node["device"], node["devices"], bool(node.get("spot")), price))
    seconds: dict[tuple[str, int, bool, float], list[float]] = {}
    for node_id, spans in node_spans(events, end_at_s).items():
        if node_id in kinds:
            held_s = sum(max(0.0, until_s - since_s) for since_s, until_s, _, _ in spans)
            seconds.setdefault(kinds[node_id], []).append(held_s)
    charges = tuple(_charge(kind, held) for kind, held in sorted(seconds.items()))
    return Spending(usd=sum(charge.usd for charge in charges), charges=charges)


def _charge(kind: tuple[str, int, bool, float], held_s: Sequence[float]) -> Charge:
    device, devices, spot, price_per_hour = kind
    hours = sum(held_s) / _HOUR_S
    return Charge(
        device=device,
        devices=devices,
        spot=spot,
        price_per_hour=price_per_hour,
        num_nodes=len(held_s),
        node_hours=hours,
        usd=hours * price_per_hour,
    )
