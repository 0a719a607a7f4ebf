"""Where the search looks: sets of nodes that reach each other well, whole or cut into slices; and how far it looks in
each of them.

Owns what a round generates and when it is given up. What comes out are sets of pipelines that promise most; `finish`
turns them into plans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal_planner.assembly import assemble, bundle
from shoal_planner.columns import Columns, Template
from shoal_planner.costs import CostModel
from shoal_planner.finish import Unit, Word
from shoal_planner.options import Basis, Kind, options_of
from shoal_planner.packing import pack
from shoal_planner.templates import Sequence

# Templates that a round generates, by the number of devices up to which that holds.
_MOST_TEMPLATES = ((8, 800), (16, 700), (64, 2300), (256, 4000), (1 << 30, 20000))
_FIRST_PART = 3  # of them, a part to learn how many pipelines there will be
# Times, as multiples of what a dive reached, for which devices are packed.
_STRETCHES = (0.98, 0.99, 1.0, 1.01)
_DIVES, _PACKINGS = 3, 3  # sets of pipelines made of each
_PACKED, _ALONE = 8, 4  # and those that are drafted
_NEAR = 1.02  # what cannot come nearer to the best so far is not packed
_SLICES = (1, 2, 4, 8)
# Sets of nodes on ever faster links that are looked at, and how much faster.
_MOST_REACHES, _MUCH_FASTER = 3, 1.5
# Clusters that are also looked at in groups, how large these are, and how many devices they have to cover.
_MANY, _GROUP_SIZES, _NEAR_SIZE, _COVERED = 256, (64, 128), 1.4, 0.95
_FEW_DEVICES = 16  # up to so many, single pipelines are scouted by themselves
_COUNTED = 8  # up to so many devices, every number of pipelines is a round of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Nodes of these kinds, each cut into so many equal slices that hold the same layers in different pipelines; of
    pipelines through one slice so many at most, or as many as turn out best. So many `groups` of such nodes are run
    alike: `kinds` are those of the first one, and the nodes of the others follow in `twins`, by kind."""

    kinds: tuple[Kind, ...]
    slices: int
    most_pipelines: int | None = None
    groups: int = 1
    twins: tuple[tuple[str, ...], ...] = ()

    @property
    def alike(self) -> int:
        """How many pipelines there are of each."""
        return self.slices * self.groups

    def spread(self, words: tuple[Word, ...]) -> tuple[Word, ...]:
        """These, and the same on the nodes of the other groups."""
        place = {node: (k, at) for k, kind in enumerate(self.kinds) for at, node in enumerate(kind.nodes)}

        def twin(unit: Unit, group: int) -> Unit:
            k, at = place[unit.node]
            return unit._replace(node=self.twins[k][(group - 1) * len(self.kinds[k].nodes) + at])

        others = (tuple(twin(unit, group) for unit in word) for group in range(1, self.groups) for word in words)
        return (*words, *others)


def rounds(kinds: tuple[Kind, ...], costs: CostModel, *, counted: bool = True) -> Iterator[Round]:
    """All nodes; then without those on the slowest links, again and again; each with nodes whole and in slices. On few
    devices, with every number of pipelines if they are to be `counted`: there one more or less changes what memory and
    exchange allow."""
    num_devices = sum(kind.devices for kind in kinds)
    if counted and num_devices <= _COUNTED:
        yield from (Round(kinds=kinds, slices=1, most_pipelines=number) for number in range(1, num_devices + 1))
    for chosen in _reachable(kinds, costs):
        widest = max(kind.node.devices for kind in chosen)
        for slices in _SLICES:
            cut = tuple(
                dataclasses.replace(kind, slice=kind.node.devices // slices)
                for kind in chosen
                if kind.node.devices >= slices
            )
            if slices <= widest and cut:
                yield Round(kinds=cut, slices=slices)
    yield from _grouped(kinds)


def _grouped(kinds: tuple[Kind, ...]) -> Iterator[Round]:
    """Many nodes as groups that are alike: a small group is planned better than all at once, and as well for all. Of
    about equal groups, those that leave out the fewest devices."""
    num_devices = sum(kind.devices for kind in kinds)
    if num_devices <= _MANY:
        return
    ways = [_Groups.of(groups, kinds) for groups in range(2, min(len(kind.nodes) for kind in kinds) + 1)]
    for wanted in _GROUP_SIZES:
        near = [way for way in ways if wanted / _NEAR_SIZE < way.devices < wanted * _NEAR_SIZE]
        best = max(near, key=lambda way: (way.groups * way.devices, -abs(way.devices - wanted)), default=None)
        if best is not None and best.groups * best.devices >= _COVERED * num_devices:
            yield best.round(kinds)


class _Groups(NamedTuple):
    """So many groups of nodes, by kind, and how many devices are in each."""

    groups: int
    sizes: tuple[int, ...]
    devices: int

    @classmethod
    def of(cls, groups: int, kinds: tuple[Kind, ...]) -> _Groups:
        sizes = tuple(len(kind.nodes) // groups for kind in kinds)
        return cls(groups, sizes, sum(size * kind.slice for size, kind in zip(sizes, kinds, strict=True)))

    def round(self, kinds: tuple[Kind, ...]) -> Round:
        pairs = list(zip(self.sizes, kinds, strict=True))
        return Round(
            kinds=tuple(dataclasses.replace(kind, nodes=kind.nodes[:size]) for size, kind in pairs),
            slices=1,
            groups=self.groups,
            twins=tuple(kind.nodes[size : size * self.groups] for size, kind in pairs),
        )


class Lead:
    """A round that is followed step by step: `scout`, `explore` and `words`, each dearer than the one before."""

    def __init__(self, this: Round, costs: CostModel, copies: int) -> None:
        self.round = this
        self.costs = costs
        self.copies = copies
        self.options = options_of(this.kinds, costs)
        self.batch = -(-costs.job.train.global_batch // this.alike)
        num_devices = sum(kind.devices for kind in this.kinds)
        self._most = next(count for limit, count in _MOST_TEMPLATES if num_devices * this.slices <= limit)
        # How many pipelines there may be, for a first idea of how far optimizer state is split.
        holders = max(1, min(self.batch, num_devices // 4)) * this.alike
        self._bases: dict[int, Basis] = {}
        self._alone = self._columns(this.alike, self._most, within=this.slices > 1)
        if this.most_pipelines is not None:
            holders = this.most_pipelines
        self._first = self._columns(holders, self._most // _FIRST_PART)
        self._first_s = float("inf")
        self._many = num_devices > _FEW_DEVICES
        # Single pipelines are looked at where nothing is said of their number, or that there is one.
        self._several = (this.most_pipelines or 1) > 1

    def _columns(self, holders: int, most: int, *, within: bool = False) -> Columns:
        this = self.round
        return Columns(
            self.costs,
            this.kinds,
            self.options,
            holders,
            self.batch,
            most,
            most_pipelines=this.most_pipelines,
            within=within,
            copies=self.copies,
            bases=self._bases,
        )

    def scout(self) -> float:
        """About the seconds of a step with the first templates."""
        self._first.start()
        together_s = self._first.least_time_bounded()
        if self._several:
            return together_s
        # On many devices what the others are priced at says enough of single pipelines, too, for a start.
        alone = self._first if self._many else self._alone
        alone.start()
        return min(together_s, float(alone.alone_s().min(initial=np.inf)))

    def explore(self, worse_s: float = float("inf")) -> float:
        """As `scout`, with templates grown from the best ones."""
        self._first_s = self._first.grow(worse_s)
        if self._several:
            return self._first_s
        self._alone.start()
        self._alone.grow_alone(worse_s)
        return min(self._first_s, float(self._alone.alone_s().min(initial=np.inf)))

    def words(self, best_s: float) -> Iterator[tuple[Word, ...]]:
        """Sets of pipelines that promise most, in no order; few where `best_s` seems out of reach."""
        order = np.argsort(self._alone.alone_s(), kind="stable")[:_ALONE]
        found = [[self._alone.templates[row][0]] for row in order]
        if self._first_s < best_s * _NEAR:
            # How far optimizer state is split, and what its exchange takes, follows from the number of pipelines.
            number = self.round.most_pipelines or self._first.num_pipelines(self._first_s)
            together = self._columns(number * self.round.alike, self._most)
            together.add(self._first.templates)
            time_s = together.grow(best_s)
            if time_s < best_s * _NEAR:
                found.extend(_packed(together, time_s))
        for sequences in found:
            words = assemble(sequences, self.options, self.round.kinds)
            if words is not None:
                sliced = itertools.chain.from_iterable(bundle(word, self.round.slices) for word in words)
                yield self.round.spread(tuple(sliced))


def _packed(columns: Columns, least_s: float) -> Iterator[list[Sequence]]:
    """Whole numbers of templates that get the batch done soonest. What they are worth falls short of the fractional
    best, so a longer time is aimed at; dives for several such times also leave more templates to pack."""
    made: list[tuple[float, dict[Template, int]]] = []
    time_s = least_s
    for _ in range(_DIVES):
        value, chosen = columns.dive(time_s)
        made.append((time_s * columns.batch / max(value, 1.0), chosen))
        time_s = max(least_s, (time_s + made[-1][0]) / 2)
    best_s = min(seconds for seconds, _ in made)
    for stretch in _STRETCHES:
        time_s = best_s * stretch
        for packing in pack(columns.values(time_s), columns.needs, columns.stock, wanted=columns.batch)[:_PACKINGS]:
            chosen = {columns.templates[row]: count for row, count in packing.counts}
            made.append((time_s * columns.batch / max(packing.value, 1.0), chosen))
    made.sort(key=lambda entry: entry[0])
    for _, chosen in made[:_PACKED]:
        yield [sequence for (sequence, _), count in sorted(chosen.items()) for _ in range(count)]


def _reachable(kinds: tuple[Kind, ...], costs: CostModel) -> Iterator[tuple[Kind, ...]]:
    """Sets of kinds whose nodes reach each other at some rate at least, all first."""
    rates = sorted({_rate(one, other, costs) for one, other in itertools.combinations_with_replacement(kinds, 2)})
    seen: set[tuple[int, ...]] = set()
    for slower, rate in zip([0.0, *rates], rates, strict=False):
        if len(seen) == _MOST_REACHES or rate < slower * _MUCH_FASTER:
            continue
        left = list(kinds)
        while left:
            slow = [sum(_rate(kind, other, costs) < rate for other in left) for kind in left]
            if not any(slow):
                break
            left.pop(slow.index(max(slow)))
        key = tuple(kind.number for kind in left)
        if left and key not in seen:
            seen.add(key)
            yield tuple(left)


def _rate(one: Kind, other: Kind, costs: CostModel) -> float:
    """Bytes per second between nodes of these kinds; of a single node, of its interfaces."""
    there = next((node for node in other.nodes if node != one.node.id), None)
    return one.node.inter_bytes_per_s if there is None else costs.link(one.node.id, there).bytes_per_s
