"""Templates: the smallest fleets of one or two kinds of nodes that can train a job, with what they train.

Owns which small fleets are asked about. A fleet that can be parted into two that fit each by itself is no template: the
parts are, and the composition puts them together again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal_planner.appraise import Appraiser, Counts
from shoal_planner.catalogue import device_type
from shoal_planner.knapsack import Template
from shoal_planner.pool_history import HOUR_S

# A fleet of one kind that needs more nodes than this to hold the model is no template of small parts.
MOST_TEMPLATE_NODES = 64
# Small fleets of two kinds that are asked about, the best value for money first.
MOST_MIXED = 24
# What an interruption costs a template besides the recovery: about half a step of a large fleet.
PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What the templates say: `power` is tokens per second that a node of each offer adds, by experience or estimate;
    `smallest` how many nodes of it can train the job, None if no number that can be had."""

    templates: tuple[Template, ...]
    power: tuple[float, ...]
    smallest: tuple[int | None, ...]


def find_templates(appraiser: Appraiser, most: Counts) -> Offered:
    """`most` is how many nodes of each offer can be had and paid for at all."""
    # The best value for money first: on a market of many offers not all can be asked about.
    kinds = sorted(range(len(most)), key=lambda kind: (-_peak(appraiser, kind) / _price_of(appraiser, kind), kind))
    asked = {kind: _smallest(appraiser, kind, most) for kind in kinds}
    smallest = tuple(asked[kind] for kind in range(len(most)))
    fleets = [_single(len(most), kind, count) for kind, count in enumerate(smallest) if count is not None]
    fleets += [
        _single(len(most), kind, count + 1)
        for kind, count in enumerate(smallest)
        if count is not None and 1 < count < most[kind]
    ]
    power = _power(appraiser, fleets, most)
    mixed = sorted(
        _mixed(smallest, most),
        key=lambda counts: (_price(appraiser, counts) / sum(c * p for c, p in zip(counts, power, strict=True)), counts),
    )
    fleets += mixed[:MOST_MIXED]
    templates = [_template(appraiser, counts) for counts in dict.fromkeys(fleets)]
    return Offered(
        templates=tuple(template for template in templates if template is not None), power=power, smallest=smallest
    )


def cheapest_single(appraiser: Appraiser, most: Counts) -> Counts | None:
    """The smallest fleet of one kind that fits the job, of all kinds the one that costs least."""
    sizes = ((kind, _smallest(appraiser, kind, most)) for kind in range(len(most)))
    fleets = [_single(len(most), kind, count) for kind, count in sizes if count is not None]
    ordered = sorted(fleets, key=lambda counts: (_price(appraiser, counts), counts))
    return next((counts for counts in ordered if appraiser.appraise(counts) is not None), None)


def _single(kinds: int, kind: int, count: int) -> Counts:
    return tuple(count if other == kind else 0 for other in range(kinds))


def _price_of(appraiser: Appraiser, kind: int) -> float:
    return appraiser.market.offers[kind].price_per_hour


def _price(appraiser: Appraiser, counts: Counts) -> float:
    return sum(offer.price_per_hour * count for offer, count in zip(appraiser.market.offers, counts, strict=True))


def _smallest(appraiser: Appraiser, kind: int, most: Counts) -> int | None:
    """By doubling and halving: more nodes of a kind hold no less."""
    limit = min(most[kind], MOST_TEMPLATE_NODES)
    if limit < 1:
        return None
    below, count = 0, 1
    while appraiser.part(_single(len(most), kind, count)) is None:
        if count == limit:
            return None
        below, count = count, min(2 * count, limit)
    while count - below > 1:
        middle = (below + count) // 2
        if appraiser.part(_single(len(most), kind, middle)) is None:
            below = middle
        else:
            count = middle
    return count


def _mixed(smallest: tuple[int | None, ...], most: Counts) -> Iterator[Counts]:
    """About as many of each of two kinds as together hold what the smallest fleet of each holds."""
    for one, other in itertools.combinations(range(len(most)), 2):
        need_one = smallest[one] or 2 * most[one]
        need_other = smallest[other] or 2 * most[other]
        if not (most[one] and most[other]) or need_one == 1 or need_other == 1:
            continue
        for count in sorted({1, need_one // 2, need_one - 1}):
            rest = max(1, math.ceil(need_other * (1 - count / need_one)))
            if 1 <= count <= most[one] and rest <= most[other]:
                counts = [0] * len(most)
                counts[one], counts[other] = count, rest
                yield tuple(counts)


def _power(appraiser: Appraiser, fleets: list[Counts], most: Counts) -> tuple[float, ...]:
    """Tokens per second of a node: measured by its template, else by peak rates against those that have one."""
    peaks = [_peak(appraiser, kind) for kind in range(len(most))]
    found: dict[int, float] = {}
    for counts in fleets:
        template = _template(appraiser, counts)
        if template is not None:
            kind = next(index for index, count in enumerate(counts) if count)
            found[kind] = max(found.get(kind, 0.0), template.tokens_per_s / counts[kind])
    shares = sorted(power / peaks[kind] for kind, power in found.items())
    share = shares[len(shares) // 2] if shares else 1.0
    return tuple(found.get(kind, share * peaks[kind]) for kind in range(len(most)))


def _peak(appraiser: Appraiser, kind: int) -> float:
    node = appraiser.market.offers[kind].node
    device = device_type(node.device, appraiser.market.overrides)
    return node.devices * device.flops_per_s(appraiser.job.train.precision) * device.efficiency


def _template(appraiser: Appraiser, counts: Counts) -> Template | None:
    """With what interruptions of its own nodes leave of what it trains."""
    found = appraiser.part(counts)
    if found is None or found.prediction is None:
        return None
    offers = appraiser.market.offers
    rates = [appraiser.rates[offer.name] for offer in offers]
    per_h = sum(rate.interruptions_per_h(count) for rate, count in zip(rates, counts, strict=True) if count)
    share = math.exp(-per_h / HOUR_S * (appraiser.figures.fixed_s + PAUSE_S))
    return Template(
        uses=counts,
        price_per_hour=_price(appraiser, counts),
        tokens_per_s=max(1e-9, found.prediction.tokens_per_s * share),
    )
