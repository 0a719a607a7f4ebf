"""The integer programme behind renting, held to brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal_planner.errors import InvalidField
from shoal_planner.knapsack import USD, Sharing, Template, compose

SOME_PRICES = (0.53, 0.55, 0.83, 0.9, 1.75, 2.99)


def brute_force(
    templates: list[Template], budget: float, available: list[int], sharing: Sharing
) -> tuple[float, int] | None:
    """Every composition there is; (tokens per second, -price) of the best."""
    best: tuple[float, int] | None = None
    mosts = [
        min(have // use for have, use in zip(available, template.uses, strict=True) if use) for template in templates
    ]
    for counts in itertools.product(*(range(most + 1) for most in mosts)):
        price = sum(count * template.price for count, template in zip(counts, templates, strict=True))
        uses = [
            sum(count * template.uses[kind] for count, template in zip(counts, templates, strict=True))
            for kind in range(len(available))
        ]
        if not any(counts) or price > round(budget * USD) or any(map(int.__gt__, uses, available)):
            continue
        speeds = [template.tokens_per_s for count, template in zip(counts, templates, strict=True) if count]
        if sharing == "equal":
            value = min(speeds) * sum(counts)
        else:
            value = sum(count * template.tokens_per_s for count, template in zip(counts, templates, strict=True))
        if best is None or (value, -price) > best:
            best = (value, -price)
    return best


def random_instance(draw: random.Random) -> tuple[list[Template], float, list[int]]:
    kinds = draw.randint(1, 4)
    templates = []
    for _ in range(draw.randint(1, 3)):
        uses = [draw.choice((0, 0, 1, 1, 2, 3)) for _ in range(kinds)]
        uses[draw.randrange(kinds)] |= 1
        templates.append(
            Template(
                uses=tuple(uses),
                price_per_hour=draw.choice((*SOME_PRICES, draw.uniform(0.1, 3))),
                tokens_per_s=draw.choice((1.0, 2.0, 3.0, draw.uniform(0.5, 5))),
            )
        )
    return templates, draw.choice((1.0, 2.0, 5.0, draw.uniform(0.1, 12))), [draw.randint(0, 4) for _ in range(kinds)]


@pytest.mark.parametrize("sharing", ["equal", "proportional"])
def test_equal_to_brute_force_on_random_instances(sharing: Sharing) -> None:
    draw, bought = random.Random(20), 0
    for _ in range(3000):
        templates, budget, available = random_instance(draw)
        expected = brute_force(templates, budget, available, sharing)
        found = compose(templates, budget, available, sharing=sharing)
        if expected is None:
            assert found is None
            continue
        assert found is not None and found.exact
        assert found.tokens_per_s == pytest.approx(expected[0], rel=1e-9)
        assert found.price_per_hour <= budget + 1e-9
        assert all(map(int.__le__, found.uses(templates), available))
        bought += 1
    assert bought > 1000


def test_of_equal_speed_the_cheapest() -> None:
    dear, cheap = (
        Template(uses=uses, price_per_hour=price, tokens_per_s=10) for uses, price in (((1, 0), 2), ((0, 1), 1.5))
    )
    for sharing in ("equal", "proportional"):
        found = compose([dear, cheap], 3.6, [1, 1], sharing=sharing)  # type: ignore[arg-type]
        assert found is not None and (found.counts, found.price_per_hour) == ((1, 1), 3.5)
        found = compose([dear, cheap], 2.1, [1, 1], sharing=sharing)  # type: ignore[arg-type]
        assert found is not None and (found.counts, found.price_per_hour) == ((0, 1), 1.5)


def test_equal_parts_leave_the_slow_out_and_proportional_ones_do_not() -> None:
    fast = Template(uses=(1, 0), price_per_hour=1, tokens_per_s=10)
    slow = Template(uses=(0, 1), price_per_hour=1, tokens_per_s=1)
    equal = compose([fast, slow], 10, [2, 8], sharing="equal")
    proportional = compose([fast, slow], 10, [2, 8], sharing="proportional")
    assert equal is not None and (equal.counts, equal.tokens_per_s) == ((2, 0), 20)
    assert proportional is not None and (proportional.counts, proportional.tokens_per_s) == ((2, 8), 28)


def test_cents_add_up_exactly() -> None:
    dime = Template(uses=(1,), price_per_hour=0.1, tokens_per_s=1)
    found = compose([dime], 0.3, [10], sharing="proportional")
    assert found is not None and found.counts == (3,)


def test_a_search_that_is_cut_says_so() -> None:
    draw = random.Random(3)
    templates = [
        Template(
            uses=tuple(draw.randint(0, 1) | (kind == index % 6) for kind in range(6)),
            price_per_hour=draw.uniform(1, 2),
            tokens_per_s=draw.uniform(1, 2),
        )
        for index in range(20)
    ]
    found = compose(templates, 60, [20] * 6, sharing="proportional", most_nodes=100)
    assert found is not None and not found.exact and found.price_per_hour <= 60


def test_nothing_to_be_had() -> None:
    template = Template(uses=(1,), price_per_hour=1, tokens_per_s=1)
    assert compose([template], 0.5, [4], sharing="equal") is None
    assert compose([template], 5, [0], sharing="proportional") is None
    assert compose([], 5, [1], sharing="equal") is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"uses": (0, 0)}, "uses"), ({"uses": (1, -1)}, "uses"), ({"tokens_per_s": 0.0}, "tokens_per_s")],
)
def test_templates_that_are_none(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        Template(**{"uses": (1, 0), "price_per_hour": 1.0, "tokens_per_s": 1.0, **fields})  # type: ignore[arg-type]
    assert caught.value.field == field
