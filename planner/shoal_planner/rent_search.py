"""Which fleets are worth appraising: what templates compose to, what a single offer gives, and exchanges of nodes.

Owns the order in which fleets are tried. Does not own what they are worth (`appraise`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal_planner.appraise import Appraisal, Appraiser, Counts
from shoal_planner.knapsack import USD, Template, compose
from shoal_planner.market import MAX_RENTED
from shoal_planner.rent_templates import Offered

# Exchanges tried around the best fleet before it counts as the best.
MOST_MOVES = 8
# Fleets for a part of the budget, where the price per token counts and not the last dollar's worth of speed.
BUDGET_PARTS = (1.0, 0.6, 0.35, 0.2)
# Fleets of a single offer that are appraised, the most powerful first; so many of them before any mix.
MOST_SINGLES = 8
FIRST_SINGLES = 3
# Of so many of them, each two are appraised together.
MOST_PAIRED = 3
# A fleet meant to be done in time is chosen with this much more speed than the sum of its templates says.
DEADLINE_MARGIN = 1.15
# How often a template that is cheap alone is tried.
MULTIPLES = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """`most` and `held` are numbers of nodes by offer: what can be had at all, and what is rented already of it."""

    budget_per_hour: float
    most: Counts
    objective: Literal["throughput", "cost"]
    deadline_h: float | None
    survive: bool
    held: Counts

    def loss(self, appraisal: Appraisal) -> float:
        """Seconds or dollars per token: less is better."""
        if self.objective == "cost":
            return appraisal.usd_per_million_tokens
        return 1 / appraisal.tokens_per_s if appraisal.tokens_per_s else math.inf

    def in_time(self, appraisal: Appraisal) -> bool:
        return self.deadline_h is None or appraisal.hours <= self.deadline_h

    def order(self, appraisal: Appraisal) -> tuple[bool, float, float, float]:
        """What sorts the best first; of those that are not done in time, the fastest."""
        late = not self.in_time(appraisal)
        speed = -appraisal.tokens_per_s
        return late, speed if late else self.loss(appraisal), appraisal.price_per_hour, speed


class _Purse:
    """What a fleet costs against what may be spent, in whole billionths of a dollar."""

    def __init__(self, appraiser: Appraiser, wish: Wish) -> None:
        self.prices = tuple(round(offer.price_per_hour * USD) for offer in appraiser.market.offers)
        self.most = wish.most
        self.budget = round(wish.budget_per_hour * USD)

    def left(self, counts: Counts, part: float = 1.0) -> int:
        return int(self.budget * part) - sum(map(_times, self.prices, counts))

    def allows(self, counts: Counts) -> bool:
        within = all(0 <= count <= most for count, most in zip(counts, self.most, strict=True))
        return within and 0 < sum(counts) <= MAX_RENTED and self.left(counts) >= 0

    def filled(self, counts: Counts, power: tuple[float, ...], part: float = 1.0) -> Counts:
        """With more nodes for what is left, the best value for money first."""
        found, left = list(counts), self.left(counts, part)
        for kind in sorted(range(len(found)), key=lambda kind: (-power[kind] / self.prices[kind], kind)):
            more = max(0, min(self.most[kind] - found[kind], left // self.prices[kind]))
            found[kind] += more
            left -= more * self.prices[kind]
        return tuple(found)


def _times(price: int, count: int) -> int:
    return price * count


def propose(appraiser: Appraiser, offered: Offered, wish: Wish) -> list[Counts]:
    """Fleets to appraise, each once, the most promising first; a fleet of every single offer is among them."""
    purse = _Purse(appraiser, wish)
    found = list(_proposals(appraiser, offered, wish, purse))
    return [counts for counts in dict.fromkeys(found) if purse.allows(counts)]


def _proposals(appraiser: Appraiser, offered: Offered, wish: Wish, purse: _Purse) -> Iterator[Counts]:
    none = tuple(0 for _ in wish.most)
    if any(wish.held):
        yield wish.held
        yield purse.filled(wish.held, offered.power)
        yield from _composed(offered, wish, purse, wish.held, 1.0)
    # Plans for equal nodes are found in no time, so whatever is cut short, the best of these is there to compare with.
    kinds = sorted(range(len(none)), key=lambda kind: (-offered.power[kind] * wish.most[kind], kind))
    singles = [tuple(wish.most[kind] if other == kind else 0 for other in range(len(none))) for kind in kinds]
    yield from singles[:FIRST_SINGLES]
    if wish.objective == "cost":
        yield from _cheap(appraiser, offered, wish)
    parts = BUDGET_PARTS if wish.objective == "cost" else (1.0,)
    for part in parts:
        yield from _composed(offered, wish, purse, none, part)
    yield purse.filled(none, offered.power)
    yield from singles[FIRST_SINGLES:MOST_SINGLES]
    if wish.survive:
        yield from _two_halves(offered, purse, kinds)


def _composed(offered: Offered, wish: Wish, purse: _Purse, base: Counts, part: float) -> Iterator[Counts]:
    """The two ways in which templates add up, and each with what the rest of the money buys."""
    left = purse.left(base, part)
    free = [most - count for most, count in zip(wish.most, base, strict=True)]
    if left <= 0 or not offered.templates:
        return
    for sharing in ("proportional", "equal"):
        made = compose(offered.templates, left / USD, free, sharing=sharing)
        if made is not None:
            whole = tuple(map(sum, zip(base, made.uses(offered.templates), strict=True)))
            yield purse.filled(whole, offered.power, part)
            yield whole


def _cheap(appraiser: Appraiser, offered: Offered, wish: Wish) -> Iterator[Counts]:
    """Each template alone, as often as the deadline needs, and some times more often: hardly anything synchronises
    cheaper than a small fleet, but a larger one may need no recomputation."""
    need = 0.0
    if wish.deadline_h is not None:
        need = appraiser.tokens_left / (wish.deadline_h * 3600)

    def price(template: Template) -> float:
        return template.price_per_hour / template.tokens_per_s

    for template in sorted(offered.templates, key=lambda template: (price(template), template.uses)):
        least = {max(1, math.ceil(need * margin / template.tokens_per_s)) for margin in (1.0, DEADLINE_MARGIN)}
        for times in sorted(least | {times for times in MULTIPLES if times > max(least)}):
            yield tuple(use * times for use in template.uses)


def _two_halves(offered: Offered, purse: _Purse, kinds: list[int]) -> Iterator[Counts]:
    """Half of the money for one offer, the rest for others: neither's loss takes all."""
    for kind in kinds[:4]:
        half = purse.budget // 2 // purse.prices[kind]
        counts = tuple(min(half, purse.most[kind]) if other == kind else 0 for other in range(len(purse.most)))
        without = tuple(0.0 if other == kind else power for other, power in enumerate(offered.power))
        yield purse.filled(counts, without)


def improve(appraiser: Appraiser, offered: Offered, wish: Wish) -> None:
    """Exchanges nodes of the best fleet as long as one of the most promising exchanges makes it better; and where nodes
    are rented already, of the best one that keeps them all."""
    purse = _Purse(appraiser, wish)
    for counts in _pairs(appraiser, offered, wish, purse):
        if not appraiser.over(counts):
            appraiser.appraise(counts)
    floors = [tuple(0 for _ in wish.most)]
    if any(wish.held):
        floors.append(wish.held)
    for floor in floors:
        while _improved(appraiser, offered, wish, purse, floor):
            pass


def _pairs(appraiser: Appraiser, offered: Offered, wish: Wish, purse: _Purse) -> list[Counts]:
    """All that can be had of one of the offers that are best alone, and of another one for the rest: few kinds waste
    less than many, which the sum of templates does not see."""
    alone = [appraisal for appraisal in appraiser.appraised() if sum(map(bool, appraisal.counts)) == 1]
    alone.sort(key=lambda appraisal: (*wish.order(appraisal), appraisal.counts))
    kinds = list(dict.fromkeys(max(range(len(wish.most)), key=found.counts.__getitem__) for found in alone))
    found = []
    for first, second in itertools.permutations(kinds[:MOST_PAIRED], 2):
        counts = tuple(most if kind == first else 0 for kind, most in enumerate(wish.most))
        rest = min(wish.most[second], purse.left(counts) // purse.prices[second])
        found.append(tuple(rest if kind == second else count for kind, count in enumerate(counts)))
    found.sort(key=lambda counts: (-sum(map(float.__mul__, offered.power, map(float, counts))), counts))
    return [counts for counts in dict.fromkeys(found) if purse.allows(counts)]


def _improved(appraiser: Appraiser, offered: Offered, wish: Wish, purse: _Purse, floor: Counts) -> bool:
    best = _best(appraiser, offered, wish, floor)
    if best is None:
        return False
    for counts in _moves(best.counts, offered, wish, purse, floor)[:MOST_MOVES]:
        if appraiser.over(counts):
            continue
        found = appraiser.appraise(counts)
        if (
            found is not None
            and _counts(found, appraiser, offered, wish, floor)
            and wish.order(found) < wish.order(best)
        ):
            return True
    return False


def _best(appraiser: Appraiser, offered: Offered, wish: Wish, floor: Counts) -> Appraisal | None:
    found = [each for each in appraiser.appraised() if _counts(each, appraiser, offered, wish, floor)]
    return min(found, key=lambda appraisal: (*wish.order(appraisal), appraisal.counts), default=None)


def _counts(found: Appraisal, appraiser: Appraiser, offered: Offered, wish: Wish, floor: Counts) -> bool:
    """Whether it has all of `floor`, which a fleet that was asked for need not have where its plan leaves nodes out,
    and survives where that is wished."""
    enough = all(map(int.__ge__, found.counts, floor))
    return enough and (not wish.survive or survives(appraiser, offered, found))


def _moves(counts: Counts, offered: Offered, wish: Wish, purse: _Purse, floor: Counts) -> list[Counts]:
    """One node less, or more, or some exchanged for others; those that promise most first."""
    found: dict[Counts, float] = {}

    def consider(moved: Counts) -> None:
        if moved != counts and purse.allows(moved) and all(map(int.__ge__, moved, floor)):
            power = sum(map(float.__mul__, offered.power, map(float, moved)))
            found[moved] = power / (sum(map(_times, purse.prices, moved)) if wish.objective == "cost" else 1)

    consider(purse.filled(counts, offered.power))
    for gone in range(-1, len(counts)):
        for lost in (1, 2) if gone >= 0 else (0,):
            less = tuple(count - lost if kind == gone else count for kind, count in enumerate(counts))
            if min(less) < 0:
                continue
            consider(less)
            for come in range(len(counts)):
                if come != gone:
                    more = min(purse.most[come] - less[come], max(0, purse.left(less)) // purse.prices[come])
                    for count in {1, more}:
                        consider(tuple(had + count if kind == come else had for kind, had in enumerate(less)))
    return sorted(found, key=lambda moved: (-found[moved], moved))


def survives(appraiser: Appraiser, offered: Offered, appraisal: Appraisal) -> bool:
    """Whether it holds a node that is not spot, or without the spot nodes of any one type still holds a template."""
    offers = appraiser.market.offers
    if any(count and not offer.node.spot for count, offer in zip(appraisal.counts, offers, strict=True)):
        return True
    devices = {offer.node.device for count, offer in zip(appraisal.counts, offers, strict=True) if count}
    for device in devices:
        rest = tuple(
            0 if offer.node.device == device else count for count, offer in zip(appraisal.counts, offers, strict=True)
        )
        if not any(all(map(int.__ge__, rest, template.uses)) for template in offered.templates):
            return False
    return True
