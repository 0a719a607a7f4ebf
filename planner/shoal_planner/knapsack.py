"""How many of each template to rent: an exact integer programme under a budget and what is available.

Pure arithmetic: a template is a set of nodes of some kinds that is rented as a whole, with its price and what it
trains in a second. Owns the two ways in which templates add up; not where templates come from (`rent`).

Templates that take equal parts of a batch wait for the slowest: the whole is worth threshold x number, so for each
threshold those that are slower are left out and the number of the others is maximised (PAPERS 6.3). Templates that take
parts in proportion to their speed are worth their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal_planner.errors import InvalidField
from shoal_planner.ranges import check_range

# Prices are compared as whole numbers of this much, so that 0.1 + 0.2 is 0.3.
USD = 10**9
# Nodes of the search tree after which one knapsack answers with the best so far: real markets need hundreds.
MOST_NODES = 20_000
Sharing = Literal["equal", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """`uses` is how many nodes of each kind it takes, in the order of the kinds."""

    uses: tuple[int, ...]
    price_per_hour: float
    tokens_per_s: float

    def __post_init__(self) -> None:
        check_range("price_per_hour", self.price_per_hour, 0, 1e9)
        check_range("tokens_per_s", self.tokens_per_s, 1e-12, 1e18)
        if not any(self.uses) or min(self.uses) < 0:
            raise InvalidField("uses", list(self.uses), "must be counts, and one of them more than zero")

    @property
    def price(self) -> int:
        return round(self.price_per_hour * USD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """`counts` in the order of the templates. `exact`: no other composition is better."""

    counts: tuple[int, ...]
    tokens_per_s: float
    price_per_hour: float
    exact: bool

    def uses(self, templates: Sequence[Template]) -> tuple[int, ...]:
        """Nodes of each kind."""
        return tuple(
            sum(count * use for count, use in zip(self.counts, column, strict=True))
            for column in zip(*(template.uses for template in templates), strict=True)
        )


def compose(
    templates: Sequence[Template],
    budget_per_hour: float,
    available: Sequence[int],
    *,
    sharing: Sharing,
    most_nodes: int = MOST_NODES,
) -> Composition | None:
    """The composition that trains most; of equals the cheapest. None if no template can be had at all."""
    budget = round(budget_per_hour * USD)
    if sharing == "proportional":
        ladder = [(1.0, [template.tokens_per_s for template in templates])]
    else:
        thresholds = sorted({template.tokens_per_s for template in templates}, reverse=True)
        ladder = [(limit, [float(template.tokens_per_s >= limit) for template in templates]) for limit in thresholds]
    best: Composition | None = None
    exact = True
    for scale, values in ladder:
        search = _Search(templates, values, _least(best, scale), most_nodes)
        search.go(0, budget, list(available), 0.0, 0)
        exact = exact and not search.cut
        if search.found and _better(search.value * scale, search.price, best):
            best = Composition(
                counts=tuple(search.found),
                tokens_per_s=search.value * scale,
                price_per_hour=search.price / USD,
                exact=True,
            )
    return None if best is None else dataclasses.replace(best, exact=exact)


def _least(best: Composition | None, scale: float) -> float:
    """What a knapsack must reach to be worth anything; a little less, as this is a quotient."""
    return 0.0 if best is None else best.tokens_per_s / scale * (1 - 1e-9)


def _better(tokens_per_s: float, price: int, best: Composition | None) -> bool:
    if best is None:
        return True
    return (tokens_per_s, -price) > (best.tokens_per_s, -round(best.price_per_hour * USD))


class _Search:
    """Depth first, the best value for money first and as many of it as possible, so that the first leaf is good. A
    branch ends where even fractions of templates, limited by the budget and by each kind alone, are no better."""

    def __init__(self, templates: Sequence[Template], values: Sequence[float], least: float, most_nodes: int) -> None:
        kept = _undominated(templates, values)
        self.num_templates = len(templates)
        self.order = sorted(kept, key=lambda index: (-values[index] / max(templates[index].price, 1), index))
        self.price_of = [templates[index].price for index in self.order]
        self.value_of = [values[index] for index in self.order]
        self.uses_of = [
            tuple((kind, use) for kind, use in enumerate(templates[index].uses) if use) for index in self.order
        ]
        self.left = most_nodes
        self.cut = False
        self.counts = [0] * len(self.order)
        self.value, self.price = least, 0
        self.found: list[int] = []

    def go(self, position: int, budget: int, available: list[int], value: float, price: int) -> None:
        if self.left <= 0:
            self.cut = True
            return
        self.left -= 1
        if position == len(self.order):
            self._leaf(value, price)
            return
        most = value + self._bound(position, budget, available)
        if most < self.value or (most <= self.value and self.found and price >= self.price):
            return
        for count in range(self._most(position, budget, available), -1, -1):
            for kind, use in self.uses_of[position]:
                available[kind] -= use * count
            self.counts[position] = count
            spent = self.price_of[position] * count
            self.go(position + 1, budget - spent, available, value + self.value_of[position] * count, price + spent)
            for kind, use in self.uses_of[position]:
                available[kind] += use * count
        self.counts[position] = 0

    def _leaf(self, value: float, price: int) -> None:
        if not any(self.counts):
            return
        if value > self.value or (value == self.value and (not self.found or price < self.price)):
            self.value, self.price = value, price
            self.found = [0] * self.num_templates
            for position, index in enumerate(self.order):
                self.found[index] = self.counts[position]

    def _most(self, position: int, budget: int, available: list[int]) -> int:
        """How many of this template can still be had."""
        most = min(available[kind] // use for kind, use in self.uses_of[position])
        price = self.price_of[position]
        return min(most, budget // price) if price else most

    def _bound(self, position: int, budget: int, available: list[int]) -> float:
        total = 0.0
        for later in range(position, len(self.order)):
            most = min(available[kind] // use for kind, use in self.uses_of[later])
            price = self.price_of[later]
            if price * most > budget:
                return total + self.value_of[later] * budget / price
            total += self.value_of[later] * most
            budget -= price * most
        return total


def _undominated(templates: Sequence[Template], values: Sequence[float]) -> list[int]:
    """Those that are worth something, and for which no other gives as much for no more of anything."""

    def beats(one: int, other: int) -> bool:
        a, b = templates[one], templates[other]
        no_more = a.price <= b.price and all(x <= y for x, y in zip(a.uses, b.uses, strict=True))
        same = a.price == b.price and a.uses == b.uses and values[one] == values[other]
        return no_more and values[one] >= values[other] and (not same or one < other)

    worth = [index for index in range(len(templates)) if values[index] > 0]
    return [index for index in worth if not any(beats(other, index) for other in worth if other != index)]
