"""Who can run with whom on a tiny cluster: every set of pipelines over any of its devices, up to symmetry.

Owns the enumeration alone: no layers, samples or micro-batches, and no costs. A `Chain` is one pipeline up to exchange
of equal nodes, a `Frame` says which nodes the pipelines of a plan stand on, and a chain for each of them is a `Shape`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """A replica: `tp` devices of the node in this slot of its chain."""

    slot: int
    tp: int


class Slot(NamedTuple):
    """A node of a chain: its kind, and how many of its devices the chain takes."""

    kind: int
    devices: int


Stages = tuple[tuple[Cell, ...], ...]
Slots = tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One pipeline: replicas by stage, on nodes that are told apart by their slots alone."""

    slots: Slots
    stages: Stages

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage."""
        return tuple(len(stage) for stage in self.stages)


class Room(NamedTuple):
    """Nodes of one kind: how many devices each has, and their places in the list of nodes."""

    devices: int
    nodes: tuple[int, ...]


Rooms = dict[int, Room]
Frame = tuple[tuple[Slots, tuple[int, ...]], ...]  # for each pipeline its slots, and the node in each of them


class Bounds(NamedTuple):
    """The tensor-parallel degrees there may be, and how many stages, and replicas of a stage."""

    degrees: tuple[int, ...]
    stages: int
    replicas: int


def chains(rooms: Rooms, bounds: Bounds) -> dict[Slots, tuple[Chain, ...]]:
    """All pipelines, by what they take of the nodes."""
    found: dict[Slots, dict[Stages, None]] = {}
    for used, stages in _grown((), (), rooms, bounds):
        slots, canonical = _canonical(used, stages)
        found.setdefault(slots, {})[canonical] = None
    return {slots: tuple(Chain(slots=slots, stages=stages) for stages in some) for slots, some in sorted(found.items())}


def _grown(used: Slots, stages: Stages, rooms: Rooms, bounds: Bounds) -> Iterator[tuple[Slots, Stages]]:
    """This pipeline and all that grow from it: one more replica in the last stage, or in a new one."""
    if stages:
        yield used, stages
    for slot, more in _places(used, rooms):
        for tp in bounds.degrees:
            if more[slot].devices + tp > rooms[more[slot].kind].devices:
                break
            taken = (*more[:slot], Slot(more[slot].kind, more[slot].devices + tp), *more[slot + 1 :])
            cell = Cell(slot, tp)
            if stages and len(stages[-1]) < bounds.replicas:
                yield from _grown(taken, (*stages[:-1], (*stages[-1], cell)), rooms, bounds)
            if len(stages) < bounds.stages:
                yield from _grown(taken, (*stages, (cell,)), rooms, bounds)


def _places(used: Slots, rooms: Rooms) -> Iterator[tuple[int, Slots]]:
    """The nodes that are in use, and of each kind the next one."""
    for slot in range(len(used)):
        yield slot, used
    for kind, room in rooms.items():
        if sum(slot.kind == kind for slot in used) < len(room.nodes):
            yield len(used), (*used, Slot(kind, 0))


def _canonical(used: Slots, stages: Stages) -> tuple[Slots, Stages]:
    """The least of all forms that cost the same."""
    return min(_named(used, form) for form in _forms(stages))


def _forms(stages: Stages) -> Iterator[Stages]:
    """Orders of the replicas that cost the same. The order says who sends to whom: between two stages of several
    replicas each it matters, but for turning all stages round; else every replica meets the same neighbours anyway."""
    several = [len(stage) > 1 for stage in stages]
    bound = [
        here and ((s > 0 and several[s - 1]) or (s + 1 < len(stages) and several[s + 1]))
        for s, here in enumerate(several)
    ]
    ways = [
        (stage,) if fixed else tuple(itertools.permutations(stage)) for stage, fixed in zip(stages, bound, strict=True)
    ]
    for form in itertools.product(*ways):
        yield form
        if any(bound):
            yield tuple(stage[::-1] for stage in form)


def _named(used: Slots, stages: Stages) -> tuple[Slots, Stages]:
    """Slots in order of kind and devices; equal ones as they appear."""
    seen = list(dict.fromkeys(cell.slot for stage in stages for cell in stage))
    order = sorted(range(len(seen)), key=lambda place: used[seen[place]])
    names = {seen[place]: name for name, place in enumerate(order)}
    return (
        tuple(used[seen[place]] for place in order),
        tuple(tuple(Cell(names[cell.slot], cell.tp) for cell in stage) for stage in stages),
    )


def frames(kinds: list[Slots], rooms: Rooms, most: int) -> Iterator[Frame]:
    """All ways in which up to `most` pipelines of these kinds stand on nodes. Of nodes of a kind that nobody uses yet
    the first is taken: the others would give equal shapes. A kind of pipeline never precedes a lesser one."""
    free = {node: room.devices for room in rooms.values() for node in room.nodes}
    yield from _framed((), 0, kinds, rooms, free, most)


def _framed(
    frame: Frame, least: int, kinds: list[Slots], rooms: Rooms, free: dict[int, int], most: int
) -> Iterator[Frame]:
    if frame:
        yield frame
    if len(frame) == most or not any(free.values()):
        return
    for number in range(least, len(kinds)):
        for nodes in placed(kinds[number], rooms, free, ()):
            left = dict(free)
            for slot, node in zip(kinds[number], nodes, strict=True):
                left[node] -= slot.devices
            yield from _framed((*frame, (kinds[number], nodes)), number, kinds, rooms, left, most)


def placed(slots: Slots, rooms: Rooms, free: dict[int, int], nodes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Nodes for these slots, after those that are there."""
    if len(nodes) == len(slots):
        yield nodes
        return
    slot = slots[len(nodes)]
    room = rooms[slot.kind]
    for node in room.nodes:
        if node not in nodes and free[node] >= slot.devices:
            yield from placed(slots, rooms, free, (*nodes, node))
            if free[node] == room.devices:
                break  # all further ones of this kind that nobody uses are like it
