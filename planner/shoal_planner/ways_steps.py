"""Single steps from one set of pipelines to others: units join, leave, change their degree or their place; pipelines
split, merge, come and go. One at a time, or all equal ones alike.

Owns the steps and their order; which of them are taken is up to `improve`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from shoal_planner.ways import Ground, Place, Shape, Way, Ways, blocks_of, take

# Lengths of new pipelines of equal units.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def steps(ways: Ways, ground: Ground) -> Iterator[Ways]:
    """All single steps from here, round robin over their sorts."""
    free = ground.free(ways)
    classes: dict[Shape, list[int]] = {}
    for number, way in enumerate(ways):
        classes.setdefault(ground.shape(way), []).append(number)
    coarse = dataclasses.replace(ground, kind=ground.device)
    sorts: list[Iterator[Ways]] = []
    alike: dict[Shape, list[int]] = {}
    for number, way in enumerate(ways):
        alike.setdefault(coarse.shape(way), []).append(number)
    for numbers in alike.values():
        if numbers not in classes.values():
            sorts += [_less(ways, numbers), _left_out(ways, numbers)]
            sorts += [moves(ways, numbers, free, coarse) for moves in (_more, _other_degree, _replaced, _ends)]
            sorts += [_elsewhere(ways, numbers, coarse), _split(ways, numbers, coarse)]
    if len(alike) < len(classes):
        sorts.append(_merged(ways, list(alike.values()), coarse))
    for numbers in classes.values():
        groups = [numbers] if len(numbers) == 1 else [numbers, numbers[-1:]]
        for group in groups:
            sorts.append(_less(ways, group))
            sorts.append(_more(ways, group, free, ground))
            sorts.append(_other_degree(ways, group, free, ground))
            sorts.append(_elsewhere(ways, group, ground))
            sorts.append(_replaced(ways, group, free, ground))
            sorts.append(_split(ways, group, ground))
            sorts.append(_ends(ways, group, free, ground))
        sorts.append(_left_out(ways, numbers))
    sorts.append(_merged(ways, list(classes.values()), ground))
    sorts.append(_added(ways, list(classes.values()), free, ground))
    sorts.append(_handed(ways, list(classes.values()), ground))
    yield from _turns(sorts)


def _turns(sorts: list[Iterator[Ways]]) -> Iterator[Ways]:
    left = sorts
    while left:
        still = []
        for some in left:
            found = next(some, None)
            if found is not None:
                yield found
                still.append(some)
        left = still


def _with(ways: Ways, changed: Mapping[int, Way], added: Iterable[Way] = ()) -> Ways:
    found = [changed.get(number, way) for number, way in enumerate(ways)]
    return tuple(way for way in (*found, *added) if way)


def _less(ways: Ways, group: list[int]) -> Iterator[Ways]:
    way = ways[group[0]]
    places = [at for at in range(len(way)) if at + 1 == len(way) or way[at] != way[at + 1]]
    if len(way) > 1:
        for at in places:
            yield _with(ways, {number: (*ways[number][:at], *ways[number][at + 1 :]) for number in group})


def _ends(ways: Ways, group: list[int], free: Counter[str], ground: Ground) -> Iterator[Ways]:
    """A unit more at both ends, each as its neighbour or of a single device: the ends of the model may bind alike."""
    shape = ground.shape(ways[group[0]])
    for one, other in sorted({(shape[0][1], shape[-1][1]), (1, 1)}):
        rest, changed = free.copy(), dict[int, Way]()
        for number in group:
            found = []
            for (kind, _), tp in ((shape[0], one), (shape[-1], other)):
                node = take(rest, kind, tp, ways[number], ground)
                if node is None:
                    break
                rest[node] -= tp
                found.append(Place(node, tp))
            if len(found) == 2:
                changed[number] = (found[0], *ways[number], found[1])
        if len(changed) == len(group):
            yield _with(ways, changed)


def _kinds(free: Counter[str], ground: Ground) -> list[int]:
    return sorted({ground.kind[name] for name, count in free.items() if count > 0})


def _degrees(kind: int, free: Counter[str], ground: Ground) -> list[int]:
    most = max(count for name, count in free.items() if ground.kind[name] == kind)
    return [tp for tp in ground.degrees if tp <= most]


def _more(ways: Ways, group: list[int], free: Counter[str], ground: Ground) -> Iterator[Ways]:
    shape = ground.shape(ways[group[0]])
    blocks = blocks_of(shape)
    for kind in _kinds(free, ground):
        present = [end for _, end in blocks if shape[end - 1][0] == kind]
        for tp in _degrees(kind, free, ground):
            same = [end for _, end in blocks if shape[end - 1] == (kind, tp)]
            for at in same or sorted({0, len(shape), *present}):
                rest, changed = free.copy(), {}
                for number in group:
                    node = take(rest, kind, tp, ways[number], ground)
                    if node is None:
                        break
                    rest[node] -= tp
                    changed[number] = (*ways[number][:at], Place(node, tp), *ways[number][at:])
                if changed:
                    yield _with(ways, changed)


def _other_degree(ways: Ways, group: list[int], free: Counter[str], ground: Ground) -> Iterator[Ways]:
    """A block in units of another degree: as many as its devices allow, the rest in units of the present one or not at
    all, or as many as before."""
    shape = ground.shape(ways[group[0]])
    for first, last in blocks_of(shape):
        tp = shape[first][1]
        for other in ground.degrees:
            most, rest = divmod((last - first) * tp, other)
            plans = {(other,) * most, (other,) * most + (tp,) * (rest // tp), (other,) * (last - first), (other,)}
            plans |= {(other,) + (tp,) * (last - first - 1), (tp,) * (last - first - 1) + (other,)}
            plans |= {(other,) * most + (rest,)} if rest in ground.degrees else set()
            for degrees in sorted(plan for plan in plans if plan and other != tp):
                changed = _recut(ways, group, (first, last), degrees, free, ground)
                if changed:
                    yield _with(ways, changed)


def _recut(
    ways: Ways,
    group: list[int],
    block: tuple[int, int],
    degrees: tuple[int, ...],
    free: Counter[str],
    ground: Ground,
) -> dict[int, Way]:
    """All pipelines of the group with units of these degrees in place of a block; none if there are too few devices."""
    first, last = block
    rest, changed = free.copy(), dict[int, Way]()
    kind = ground.kind[ways[group[0]][first].node]
    for number in group:
        for place in ways[number][first:last]:
            rest[place.node] += place.tp
    for number in group:
        way, made = ways[number], list[Place]()
        for tp in degrees:
            node = take(rest, kind, tp, way[first:last], ground)
            if node is None:
                return {}
            rest[node] -= tp
            made.append(Place(node, tp))
        changed[number] = (*way[:first], *_together(made), *way[last:])
    return changed


def _together(block: list[Place]) -> list[Place]:
    """Units of equal degree on one node side by side."""
    order = {place: number for number, place in reversed(list(enumerate(block)))}
    return sorted(block, key=lambda place: order[place])


def _elsewhere(ways: Ways, group: list[int], ground: Ground) -> Iterator[Ways]:
    shape = ground.shape(ways[group[0]])
    blocks = blocks_of(shape)
    for number, (first, last) in enumerate(blocks):
        for other in range(len(blocks)):
            if other not in (number, number - 1):
                changed = {}
                for p in group:
                    way = ways[p]
                    moved, rest = way[first:last], (*way[:first], *way[last:])
                    at = blocks[other][0] if other < number else blocks[other][1] - (last - first)
                    changed[p] = (*rest[:at], *moved, *rest[at:])
                yield _with(ways, changed)


def _replaced(ways: Ways, group: list[int], free: Counter[str], ground: Ground) -> Iterator[Ways]:
    """A block on free devices of another kind, in as many units."""
    shape = ground.shape(ways[group[0]])
    for first, last in blocks_of(shape):
        for kind in _kinds(free, ground):
            if kind == shape[first][0]:
                continue
            for tp in _degrees(kind, free, ground):
                rest, changed = free.copy(), {}
                for number in group:
                    block: list[Place] = []
                    for _ in range(last - first):
                        node = take(rest, kind, tp, tuple(block), ground)
                        if node is None:
                            break
                        rest[node] -= tp
                        block.append(Place(node, tp))
                    if block:
                        changed[number] = (*ways[number][:first], *block, *ways[number][last:])
                if len(changed) == len(group):
                    yield _with(ways, changed)


def _split(ways: Ways, group: list[int], ground: Ground) -> Iterator[Ways]:
    shape = ground.shape(ways[group[0]])
    blocks = blocks_of(shape)
    if len(shape) < 2:
        return
    halves: list[list[bool]] = []
    if any(last - first > 1 for first, last in blocks):
        halves.append([(at - first) * 2 < last - first for first, last in blocks for at in range(first, last)])
    if len(blocks) > 1:
        halves += [
            [number == other for other, (first, last) in enumerate(blocks) for _ in range(first, last)]
            for number in range(len(blocks))
        ]
    for half in halves:
        changed, added = {}, []
        for number in group:
            way = ways[number]
            changed[number] = tuple(itertools.compress(way, half))
            added.append(tuple(place for place, mine in zip(way, half, strict=True) if not mine))
        yield _with(ways, changed, added)


def _left_out(ways: Ways, numbers: list[int]) -> Iterator[Ways]:
    if len(ways) > 1:
        yield _with(ways, {numbers[-1]: ()})
    if 1 < len(numbers) < len(ways):
        yield _with(ways, dict.fromkeys(numbers, ()))
    if len(numbers) > 2:
        yield _with(ways, dict.fromkeys(numbers[len(numbers) // 2 :], ()))


def _merged(ways: Ways, classes: list[list[int]], ground: Ground) -> Iterator[Ways]:
    for one, other in itertools.combinations_with_replacement(range(len(classes)), 2):
        if one == other:
            numbers = classes[one]
            pairs = list(zip(numbers[::2], numbers[1::2], strict=False))
        else:
            pairs = list(zip(classes[one], classes[other], strict=False))
        for some in (pairs, pairs[:1]) if len(pairs) > 1 else (pairs,):
            if some:
                changed: dict[int, Way] = {}
                for p, q in some:
                    changed[p], changed[q] = _joined(ways[p], ways[q], ground), ()
                yield _with(ways, changed)
                if one != other:
                    for p, q in some:
                        changed[p] = _joined(ways[q], ways[p], ground)
                    yield _with(ways, changed)


def _joined(one: Way, other: Way, ground: Ground) -> Way:
    """Units of the other behind those like them."""
    found = list(one)
    for place in other:
        like = [at for at, own in enumerate(found) if own == place]
        like = like or [at for at, own in enumerate(found) if ground.kind[own.node] == ground.kind[place.node]]
        found.insert(like[-1] + 1 if like else len(found), place)
    return tuple(found)


def _added(ways: Ways, classes: list[list[int]], free: Counter[str], ground: Ground) -> Iterator[Ways]:
    """A pipeline more: like one that there is, or of equal units."""
    for numbers in classes:
        rest, made = free.copy(), list[Place]()
        for kind, tp in ground.shape(ways[numbers[0]]):
            node = take(rest, kind, tp, tuple(made), ground)
            if node is None:
                break
            rest[node] -= tp
            made.append(Place(node, tp))
        else:
            yield _with(ways, {}, [tuple(made)])
    for kind in _kinds(free, ground):
        for tp in _degrees(kind, free, ground):
            rest, made = free.copy(), list[Place]()
            while (node := take(rest, kind, tp, tuple(made), ground)) is not None and len(made) < _LENGTHS[-1]:
                rest[node] -= tp
                made.append(Place(node, tp))
                if len(made) in _LENGTHS:
                    yield _with(ways, {}, [tuple(made)])


def _handed(ways: Ways, classes: list[list[int]], ground: Ground) -> Iterator[Ways]:
    """A unit of one pipeline goes to one of another sort."""
    for giving, taking in itertools.permutations(classes, 2):
        p, q = giving[-1], taking[-1]
        for _, last in blocks_of(ground.shape(ways[p])):
            place = ways[p][last - 1]
            yield _with(ways, {p: (*ways[p][: last - 1], *ways[p][last:]), q: _joined(ways[q], (place,), ground)})
