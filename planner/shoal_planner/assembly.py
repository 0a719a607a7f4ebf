"""Gives templates their devices: which units of which nodes each pipeline gets.

Owns the allocation alone. Stages of one kind of node stand on one node as far as they fit there.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from shoal_planner.finish import Unit, Word
from shoal_planner.options import Kind, Option
from shoal_planner.templates import Sequence


class Shelves:
    """Free devices by node."""

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        self._free = {kind.number: {node: list(range(kind.slice)) for node in kind.nodes} for kind in kinds}

    def take(self, option: Option, count: int) -> list[Unit] | None:
        """Units on as few nodes as possible, preferably on nodes that are begun; None if there are too few."""
        shelf = self._free[option.kind.number]
        taken: list[Unit] = []
        while len(taken) < count:
            node = _best(shelf, option.tp, count - len(taken))
            if node is None:
                return None
            devices = shelf[node]
            for _ in range(min(len(devices) // option.tp, count - len(taken))):
                taken.append(Unit(node, tuple(devices[: option.tp])))
                del devices[: option.tp]
        return taken


def _best(shelf: dict[str, list[int]], tp: int, count: int) -> str | None:
    """The node with the least room that suffices, else the one with most."""
    best, best_key = None, (2, 0)
    for node, devices in shelf.items():
        units = len(devices) // tp
        if units:
            key = (0, len(devices)) if units >= count else (1, -units)
            if key < best_key:
                best, best_key = node, key
                if key == (0, count * tp):
                    break
    return best


def assemble(
    sequences: list[Sequence], options: tuple[Option, ...], kinds: tuple[Kind, ...]
) -> tuple[Word, ...] | None:
    """A word for each sequence; None if the nodes cannot be cut so. Wide units first, as they fit in fewer places."""
    shelves = Shelves(kinds)
    blocks = [
        (number, at, index, len(list(run)))
        for number, sequence in enumerate(sequences)
        for at, (index, run) in enumerate(itertools.groupby(sequence))
    ]
    blocks.sort(key=lambda block: (-options[block[2]].tp, -block[3] * options[block[2]].tp, block[0], block[1]))
    placed: dict[int, dict[int, list[Unit]]] = defaultdict(dict)
    for number, at, index, count in blocks:
        units = shelves.take(options[index], count)
        if units is None:
            return None
        placed[number][at] = units
    return tuple(
        tuple(itertools.chain.from_iterable(placed[number][at] for at in sorted(placed[number])))
        for number in range(len(sequences))
    )


def bundle(word: Word, copies: int) -> tuple[Word, ...]:
    """So many pipelines through the same nodes, each on its own slice of their devices: the word's devices are those of
    the first slice, and node devices are counted in slices."""
    return tuple(
        tuple(Unit(unit.node, tuple(device * copies + number for device in unit.devices)) for unit in word)
        for number in range(copies)
    )
