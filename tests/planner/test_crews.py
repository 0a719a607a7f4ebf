"""Who may run together, in which orders, beside whom, and with which samples: all that trying every way finds, once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from shoal_planner.crew_search import _deals, _few, _picked, _ways
from shoal_planner.crews import Crew, Lines, Parts, Places, crews, lines
from shoal_planner.shapes import Cell, Chain, Room, Rooms, Slot, Slots

Split = tuple[int, ...]
Line = tuple[Cell, ...]
SEEDS = range(20)
MOST = 10_000  # lines of a crew, more than there are


def rooms_of(rng: random.Random, most_devices: int) -> Rooms:
    """Up to three kinds of nodes, of so many devices in all."""
    found: Rooms = {}
    places = itertools.count()
    left = rng.randint(1, most_devices)
    while left and len(found) < 3:
        devices = rng.randint(1, min(left, 3))
        count = rng.randint(1, left // devices)
        found[rng.randint(0, 1) + 2 * len(found)] = Room(devices, tuple(itertools.islice(places, count)))
        left -= devices * count
    return found


def degrees_of(rng: random.Random) -> tuple[int, ...]:
    return rng.choice(((1,), (1, 2), (1, 2, 3), (1, 3)))


# --- crews -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_crews_are_all_that_nodes_can_be_split_into(seed: int) -> None:
    rng = random.Random(f"crews {seed}")
    rooms, degrees, most = rooms_of(rng, 6), degrees_of(rng), rng.randint(1, 6)
    found = crews(rooms, degrees, most)
    split = [Counter((slot.kind, splits(crew)[number]) for number, slot in enumerate(crew.slots)) for crew in found]
    assert len(split) == len(found)
    assert sorted(map(sorted, map(Counter.elements, split))) == sorted(map(list, brute_crews(rooms, degrees, most)))
    for crew in found:
        assert list(crew.slots) == sorted(crew.slots)
        assert [slot.devices for slot in crew.slots] == [sum(some) for some in splits(crew)]
        assert list(crew.cells) == sorted(crew.cells, key=lambda cell: (cell.slot, -cell.tp))


def splits(crew: Crew) -> list[Split]:
    """By slot the degrees of its units, falling."""
    return [tuple(cell.tp for cell in crew.cells if cell.slot == slot) for slot in range(len(crew.slots))]


def brute_crews(rooms: Rooms, degrees: tuple[int, ...], most: int) -> set[tuple[tuple[int, Split], ...]]:
    """Every node split in every way, or left out."""
    nodes = [(kind, room.devices) for kind, room in rooms.items() for _ in room.nodes]
    ways = [
        [
            (kind, some)
            for units in range(devices + 1)
            for some in itertools.product(degrees, repeat=units)
            if sum(some) <= devices and list(some) == sorted(some, reverse=True)
        ]
        for kind, devices in nodes
    ]
    every = (tuple(sorted(node for node in way if node[1])) for way in itertools.product(*ways))
    return {way for way in every if 0 < sum(len(some) for _, some in way) <= most}


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_are_all_orders_up_to_exchange_of_equal_nodes(seed: int) -> None:
    rng = random.Random(f"lines {seed}")
    every = crews(rooms_of(rng, 6), degrees_of(rng), 5)
    for crew in rng.sample(every, min(8, len(every))):
        found = chains(lines(crew, set(crew.ends()), MOST))
        assert all(chain.slots == crew.slots for chain in found)
        named = [least_form(crew, tuple(cell for (cell,) in chain.stages)) for chain in found]
        assert sorted(named) == sorted({least_form(crew, order) for order in itertools.permutations(crew.cells)})


@pytest.mark.parametrize("seed", SEEDS)
def test_ends_say_which_lines_there_are(seed: int) -> None:
    rng = random.Random(f"ends {seed}")
    every = crews(rooms_of(rng, 6), degrees_of(rng), 5)
    for crew in rng.sample(every, min(8, len(every))):
        whole = chains(lines(crew, set(crew.ends()), MOST))
        assert {(chain.stages[0][0], chain.stages[-1][0]) for chain in whole} <= set(crew.ends())
        ends = rng.choice(crew.ends())
        assert chains(lines(crew, {ends}, MOST)) == [
            chain for chain in whole if (chain.stages[0][0], chain.stages[-1][0]) == ends
        ]
        assert sorted((ends[0], *crew.between(*ends), ends[1])[: len(crew.cells)]) == sorted(crew.cells)


def chains(found: Lines) -> list[Chain]:
    return [found.chain(number) for number in range(len(found))]


@pytest.mark.parametrize("most", [0, 1, 5, 11, MOST])
def test_lines_end_where_there_are_enough(most: int) -> None:
    crew = max(crews({0: Room(3, (0,)), 1: Room(1, (1, 2))}, (1,), 6), key=lambda crew: len(crew.cells))
    assert len(crew.cells) == 5
    every = chains(lines(crew, set(crew.ends()), MOST))
    assert len(every) == 10  # three like units between two nodes that are alike
    assert chains(lines(crew, set(crew.ends()), most)) == every[:most]


def least_form(crew: Crew, order: Line) -> Line:
    """The least of what equal nodes make of it when they change places."""
    alike = list(zip(crew.slots, splits(crew), strict=True))
    ways = [
        way
        for way in itertools.permutations(range(len(alike)))
        if all(alike[slot] == alike[other] for slot, other in enumerate(way))
    ]
    return min(tuple(Cell(way[cell.slot], cell.tp) for cell in order) for way in ways)


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_are_all_that_fit_beside_each_other(seed: int) -> None:
    """Up to exchange of equal nodes each comes once, for every number of pipelines."""
    rng = random.Random(f"frames {seed}")
    rooms = rooms_of(rng, 5)
    slots = sorted({crew.slots for crew in crews(rooms, (1, 2), 6)})
    small = [some for some in slots if sum(slot.devices for slot in some) == 1]  # so that several fit
    slots = sorted({*small, *rng.sample(slots, min(len(slots), 3))})
    parts = Parts(rooms, slots)
    for count, batch, least_devices in itertools.product((1, 2, 3), (1, rng.randint(2, 6)), (1, rng.randint(2, 4))):
        samples = [rng.choice((0, 1, 1, 2, 3)) for _ in slots]
        found = list(parts.frames(np.array([*samples, 0]), count, batch, least_devices))
        expected = {
            renamed(frame, rooms)
            for frame in brute_frames(rooms, slots, count)
            if all(samples[number] for number, _ in frame)
            and sum(samples[number] for number, _ in frame) >= batch
            and sum(slot.devices for number, _ in frame for slot in slots[number]) >= least_devices
        }
        assert sorted(renamed(frame, rooms) for frame in found) == sorted(expected)


def brute_frames(rooms: Rooms, slots: list[Slots], count: int) -> Iterator[Places]:
    """So many pipelines in the order of their numbers, each slot on any node of its kind."""
    free = {node: room.devices for room in rooms.values() for node in room.nodes}
    for numbers in itertools.combinations_with_replacement(range(len(slots)), count):
        ways = [
            [
                nodes
                for nodes in itertools.product(*(rooms[slot.kind].nodes for slot in slots[number]))
                if len(set(nodes)) == len(nodes)
            ]
            for number in numbers
        ]
        for way in itertools.product(*ways):
            taken = Counter[int]()
            for number, nodes in zip(numbers, way, strict=True):
                for slot, node in zip(slots[number], nodes, strict=True):
                    taken[node] += slot.devices
            if all(taken[node] <= devices for node, devices in free.items()):
                yield tuple(zip(numbers, way, strict=True))


def renamed(frame: Places, rooms: Rooms) -> Places:
    """Nodes of a kind by the order in which they come up."""
    kinds = {node: kind for kind, room in rooms.items() for node in room.nodes}
    names: dict[int, int] = {}
    for node in (node for _, nodes in frame for node in nodes):
        known = sum(kinds[other] == kinds[node] for other in names)
        names.setdefault(node, rooms[kinds[node]].nodes[known] if node not in names else names[node])
    return tuple((number, tuple(names[node] for node in nodes)) for number, nodes in frame)


def test_a_pipeline_takes_two_nodes_of_a_kind_in_both_orders_once_they_differ() -> None:
    """Beside one that holds a device of the first, it matters which slot is there."""
    rooms = {0: Room(2, (0, 1))}
    single, pair = (Slot(0, 1),), (Slot(0, 1), Slot(0, 2))
    parts = Parts(rooms, [single, pair])
    assert list(parts.frames(np.array([1, 1, 0]), 2, 2, 1)) == [
        ((0, (0,)), (0, (0,))),
        ((0, (0,)), (0, (1,))),
        ((0, (0,)), (1, (0, 1))),
    ]


# --- what is picked, and how the batch is dealt ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_picked_can_run_the_batch(seed: int) -> None:
    rng = random.Random(f"picked {seed}")
    some = [[(rng.randint(1, 5), name) for name in "abcd"[: rng.randint(1, 4)]] for _ in range(2)]
    options, alike = [some[0]], [False]
    for _ in range(rng.randint(0, 3)):
        options.append(options[-1] if rng.random() < 0.6 else rng.choice(some))
        alike.append(options[-1] is options[-2] and rng.random() < 0.8)
    batch = rng.randint(1, 4 * len(options))
    expected = [
        tuple(options[place][at][1] for place, at in enumerate(way))
        for way in itertools.product(*(range(len(entries)) for entries in options))
        if sum(options[place][at][0] for place, at in enumerate(way)) >= batch
        and all(way[place - 1] <= at for place, at in enumerate(way) if alike[place])
    ]
    assert list(_picked(options, alike, batch)) == expected


def allowed_of(rng: random.Random) -> list[list[int]]:
    """Numbers of samples by pipeline, rising."""
    return [sorted(rng.sample(range(1, 9), rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]


@pytest.mark.parametrize("seed", SEEDS)
def test_deals_are_all_that_make_up_the_batch(seed: int) -> None:
    rng = random.Random(f"deals {seed}")
    allowed = allowed_of(rng)
    batch = rng.randint(1, 5 * len(allowed))
    expected = [way for way in itertools.product(*allowed) if sum(way) == batch]
    found = _deals(allowed, batch)
    assert found.shape == (len(expected), len(allowed))
    assert list(map(tuple, found.tolist())) == expected
    assert _ways(allowed, batch) == len(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_too_many_deals_those_near_to_the_shares_of_what_each_runs_are_left(seed: int) -> None:
    rng = random.Random(f"few {seed}")
    allowed = allowed_of(rng)
    batch = rng.randint(len(allowed), 5 * len(allowed))
    ways = sum(1 for way in itertools.product(*allowed) if sum(way) == batch)
    assert _few(allowed, batch, max(1, ways)) == allowed
    limit = rng.randint(1, 4)
    few = _few(allowed, batch, limit)
    assert _ways(few, batch) <= limit or all(len(some) == 1 for some in few)
    whole = sum(some[-1] for some in allowed)
    for some, left in zip(allowed, few, strict=True):
        away = {own: abs(own - batch * some[-1] / whole) for own in some}
        assert set(left) <= set(some)
        assert left == sorted(left)
        assert max(away[own] for own in left) <= min((away[own] for own in some if own not in left), default=np.inf)
