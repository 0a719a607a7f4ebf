"""What rented nodes have cost: prices times the hours for which each was held, over all changes of fleet and price.

A frozen account: every change makes a new one. Does not own what is rented (`rent`), and rounds nothing: how a cloud
rounds hours is its own business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from shoal_planner.errors import InvalidField
from shoal_planner.market import Market
from shoal_planner.pool_history import HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """So many nodes of an offer, held at one price from one moment to another."""

    offer: str
    count: int
    price_per_hour: float
    from_s: float
    to_s: float

    @property
    def usd(self) -> float:
        return self.count * self.price_per_hour * (self.to_s - self.from_s) / HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """`charges` are over; `held` is what has been rented since `since_s`, as (offer, count, price per hour)."""

    since_s: float
    held: tuple[tuple[str, int, float], ...] = ()
    charges: tuple[Charge, ...] = ()

    def changed(self, at_s: float, counts: Mapping[str, int], market: Market) -> Bill:
        """From this moment on these nodes are rented, at the prices of this market; none at all ends the bill.

        Raises InvalidField if the moment lies before the last change, or the market lacks an offer.
        """
        closed = self.until(at_s)
        held = []
        for name, count in sorted(counts.items()):
            if count < 0:
                raise InvalidField(name, count, "must be zero or more")
            if count:
                held.append((name, count, _price(market, name)))
        return dataclasses.replace(closed, held=tuple(held))

    def until(self, at_s: float) -> Bill:
        """With what is held charged up to this moment. Raises InvalidField if it lies before the last change."""
        if at_s < self.since_s:
            raise InvalidField("at_s", at_s, f"lies before the last change, at {self.since_s:g} s")
        charges = tuple(
            Charge(offer=name, count=count, price_per_hour=price, from_s=self.since_s, to_s=at_s)
            for name, count, price in self.held
            if at_s > self.since_s
        )
        return dataclasses.replace(self, since_s=at_s, charges=(*self.charges, *charges))

    def usd(self, at_s: float) -> float:
        """All that has been spent up to this moment."""
        return sum(charge.usd for charge in self.until(at_s).charges)


def _price(market: Market, name: str) -> float:
    try:
        return market.offer(name).price_per_hour
    except KeyError as error:
        raise InvalidField("offer", name, "is not in the market") from error
