"""Keeps prices of pools fresh, and whether there are such nodes at all, by their cloud's own account, where the
operator wants that (SHOAL_CLOUD_PRICES). One replica does so for all; a price that it does not learn for long counts no
more, and the POOLS file's holds again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from shoal_planner.rented_pools import RentedPool
from shoal_service import duties, pools
from shoal_service.database import Database
from shoal_service.models_pools import PoolRow
from shoal_service.prices_ec2 import PricesUnknown, offered_in, region_of, spot_prices
from shoal_service.turns import Turns

log = structlog.get_logger()

_EVERY_S = 300.0
_LOOK_S = 5.0
_DUTY = "pool-prices"
_LEASE_S = 120.0
_SOURCE = "AWS spot price history"

Prices = Mapping[tuple[str, str], float]


@dataclass(slots=True)
class _Found:
    """By instance type and zone."""

    prices: dict[tuple[str, str], float] = field(default_factory=dict)
    offers: frozenset[tuple[str, str]] = frozenset()


class PoolPrices:
    """`start` in a running event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._holder = duties.new_holder()
        self._asked_at_s: dict[tuple[str, str], float] = {}
        self._turns = Turns("pool-prices", self.look, _LOOK_S)

    def start(self) -> None:
        self._turns.start()

    async def close(self) -> None:
        await self._turns.close()

    async def look(self) -> None:
        async with self._database.read() as session:
            rows = [row for row in await pools.every(session) if pools.is_fresh(row) and self._is_due(row)]
        if not rows:
            return
        async with self._database.write() as session:
            if not await duties.claim(session, _DUTY, self._holder, _LEASE_S):
                return
        found, asked = await _told([pools.pool(row) for row in rows])
        await self._keep([row for row in rows if _regions(pools.pool(row)) <= asked], found)
        for row in rows:
            self._asked_at_s[row.cluster_id, row.name] = time.monotonic()

    def _is_due(self, row: PoolRow) -> bool:
        if pools.pool(row).instance_type is None:
            return False
        asked_at_s = self._asked_at_s.get((row.cluster_id, row.name))
        return asked_at_s is None or time.monotonic() - asked_at_s >= _EVERY_S

    async def _keep(self, rows: Sequence[PoolRow], found: _Found) -> None:
        async with self._database.write() as session:
            for row in rows:
                pool, kept = pools.pool(row), await session.get(PoolRow, (row.cluster_id, row.name))
                if kept is None:
                    continue
                kept.not_offered = not_offered(pool, found.offers)
                if pool.node.spot and (usd := price_of(pool, found.prices)) is not None:
                    kept.price_per_hour, kept.price_source, kept.price_at_s = usd, _SOURCE, time.time()


async def _told(asked: Sequence[RentedPool]) -> tuple[_Found, set[str | None]]:
    """Of all these pools, and the regions that answered."""
    found, answered = _Found(), set()
    for region in sorted({region for pool in asked for region in _regions(pool)}, key=str):
        kinds = {str(pool.instance_type) for pool in asked if region in _regions(pool)}
        try:
            found.offers |= await asyncio.to_thread(offered_in, kinds, region)
            found.prices |= await asyncio.to_thread(spot_prices, kinds, region)
            answered.add(region)
        except PricesUnknown as error:
            log.warning("prices not known", why=str(error))
    return found, answered


def price_of(pool: RentedPool, found: Prices) -> float | None:
    """That of its dearest zone: whichever gives the node, it costs no more."""
    prices = [
        usd
        for (kind, zone), usd in found.items()
        if kind == pool.instance_type and (not pool.zones or zone in pool.zones)
    ]
    return max(prices, default=None)


def not_offered(pool: RentedPool, offers: Collection[tuple[str, str]]) -> str | None:
    """Why there are none of it at all; None where there may be some."""
    if any(kind == pool.instance_type and (not pool.zones or zone in pool.zones) for kind, zone in offers):
        return None
    return f"AWS has no {pool.instance_type} in {' or '.join(pool.zones) or 'that region'}"


def _regions(pool: RentedPool) -> set[str | None]:
    """None: the default one."""
    return {region_of(zone) for zone in pool.zones} or {None}
