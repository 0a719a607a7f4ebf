"""What a job's money panel shows beside its sums: rates by type and market, the curve of what was spent, what was spent
on steps that count, what spot nodes saved, what is still to come. Pure. Nothing unknown is shown as nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_recovery.journal import PlanAdopted
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service.spending import Rented, Spending, beside_plans
from shoal_service.step_sums import EpochSteps
from shoal_service.timeline import Event, node_spans

_HOUR_S = 3600.0
_POINTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What all nodes of one type and market cost in an hour now."""

    name: str
    market: str
    num_nodes: int
    usd_per_hour: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """`usd` less than the same hours on demand; of `hours` of spot nodes with a price nobody knows what they would cost
    on demand."""

    usd: float | None
    on_demand_usd: float
    unknown_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """`wasted_usd` went into anything but steps that count; `to_come_usd` is expected until the last step, at the
    present pace and price. `spent` are (seconds since the job was created, dollars) along the way. `stated_at_s` is
    since when the oldest price is the one that counts."""

    rates: tuple[Rate, ...]
    saved: Saved | None
    wasted_usd: float | None
    to_come_usd: float | None
    spent: tuple[tuple[float, float], ...]
    stated_at_s: float | None


def money(
    events: Sequence[Event],
    found: Spending,
    steps: Sequence[EpochSteps],
    on_demand: Mapping[tuple[str, int], float],
    rented: Sequence[Rented] = (),
    *,
    created_at_s: float,
    end_at_s: float,
    eta_s: float | None,
) -> Money:
    """`on_demand`: dollars an hour of a node with so many such devices where it is not spot."""
    some_unknown = found.unpriced_node_hours > 0
    wasted = None
    if found.usd is not None and not some_unknown:
        wasted = max(0.0, found.usd - _productive_usd(events, steps))
    to_come = None
    if eta_s is not None and found.usd_per_hour is not None and not found.unpriced_nodes_now:
        to_come = eta_s / _HOUR_S * found.usd_per_hour
    return Money(
        rates=_rates(found),
        saved=_saved(found, on_demand),
        wasted_usd=wasted,
        to_come_usd=to_come,
        spent=_curve(events, rented, created_at_s, end_at_s),
        stated_at_s=min(_stated(events).values(), default=None),
    )


def on_demand_prices(nodes: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Of nodes as snapshots have them, and of those that pools would give: the lowest stated price of each kind that is
    not spot."""
    found: dict[tuple[str, int], float] = {}
    for node in nodes:
        price = float(node.get("price_per_hour", 0.0))
        if price > 0 and not node.get("spot"):
            key = (str(node["device"]), int(node["devices"]))
            found[key] = min(price, found.get(key, price))
    return found


def _rates(found: Spending) -> tuple[Rate, ...]:
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for charge in found.charges:
        if charge.num_nodes_now and charge.price_per_hour:
            entry = sums[f"{charge.devices} x {charge.device}", "spot" if charge.spot else "on demand"]
            entry[0] += charge.num_nodes_now
            entry[1] += charge.num_nodes_now * charge.price_per_hour
    most = max((usd for _, usd in sums.values()), default=1.0)
    return tuple(
        Rate(name=name, market=market, num_nodes=int(count), usd_per_hour=usd, share=usd / most)
        for (name, market), (count, usd) in sorted(sums.items(), key=lambda item: -item[1][1])
    )


def _saved(found: Spending, on_demand: Mapping[tuple[str, int], float]) -> Saved | None:
    """None where the job has had no spot node with a price."""
    spot = [charge for charge in found.charges if charge.spot and charge.price_per_hour]
    if not spot:
        return None
    known = [charge for charge in spot if (charge.device, charge.devices) in on_demand]
    dear = sum(on_demand[charge.device, charge.devices] * charge.node_hours for charge in known)
    cheap = sum((charge.price_per_hour or 0.0) * charge.node_hours for charge in known)
    unknown = sum(charge.node_hours for charge in spot if charge not in known)
    return Saved(usd=dear - cheap if known else None, on_demand_usd=dear, unknown_hours=unknown)


def _productive_usd(events: Sequence[Event], steps: Sequence[EpochSteps]) -> float:
    per_hour = {
        event.payload["epoch"]: sum(
            float(node.get("price_per_hour", 0.0)) for node in event.payload["snapshot"]["nodes"]
        )
        for event in events
        if event.kind in (PlanAdopted.kind, WorkersStarted.kind)
    }
    return sum(found.seconds / _HOUR_S * per_hour.get(found.epoch, 0.0) for found in steps if not found.rolled_back)


def _curve(
    events: Sequence[Event], rented: Sequence[Rented], created_at_s: float, end_at_s: float
) -> tuple[tuple[float, float], ...]:
    """What was spent by then, at moments that are evenly apart; nothing where no node has a price."""
    prices = _prices(events)
    of_nodes = {name: found for name, found in node_spans(events, end_at_s).items() if name in prices}
    spans = [
        (since_s, min(until_s, end_at_s), prices[name])
        for name, found in of_nodes.items()
        for since_s, until_s, _, _ in found
        if prices[name]
    ]
    spans += [
        (since_s, until_s, each.price_per_hour)
        for each in rented
        for since_s, until_s in beside_plans(each, of_nodes.get(each.node or "", ()), end_at_s)
    ]
    first_s = min([created_at_s, *(since_s for since_s, _, _ in spans)])
    if not spans or end_at_s <= first_s:
        return ()
    moments = [first_s + index * (end_at_s - first_s) / _POINTS for index in range(_POINTS + 1)]
    return tuple(
        (
            at_s - first_s,
            sum(max(0.0, min(until_s, at_s) - since_s) * price for since_s, until_s, price in spans) / _HOUR_S,
        )
        for at_s in moments
    )


def _nodes(events: Sequence[Event]) -> Iterable[tuple[Event, Mapping[str, Any]]]:
    for event in events:
        if event.kind in (PlanAdopted.kind, WorkersStarted.kind):
            for node in event.payload["snapshot"]["nodes"]:
                yield event, node


def _prices(events: Sequence[Event]) -> dict[str, float]:
    """As spending counts them: by what was stated when the node came."""
    found: dict[str, float] = {}
    for _, node in _nodes(events):
        found.setdefault(node["id"], float(node.get("price_per_hour", 0.0)))
    return found


def _stated(events: Sequence[Event]) -> dict[str, float]:
    found: dict[str, float] = {}
    for event, node in _nodes(events):
        if node.get("price_per_hour"):
            found.setdefault(node["id"], event.at_s)
    return found
