"""Pipelines before they have devices: sequences of options, priced many at a time.

Owns which sequences are looked at and the arithmetic of their layers; the figures come from `options`. A sequence is a
row of option numbers, -1 beyond its last stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shoal_planner.options import FIRST, LAST, MIDDLE, ONLY, Figures, Floats, Ints, Option

Sequence = tuple[int, ...]  # of option numbers, from the first stage to the last

MAX_DEPTH = 48  # deeper pipelines are mostly bubble
_HALVINGS, _MORE_HALVINGS = 8, 8
_PAIR_COUNTS, _FEW_PAIR_COUNTS, _MORE_PAIR_COUNTS = (1, 3), (1,), (2, 4, 8, 16)
_MANY_OPTIONS = 20  # with more of them, pairs come in fewer numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """By row: seconds of the slowest stage and of one micro-batch through all stages, inf where the model does not fit;
    the layers of each stage."""

    period_s: Floats
    fill_s: Floats
    layers: Ints


def first_sequences(options: tuple[Option, ...], num_layers: int, *, more: bool = False) -> Iterator[Sequence]:
    """Equal stages in every number; two options of different kinds of node in a few numbers, or in `more`."""
    most = [most_units(option, num_layers) for option in options]
    for index, count in enumerate(most):
        for length in range(1, count + 1):
            yield (index,) * length
    counts: tuple[int, ...] = _PAIR_COUNTS if len(options) <= _MANY_OPTIONS else _FEW_PAIR_COUNTS
    if more:
        counts = _MORE_PAIR_COUNTS
    for one, other in itertools.permutations(range(len(options)), 2):
        if options[one].kind.number != options[other].kind.number:
            for here, there in itertools.product(counts, repeat=2):
                if here <= most[one] and there <= most[other] and here + there <= num_layers:
                    yield (one,) * here + (other,) * there


def whole_sequences(options: tuple[Option, ...], rank: Floats, num_layers: int) -> Iterator[Sequence]:
    """All devices in one pipeline, kinds of node in the order of `rank`, with every degree of tensor parallelism or the
    next smaller one that there is; none that is too deep."""
    for tp in sorted({option.tp for option in options}):
        chosen: dict[int, int] = {}
        for index, option in enumerate(options):
            best = chosen.get(option.kind.number)
            if option.tp <= tp and (best is None or options[best].tp < option.tp):
                chosen[option.kind.number] = index
        order = sorted(chosen.values(), key=lambda index: (float(rank[index]), index))
        units = [(index, len(options[index].kind.nodes) * options[index].per_node) for index in order]
        if sum(count for _, count in units) <= min(MAX_DEPTH, num_layers):
            yield tuple(itertools.chain.from_iterable((index,) * count for index, count in units))


def all_sequences(options: tuple[Option, ...], num_layers: int, most: int) -> list[Sequence] | None:
    """Every sequence that the devices allow; none if there are more than `most`."""
    stock: dict[int, int] = {option.kind.number: option.kind.devices for option in options}
    found: list[Sequence] = []
    level: list[tuple[Sequence, dict[int, int]]] = [((), stock)]
    for _ in range(min(MAX_DEPTH, num_layers)):
        longer = []
        for sequence, left in level:
            for index, option in enumerate(options):
                number = option.kind.number
                if left[number] >= option.tp:
                    longer.append(((*sequence, index), {**left, number: left[number] - option.tp}))
            if len(found) + len(longer) > most:
                return None
        found.extend(sequence for sequence, _ in longer)
        level = longer
    return found


def neighbours(sequence: Sequence, options: tuple[Option, ...], num_layers: int) -> Iterator[Sequence]:
    """Sequences that differ in one block of equal stages: longer, shorter, another tp, elsewhere, gone, or new."""
    depth = min(MAX_DEPTH, num_layers)
    return (found[:depth] for found in _neighbours(sequence, options))


def _neighbours(sequence: Sequence, options: tuple[Option, ...]) -> Iterator[Sequence]:
    blocks = [(index, len(list(run))) for index, run in itertools.groupby(sequence)]
    ends = list(itertools.accumulate((count for _, count in blocks), initial=0))
    for at, (index, count) in enumerate(blocks):
        before, after = sequence[: ends[at]], sequence[ends[at + 1] :]
        for other in sorted({count - 2, count - 1, count + 1, count + 2, 2 * count, count // 2} - {count}):
            if other > 0:
                yield before + (index,) * other + after
        if len(blocks) > 1:
            rest, block = before + after, (index,) * count
            yield rest
            for place in range(len(blocks)):
                if place != at:
                    cut = ends[place] if place < at else ends[place + 1] - count
                    yield rest[:cut] + block + rest[cut:]
        here = options[index]
        for twin, option in enumerate(options):
            if option.kind.number == here.kind.number and option.tp != here.tp:
                for units in sorted({max(1, count * here.tp // option.tp), count}):
                    yield before + (twin,) * units + after
    if len(blocks) > 1:
        for up, down in ((2, 1), (3, 2), (1, 2)):
            yield tuple(itertools.chain.from_iterable((index,) * max(1, n * up // down) for index, n in blocks))
    present = {options[index].kind.number for index, _ in blocks}
    for new, option in enumerate(options):
        if option.kind.number not in present:
            for cut in ends:
                for count in (1, 2):
                    yield sequence[:cut] + (new,) * count + sequence[cut:]


def most_units(option: Option, num_layers: int) -> int:
    return min(MAX_DEPTH, num_layers, len(option.kind.nodes) * option.per_node)


def as_table(sequences: list[Sequence]) -> Ints:
    """[N, P], -1 beyond the last stage."""
    table = np.full((len(sequences), max(map(len, sequences))), -1, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence)] = sequence
    return table


def places(table: Ints) -> Ints:
    """By row and stage, its place in the pipeline (`options.MIDDLE` ...)."""
    there = table >= 0
    depth = there.sum(axis=1)
    found = np.full(table.shape, MIDDLE, dtype=np.int64)
    found[:, 0] = FIRST
    rows = np.arange(len(table))
    found[rows, depth - 1] = LAST
    found[depth == 1, 0] = ONLY
    return found


def hops_s(table: Ints, figures: Figures) -> Floats:
    """[2, N, P]: what each stage spends on exchange with the next, exposed and hidden: within a node as long as units
    of one kind fit there."""
    per_node, kind, num_options = figures.per_node, figures.kind, figures.hop_s.shape[2]
    here, there = table[:, :-1], table[:, 1:]
    # By stage, as each one's place on its node follows from that of the one before it.
    inside = np.ascontiguousarray((kind[here] == kind[there]).T)
    most = np.ascontiguousarray(per_node[here].T)
    used = np.ones(len(table), dtype=np.int64)
    for alike, units in zip(inside, most, strict=True):
        alike &= used < units
        used *= alike
        used += 1
    found = np.zeros((2, *table.shape))
    seconds = np.where(inside.T, figures.near_s[:, here], figures.hop_s[:, here, there % num_options])
    found[:, :, :-1] = np.where(there >= 0, seconds, 0.0)
    return found


def fastest_s(block_s: Floats, fixed_s: Floats, there: NDArray[np.bool_], num_layers: int) -> Floats:
    """By row, the least that the slowest stage takes, with layers in fractions and without memory in the way."""
    rate = np.where(there, 1 / block_s, 0.0)
    even: Floats = (num_layers + (fixed_s * rate).sum(axis=1)) / rate.sum(axis=1)
    found: Floats = np.maximum(even, np.where(there, fixed_s, 0.0).max(axis=1))
    return found


def price(table: Ints, figures: Figures, num_layers: int) -> Prices:
    """The layers that make the slowest stage fastest, under memory; what does not fit without is computed again."""
    there = table >= 0
    place = places(table)
    in_flight = np.where(there, there.sum(axis=1)[:, None] - np.arange(table.shape[1]), 0)
    room = figures.capacity[table] - figures.empty_bytes[place, table] - in_flight * figures.flight_bytes[place, table]
    state = figures.block_bytes[table]
    plain = state + in_flight * figures.kept_bytes[table]
    cap = np.floor(room / plain)
    cap = np.where(there, np.clip(np.minimum(cap, figures.host_blocks[table]), -1, num_layers), 0)
    ladder = figures.again
    tight_room = room - figures.again_bytes[place, table]
    tight_cap = cap
    if figures.recompute:
        tight_cap = np.floor(tight_room / (plain - in_flight * ladder.full_bytes[table]))
    tight_cap = np.minimum(tight_cap, figures.host_blocks[table])
    tight_cap = np.where(there, np.maximum(np.clip(tight_cap, -1, num_layers), cap), 0)
    least = np.where(there & (place == MIDDLE), 1, 0)
    fits = (np.where(there, tight_cap, least) >= least).all(axis=1) & (tight_cap.sum(axis=1) >= num_layers)
    rows = np.flatnonzero(fits)
    period, fill = np.full(len(table), np.inf), np.full(len(table), np.inf)
    layers = np.zeros(table.shape, dtype=np.int64)
    if len(rows):
        kept = table[rows]
        exposed_s, hidden_s = hops_s(kept, figures)
        fixed = np.where(there[rows], figures.end_s[place[rows], kept] + exposed_s, 0.0)
        curve = _Curve.of(
            block_s=figures.block_s[kept],
            fixed_s=fixed,
            cap=cap[rows],
            first_s=ladder.first_s[kept],
            more_s=ladder.more_s[kept],
            plain=plain[rows],
            first=np.maximum((in_flight * ladder.first_bytes[table])[rows], 1e-30),
            more=np.maximum((in_flight * ladder.more_bytes[table])[rows], 1e-30),
            room=tight_room[rows],
            tight_cap=tight_cap[rows],
            least=least[rows],
        )
        solved_s, filled_s, layers[rows] = curve.solve(num_layers, there[rows])
        fill[rows] = filled_s + hidden_s.sum(axis=1)
        if hidden_s.any():
            # Nothing hides more than it computes, and there is one micro-batch more in flight only when one is back.
            solved_s = np.maximum(solved_s, (exposed_s + hidden_s).max(axis=1))
            solved_s = np.maximum(solved_s, fill[rows] / there[rows].sum(axis=1))
        period[rows] = solved_s
    return Prices(period_s=period, fill_s=fill, layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A stage's seconds by its number of layers, [N, P]: `block_s` each up to `cap`; beyond, up to `tight_cap`, as many
    are computed again, for `first_s` each, as the bytes missing in `room` need: each layer takes `plain` of them and
    gives back `first`. Once all layers are, they give back `more` for `more_s`, at more seconds per byte: so the curve
    is the higher one of two lines, with layers in fractions."""

    block_s: Floats
    fixed_s: Floats
    cap: Floats
    first_s: Floats
    more_s: Floats
    plain: Floats
    first: Floats
    more: Floats
    room: Floats
    tight_cap: Floats
    least: Ints
    # Of these lines: (seconds + offset) / slope layers. Whole layers computed again are up to one more than fractions.
    first_offset_s: Floats
    first_slope_s: Floats
    more_offset_s: Floats
    more_slope_s: Floats
    tight: bool  # whether any stage may compute again

    @classmethod
    def of(cls, least: Ints, **figures: Floats) -> _Curve:
        """With its lines."""
        block_s, first_s, plain, room = (figures[name] for name in ("block_s", "first_s", "plain", "room"))
        first, more = first_s / figures["first"], figures["more_s"] / figures["more"]
        return cls(
            **figures,
            least=least,
            tight=bool((figures["tight_cap"] > figures["cap"]).any()),
            first_offset_s=first * room - first_s,
            first_slope_s=block_s + first * plain,
            more_offset_s=more * room - figures["more_s"],
            more_slope_s=block_s + first_s + more * (plain - figures["first"]),
        )

    def limits(self, bound_s: Floats) -> Floats:
        """The most layers within the time; 0 beyond the last stage. In place, for most of a search is spent here."""
        free = bound_s[:, None] - self.fixed_s
        found = free / self.block_s
        found *= 1 + 1e-12
        np.minimum(np.floor(found, out=found), self.cap, out=found)
        if not self.tight:
            return found
        tight = free + self.first_offset_s
        tight /= self.first_slope_s
        free += self.more_offset_s
        free /= self.more_slope_s
        np.minimum(tight, free, out=tight)
        tight *= 1 + 1e-12
        np.minimum(np.floor(tight, out=tight), self.tight_cap, out=tight)
        np.copyto(found, tight, where=tight > self.cap)
        return found

    def seconds(self, layers: Floats) -> Floats:
        beyond = layers > self.cap
        missing = layers * self.plain - self.room
        again_s = self.first_s * np.minimum(np.ceil(missing / self.first - 1e-9), layers)
        more = np.maximum(missing - layers * self.first, 0.0)
        again_s += self.more_s * np.ceil(more / self.more - 1e-9)
        found: Floats = self.fixed_s + self.block_s * layers + np.where(beyond, again_s, 0.0)
        return found

    def solve(self, num_layers: int, there: NDArray[np.bool_]) -> tuple[Floats, Floats, Ints]:
        low = fastest_s(self.block_s, self.fixed_s, there, num_layers)
        # Less than one layer of each stage is lost to whole numbers, unless memory binds.
        high = low + there.sum(axis=1) / np.where(there, 1 / self.block_s, 0.0).sum(axis=1) * (1 + 1e-9)
        tight = np.flatnonzero(~self._enough(high, num_layers))
        if len(tight):
            low[tight] = high[tight]
            high[tight] = self.seconds(np.where(there, self.tight_cap, 0))[tight].max(axis=1)
            rest = self._rows(tight)
            low[tight], high[tight] = rest._halve(low[tight], high[tight], _MORE_HALVINGS, num_layers)
        low, high = self._halve(low, high, _HALVINGS, num_layers)
        limits = self.limits(high)
        more = np.minimum(limits + 1, self.tight_cap)
        limits = np.where(self.seconds(more) <= high[:, None] * (1 + 1e-12), more, limits)
        layers = np.where(there, np.maximum(limits, self.least), 0)
        layers = self._without_excess(layers, num_layers)
        seconds = np.where(there, self.seconds(layers), 0.0)
        return seconds.max(axis=1), seconds.sum(axis=1), layers.astype(np.int64)

    def _halve(self, low: Floats, high: Floats, times: int, num_layers: int) -> tuple[Floats, Floats]:
        for _ in range(times):
            middle = (low + high) / 2
            enough = self._enough(middle, num_layers)
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        return low, high

    def _enough(self, bound_s: Floats, num_layers: int) -> NDArray[np.bool_]:
        limits = self.limits(bound_s)
        limits[limits < self.least] = -np.inf
        found: NDArray[np.bool_] = limits.sum(axis=1) >= num_layers
        return found

    def _rows(self, rows: Ints) -> _Curve:
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        return _Curve(**{name: figure if name == "tight" else figure[rows] for name, figure in figures.items()})

    def _without_excess(self, layers: Floats, num_layers: int) -> Floats:
        """Takes what is too much from the slowest stages first."""
        excess = layers.sum(axis=1) - num_layers
        order = np.argsort(-self.block_s, axis=1, kind="stable")
        rows = np.flatnonzero(excess)
        for rank in range(layers.shape[1]):
            if not len(rows):
                break
            stage = order[rows, rank]
            taken = np.minimum(excess[rows], np.maximum(layers[rows, stage] - self.least[rows, stage], 0))
            layers[rows, stage] -= taken
            excess[rows] -= taken
            rows = rows[excess[rows] != 0]
        return layers
