"""Which devices may form a pipeline of one replica per stage, and which such pipelines fit beside each other.

Owns the enumeration. A `Crew` is the units of a pipeline in no order, on nodes told apart by kind alone; `lines` are
its orders. How many samples a crew runs in some time comes in as numbers (`crew_bounds`).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_planner.options import Ints
from shoal_planner.shapes import Cell, Chain, Rooms, Slot, Slots, placed

Places = tuple[tuple[int, tuple[int, ...]], ...]  # for each pipeline the number of its slots, and the node in each


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Units by slot; `slots` are the nodes that they stand on."""

    slots: Slots
    cells: tuple[Cell, ...]

    def kind(self, cell: Cell) -> int:
        return self.slots[cell.slot].kind

    def ends(self) -> list[tuple[Cell, Cell]]:
        """All pairs of a first and a last unit."""
        if len(self.cells) == 1:
            return [(self.cells[0], self.cells[0])]
        return sorted(set(itertools.permutations(self.cells, 2)))

    def between(self, first: Cell, last: Cell) -> list[Cell]:
        """The units that are not at the ends."""
        left = list(self.cells)
        left.remove(first)
        if left:
            left.remove(last)
        return left


class Ends(NamedTuple):
    """The first and the last unit of a crew's pipelines, and the most samples that they run."""

    first: Cell
    last: Cell
    most: int


def crews(rooms: Rooms, degrees: tuple[int, ...], most_units: int) -> tuple[Crew, ...]:
    """All of up to so many units."""
    found = (_crew(filled) for filled in _filled(rooms, sorted(rooms), degrees, most_units) if filled)
    return tuple(sorted(found, key=lambda crew: (crew.slots, crew.cells)))


def _filled(
    rooms: Rooms, kinds: list[int], degrees: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, tuple[int, ...]], ...]]:
    """By slot its kind and the degrees of its units."""
    if not kinds:
        yield ()
        return
    kind, *others = kinds
    splits = [split for split in _splits(rooms[kind].devices, degrees[::-1]) if split]
    for count in range(len(rooms[kind].nodes) + 1):
        for some in itertools.combinations_with_replacement(splits, count):
            left = most - sum(map(len, some))
            if left >= 0:
                for rest in _filled(rooms, others, degrees, left):
                    yield (*((kind, split) for split in some), *rest)


def _splits(devices: int, degrees: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Falling degrees that take up to so many devices."""
    yield ()
    for place, degree in enumerate(degrees):
        if degree <= devices:
            for rest in _splits(devices - degree, degrees[place:]):
                yield (degree, *rest)


def _crew(filled: tuple[tuple[int, tuple[int, ...]], ...]) -> Crew:
    ordered = sorted((Slot(kind, sum(split)), split) for kind, split in filled)
    cells = tuple(Cell(number, tp) for number, (_, split) in enumerate(ordered) for tp in split)
    return Crew(slots=tuple(slot for slot, _ in ordered), cells=cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Pipelines of one crew: by pipeline and stage, which of the `cells` it is [E, S]."""

    slots: Slots
    cells: tuple[Cell, ...]
    orders: Ints

    def __len__(self) -> int:
        return len(self.orders)

    def chain(self, number: int) -> Chain:
        return Chain(slots=self.slots, stages=tuple((self.cells[at],) for at in self.orders[number]))


def lines(crew: Crew, ends: set[tuple[Cell, Cell]], most: int) -> Lines:
    """The crew's pipelines with these first and last units, up to exchange of equal nodes, the first of them."""
    counts = Counter(crew.cells)
    cells = tuple(sorted(counts))
    found, left = [np.zeros((0, len(crew.cells)), dtype=np.int64)], most
    for first, last in sorted(ends) if most > 0 else ():
        at_ends = [cells.index(first), cells.index(last)][: len(crew.cells)]
        middle = _orders(tuple(counts[cell] - at_ends.count(at) for at, cell in enumerate(cells)))
        fixed = np.broadcast_to(np.array(at_ends), (len(middle), len(at_ends)))
        some = np.concatenate([fixed[:, :1], middle, fixed[:, 1:]], axis=1)
        found.append(some[_told_apart(crew, np.array([cell.slot for cell in cells])[some])][:left])
        left -= len(found[-1])
    return Lines(slots=crew.slots, cells=cells, orders=np.concatenate(found))


def _told_apart(crew: Crew, slots: Ints) -> NDArray[np.bool_]:
    """Whether of equal nodes the first comes up first, in orders by slot [E, S]."""
    splits = [tuple(cell.tp for cell in crew.cells if cell.slot == slot) for slot in range(len(crew.slots))]
    nodes = list(zip(crew.slots, splits, strict=True))
    found = np.ones(len(slots), dtype=np.bool_)
    for slot in range(1, len(nodes)):
        if nodes[slot] == nodes[slot - 1]:
            found &= (slots == slot - 1).argmax(axis=1) < (slots == slot).argmax(axis=1)
    return found


@functools.lru_cache(maxsize=256)
def _orders(counts: tuple[int, ...]) -> Ints:
    """[K, sum]: each order of so many of each number once."""
    if not any(counts):
        return np.zeros((1, 0), dtype=np.int64)
    found = []
    for number, count in enumerate(counts):
        if count:
            rest = _orders((*counts[:number], count - 1, *counts[number + 1 :]))
            found.append(np.concatenate([np.full((len(rest), 1), number), rest], axis=1))
    return np.concatenate(found)


class Parts:
    """Which parts of the devices fit beside each other; a part is devices by node, and has the number of its slots."""

    def __init__(self, rooms: Rooms, slots: list[Slots]) -> None:
        self._rooms, self._slots = rooms, slots
        self._free = {place: room.devices for room in rooms.values() for place in room.nodes}
        kinds = {place: kind for kind, room in rooms.items() for place in room.nodes}
        self._strides, size = {}, 1
        for place, devices in self._free.items():
            self._strides[place] = size
            size *= devices + 1
        every = np.arange(size)
        digits = np.stack([every // self._strides[place] % (n + 1) for place, n in self._free.items()], axis=1)
        numbers = {some: number for number, some in enumerate(slots)}
        self._number = np.full(size, -1)
        for index, some in enumerate(digits.tolist()):
            part = sorted(Slot(kinds[place], n) for place, n in zip(self._free, some, strict=True) if n)
            self._number[index] = numbers.get(tuple(part), -1)
        self._inner: list[Ints] = []  # of all parts, those in it that are slots
        for index in range(size):
            inner = np.flatnonzero((digits <= digits[index]).all(axis=1))
            self._inner.append(inner[self._number[inner] >= 0])

    def _most(self, worth: Ints) -> Ints:
        """By part, the most samples of any pipelines on it."""
        found = np.zeros(len(self._inner), dtype=np.int64)
        own = worth[self._number]
        for index, inner in enumerate(self._inner):
            if len(inner):
                found[index] = (own[inner] + found[index - inner]).max()
        return found

    def frames(self, worth: Ints, count: int, batch: int, least_devices: int) -> Iterator[Places]:
        """All sets of so many pipelines that can run the batch and take so many devices. `worth` are samples by number
        of slots, and none after them."""
        most = self._most(worth)

        def framed(frame: Places, start: int, free: dict[int, int], left: int, devices: int) -> Iterator[Places]:
            if len(frame) == count:
                if left <= 0 and devices <= 0:
                    yield frame
                return
            index = sum(free[place] * stride for place, stride in self._strides.items())
            if most[index] < left or sum(free.values()) < max(devices, count - len(frame)):
                return
            for number in range(start, len(self._slots)):
                some = self._slots[number]
                for nodes in placed(some, self._rooms, free, ()) if worth[number] else ():
                    rest = dict(free)
                    for slot, node in zip(some, nodes, strict=True):
                        rest[node] -= slot.devices
                    taken = sum(slot.devices for slot in some)
                    grown = (*frame, (number, nodes))
                    yield from framed(grown, number, rest, left - int(worth[number]), devices - taken)

        return framed((), 0, dict(self._free), batch, least_devices)
