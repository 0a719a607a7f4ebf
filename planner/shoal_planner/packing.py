"""How many pipelines of which template: most samples within a time, on the devices there are.

Owns the integer packing alone: a linear programme says what each device is worth, a beam search rounds. Values and
needs come in as arrays; the same arrays give the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal_planner.options import Floats, Ints

_BEAM = 16
_BRANCHES = 24
_PIVOTS = 200
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """`counts` by template; `value` is what they are worth together."""

    value: float
    counts: tuple[tuple[int, int], ...]


def worth(values: Floats, needs: Floats, stock: Floats) -> tuple[float, Floats, Floats]:
    """The best sum of `values` with fractions of templates, the fractions, and what a unit of each stock is worth.

    `needs` is [J, K], `stock` [K]. Primal simplex; there are few kinds of stock, so every step is one product.
    """
    num, kinds = needs.shape
    basis = list(range(num, num + kinds))  # slacks
    inverse = np.eye(kinds)
    amounts = stock.astype(np.float64).copy()
    worths = np.zeros(kinds)
    scale = np.maximum(needs.sum(axis=1), _EPSILON)
    for _ in range(_PIVOTS):
        costs = np.array([values[j] if j < num else 0.0 for j in basis])
        worths = costs @ inverse
        gain = (values - needs @ worths) / scale
        enter = int(np.argmax(gain))
        slack = int(np.argmin(worths))
        if gain[enter] <= _EPSILON * max(1.0, abs(float(costs.max(initial=0.0)))):
            if worths[slack] >= -_EPSILON:
                break
            column, enter = inverse[:, slack], num + slack
        else:
            column = inverse @ needs[enter]
        positive = column > _EPSILON
        if not positive.any():
            break
        ratios = np.where(positive, amounts / np.where(positive, column, 1.0), np.inf)
        leave = int(np.argmin(ratios))
        step = float(ratios[leave])
        amounts = amounts - step * column
        amounts[leave] = step
        pivot = inverse[leave] / column[leave]
        inverse = inverse - np.outer(column, pivot)
        inverse[leave] = pivot
        basis[leave] = enter
    fractions = np.zeros(num)
    for row, j in enumerate(basis):
        if j < num:
            fractions[j] = max(0.0, float(amounts[row]))
    return float(values @ fractions), fractions, np.maximum(worths, 0.0)


def pack(values: Floats, needs: Floats, stock: Floats, *, wanted: float) -> list[Packing]:
    """Good packings, best first: the whole part of the fractional best, and what the beam finds for the rest. Packings
    worth more than `wanted` are all as good."""
    _, fractions, worths = worth(values, needs, stock)
    found: dict[tuple[tuple[int, int], ...], float] = {}
    for share in (1.0, 0.8):
        base = np.floor(fractions * share + _EPSILON).astype(np.int64)
        found.update({counts: value for value, counts in _beam(values, needs, stock, worths, base)})
        if not base.any():
            break
    ordered = sorted(found.items(), key=lambda item: (-min(item[1], wanted), item[0]))
    return [Packing(value=value, counts=counts) for counts, value in ordered]


def _beam(
    values: Floats, needs: Floats, stock: Floats, worths: Floats, base: Ints
) -> list[tuple[float, tuple[tuple[int, int], ...]]]:
    reduced = (values - needs @ worths) / np.maximum(values, _EPSILON)
    left = stock - base @ needs
    start = {int(j): int(base[j]) for j in np.flatnonzero(base)}
    states = [(float(values @ base), left, start)]
    done: dict[tuple[tuple[int, int], ...], float] = {}
    seen: set[tuple[tuple[int, int], ...]] = set()
    while states:
        fresh: list[tuple[float, float, Floats, dict[int, int]]] = []
        for value, rest, counts in states:
            usable = np.flatnonzero((needs <= rest + _EPSILON).all(axis=1) & (values > 0))
            if not len(usable):
                done[tuple(sorted(counts.items()))] = value
                continue
            best = usable[np.argsort(-reduced[usable], kind="stable")[:_BRANCHES]]
            for j in best:
                grown = {**counts, int(j): counts.get(int(j), 0) + 1}
                key = tuple(sorted(grown.items()))
                if key not in seen:
                    seen.add(key)
                    after = rest - needs[j]
                    total = value + float(values[j])
                    fresh.append((total + float(worths @ after), total, after, grown))
        fresh.sort(key=lambda entry: -entry[0])
        states = [(total, after, grown) for _, total, after, grown in fresh[:_BEAM]]
    return sorted(((value, counts) for counts, value in done.items()), key=lambda item: (-item[0], item[1]))[:_BEAM]
