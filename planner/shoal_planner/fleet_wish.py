"""Which nodes a job wishes for on a running cluster: those that are there for it, and more of its pools. The choice is
`rent`'s; this puts the market together that it chooses from, and keeps to what the job may spend and use."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.market import Market, Offer
from shoal_planner.profile import Profile
from shoal_planner.rent import Rented, RentResult, describe, rent
from shoal_planner.rented_pools import RentedPool

# Whoever cannot pay a node for so long does not rent it: it would hardly have joined.
LEAST_HOURS = 0.25
_HERE = "here-"
_FREE = 1e-6  # dollars an hour of a node without a price, as the solver divides by prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """`available` nodes of a pool at `price_per_hour`, of which the job has `held`."""

    pool: RentedPool
    available: int
    price_per_hour: float
    held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWish:
    """By pool, how many nodes of it the fleet has in all; none: nothing is to be rented, for `reason`."""

    counts: Mapping[str, int]
    reason: str


def hourly_budget(job: JobSpec, spent_usd: float, left_h: float | None) -> float:
    """What it may spend in an hour now: nothing where its money, or its time, is about to run out."""
    most = job.limits.max_price_per_hour or 0.0
    if left_h is not None and left_h < LEAST_HOURS:
        return 0.0
    if job.limits.budget_usd is not None:
        most = min(most, max(0.0, job.limits.budget_usd - spent_usd) / LEAST_HOURS)
    return most


def wish_for(
    job: JobSpec,
    stocks: Collection[Stock],
    here: ClusterSnapshot,
    *,
    budget_per_hour: float,
    done_steps: int = 0,
    profile: Profile | None = None,
    time_limit_s: float = 10.0,
) -> FleetWish:
    """`here` are the nodes of no pool that the job may use beside these, with what else is known of the cluster. They
    count to its budget by their prices."""
    nodes = {f"{_HERE}{index}": group for index, group in enumerate(_alike(here.nodes))}
    offers = [dataclasses.replace(_priced(each), available=_at_most(job, each)) for each in stocks]
    offers += [_standing(name, group) for name, group in nodes.items()]
    held = {each.pool.name: each.held for each in stocks} | {name: len(group) for name, group in nodes.items()}
    market = Market(offers=tuple(offers), overrides=here.overrides, links=here.links)
    try:
        found = rent(
            job,
            market,
            max(budget_per_hour, 1e-9),
            previous=held,
            done_steps=min(done_steps, job.train.steps - 1),
            profile=profile,
            time_limit_s=time_limit_s,
        )
    except (InvalidField, NoPlanFits) as error:
        return FleetWish(counts={}, reason=str(error))
    fleet = _small_enough(job, found, market)
    if fleet is None:
        return FleetWish(counts={}, reason=f"no fleet that was found has {job.limits.max_devices} devices at most")
    counts = {entry.offer: entry.count for entry in fleet if entry.offer not in nodes}
    return FleetWish(counts=counts, reason=found.reason if fleet == found.fleet else describe(fleet))


def _priced(stock: Stock) -> Offer:
    node = dataclasses.replace(stock.pool.node, price_per_hour=max(stock.price_per_hour, _FREE))
    return Offer(name=stock.pool.name, node=node, available=stock.available)


def _at_most(job: JobSpec, stock: Stock) -> int:
    most = job.limits.max_devices
    return stock.available if most is None else min(stock.available, most // stock.pool.node.devices)


def _alike(nodes: Collection[Node]) -> list[list[Node]]:
    groups: dict[Node, list[Node]] = {}
    for node in nodes:
        groups.setdefault(dataclasses.replace(node, id="n", reclaim_at_s=None), []).append(node)
    return list(groups.values())


def _standing(name: str, group: list[Node]) -> Offer:
    node = dataclasses.replace(group[0], id=f"{name}-0", price_per_hour=max(group[0].price_per_hour, _FREE))
    return Offer(name=name, node=node, available=len(group))


def _small_enough(job: JobSpec, found: RentResult, market: Market) -> tuple[Rented, ...] | None:
    for fleet in (found.fleet, *(fleet for fleet, _ in found.alternatives)):
        devices = sum(entry.count * market.offer(entry.offer).node.devices for entry in fleet)
        if job.limits.max_devices is None or devices <= job.limits.max_devices:
            return fleet
    return None
