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


class Simplex:
    """Best sums with fractions of templates that need [J, K] of `stock` [K]. What is best for some values is where the
    next question begins: it stays possible, whatever values are. There are few kinds of stock, so every step is one
    product."""

    def __init__(self, needs: Floats, stock: Floats) -> None:
        num, kinds = needs.shape
        self.needs = needs
        self.worths = np.zeros(kinds)  # of a unit of each stock, once there are values
        self._basis = list(range(num, num + kinds))  # slacks
        self._inverse = np.eye(kinds)
        self._amounts = stock.astype(np.float64).copy()
        self._scale = np.maximum(needs.sum(axis=1), _EPSILON)

    def best(self, values: Floats, enough: float = np.inf) -> float:
        """The best sum of these values, or one that is `enough`."""
        num = len(self.needs)
        for _ in range(_PIVOTS):
            costs = np.array([values[j] if j < num else 0.0 for j in self._basis])
            if float(costs @ self._amounts) >= enough:
                break
            self.worths = costs @ self._inverse
            gain = (values - self.needs @ self.worths) / self._scale
            enter = int(np.argmax(gain))
            slack = int(np.argmin(self.worths))
            if gain[enter] <= _EPSILON * max(1.0, abs(float(costs.max(initial=0.0)))):
                if self.worths[slack] >= -_EPSILON:
                    break
                column, enter = self._inverse[:, slack], num + slack
            else:
                column = self._inverse @ self.needs[enter]
            if not self._enter(enter, column):
                break
        return float(sum(values[j] * amount for j, amount in self._chosen()))

    def _enter(self, enter: int, column: Floats) -> bool:
        positive = column > _EPSILON
        if not positive.any():
            return False
        ratios = np.where(positive, self._amounts / np.where(positive, column, 1.0), np.inf)
        leave = int(np.argmin(ratios))
        step = float(ratios[leave])
        self._amounts = self._amounts - step * column
        self._amounts[leave] = step
        pivot = self._inverse[leave] / column[leave]
        self._inverse = self._inverse - np.outer(column, pivot)
        self._inverse[leave] = pivot
        self._basis[leave] = enter
        return True

    def _chosen(self) -> list[tuple[int, float]]:
        return [
            (j, max(0.0, float(amount)))
            for j, amount in zip(self._basis, self._amounts, strict=True)
            if j < len(self.needs)
        ]

    def fractions(self) -> Floats:
        """Of each template."""
        found = np.zeros(len(self.needs))
        for j, amount in self._chosen():
            found[j] = amount
        return found


def worth(values: Floats, needs: Floats, stock: Floats) -> tuple[float, Floats, Floats]:
    """The best sum of `values` with fractions of templates, the fractions, and what a unit of each stock is worth."""
    simplex = Simplex(needs, stock)
    simplex.best(values)
    fractions = simplex.fractions()
    return float(values @ fractions), fractions, np.maximum(simplex.worths, 0.0)


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
