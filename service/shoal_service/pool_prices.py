"""Keeps prices of pools fresh, by their cloud's own account, where the operator wants that (SHOAL_CLOUD_PRICES). One
replica does so for all; what it does not learn for long counts no more, and the POOLS file's price holds again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog

from shoal_planner.rented_pools import RentedPool
from shoal_service import duties, pools
from shoal_service.database import Database
from shoal_service.models_pools import PoolRow
from shoal_service.prices_ec2 import PricesUnknown, region_of, spot_prices
from shoal_service.turns import Turns

log = structlog.get_logger()

_EVERY_S = 300.0
_LOOK_S = 5.0
_DUTY = "pool-prices"
_LEASE_S = 120.0
_SOURCE = "AWS spot price history"

Prices = Mapping[tuple[str, str], float]


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
        for region, mine in _by_region([pools.pool(row) for row in rows]).items():
            try:
                found = await asyncio.to_thread(spot_prices, {str(pool.instance_type) for pool in mine}, region)
            except PricesUnknown as error:
                log.warning("prices not known", why=str(error))
                continue
            await self._keep(rows, found)
        for row in rows:
            self._asked_at_s[row.cluster_id, row.name] = time.monotonic()

    def _is_due(self, row: PoolRow) -> bool:
        pool = pools.pool(row)
        if not pool.node.spot or pool.instance_type is None:
            return False
        asked_at_s = self._asked_at_s.get((row.cluster_id, row.name))
        return asked_at_s is None or time.monotonic() - asked_at_s >= _EVERY_S

    async def _keep(self, rows: Sequence[PoolRow], found: Prices) -> None:
        async with self._database.write() as session:
            for row in rows:
                usd = price_of(pools.pool(row), found)
                kept = await session.get(PoolRow, (row.cluster_id, row.name))
                if usd is not None and kept is not None:
                    kept.price_per_hour, kept.price_source, kept.price_at_s = usd, _SOURCE, time.time()


def price_of(pool: RentedPool, found: Prices) -> float | None:
    """That of its dearest zone: whichever gives the node, it costs no more."""
    prices = [
        usd
        for (kind, zone), usd in found.items()
        if kind == pool.instance_type and (not pool.zones or zone in pool.zones)
    ]
    return max(prices, default=None)


def _by_region(found: Sequence[RentedPool]) -> dict[str | None, list[RentedPool]]:
    regions: dict[str | None, list[RentedPool]] = {}
    for pool in found:
        for region in sorted({region_of(zone) or "" for zone in pool.zones} or {""}):
            regions.setdefault(region or None, []).append(pool)
    return regions
