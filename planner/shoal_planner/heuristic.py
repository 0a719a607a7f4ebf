"""Forms pipelines on clusters too large to try everything: evenly dealt types first, then moves that help.

Sound, not exact: every candidate is priced under the same memory limits as the exact search. Deterministic for a seed
as long as time does not run out.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator

from shoal_planner.candidates import Pricer, Unit, Word
from shoal_planner.cluster import Node
from shoal_planner.layouts import Kinds, form_units

Words = tuple[Word, ...]
Late = Callable[[float], bool]  # is this share of the time over?
# Numbers of pipelines that are tried beside the number of units of each type.
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FEW_KINDS = 5
_MOST_SUBSETS = 20  # of the device types, of each size
_MAX_DEPTH = 32  # deeper pipelines are mostly bubble
_KEPT = 12  # starts that the moves are tried on, and candidates that are handed back
_BASES = 3  # degrees of tensor parallelism, the same everywhere, from which single types deviate
_STALE_MOVES = 200
_START_SHARE, MOVE_SHARE = 0.5, 0.8  # of the time, after which no more starts or moves are tried
_SLOWER = 1.1  # a start that cannot come nearer to the best than this is not priced


def large_candidates(
    nodes: tuple[Node, ...],
    degrees: tuple[int, ...],
    apart: frozenset[str],
    pricer: Pricer,
    seed: int,
    late: Late,
    lost: Callable[[], bool],
) -> list[tuple[float, Words]]:
    """Good sets of pipelines with their estimates, best first; empty if none was found that fits."""
    found: dict[Words, float] = {}
    kinds: Kinds = {}

    def over(share: float) -> bool:
        """Before something was found that fits only when all is lost: a search cut short must not pass for an
        impossible job."""
        return late(share) if min(found.values(), default=float("inf")) < float("inf") else lost()

    for words in _starts(nodes, degrees, apart, kinds, pricer, found, over):
        if over(_START_SHARE):
            break
        if words not in found and pricer.floor(words) <= _SLOWER * min(found.values(), default=float("inf")):
            found[words] = pricer.estimate(words)
    best = _best(found)
    generator = random.Random(seed)
    for seconds, words in best[:3]:
        if seconds == float("inf"):
            break
        improved_s, improved = _improve(words, seconds, _spare(words, best), pricer, generator, late)
        found[improved] = improved_s
    return [(seconds, words) for seconds, words in _best(found) if seconds < float("inf")]


def _best(found: dict[Words, float]) -> list[tuple[float, Words]]:
    return sorted(((seconds, words) for words, seconds in found.items()), key=lambda pair: (pair[0], len(pair[1])))[
        :_KEPT
    ]


def _starts(
    nodes: tuple[Node, ...],
    degrees: tuple[int, ...],
    apart: frozenset[str],
    kinds: Kinds,
    pricer: Pricer,
    found: dict[Words, float],
    late: Late,
) -> Iterator[Words]:
    """One degree everywhere, then other degrees type by type from the best so far; every subset of the types."""
    types = sorted({node.device for node in nodes})
    degrees = tuple(tp for tp in degrees if any(node.devices % tp == 0 for node in nodes))
    plain = [dict.fromkeys(types, tp) for tp in degrees]
    for choice in plain:
        yield from _dealt(_units(nodes, choice, apart, kinds), pricer, late)
    if len(types) < 2 or late(_START_SHARE):
        return
    for base in sorted(plain, key=lambda choice: _value(nodes, choice, found))[:_BASES]:
        for device, tp in itertools.product(types, degrees):
            if not late(_START_SHARE) and base[device] != tp:
                yield from _dealt(_units(nodes, {**base, device: tp}, apart, kinds), pricer, late)


def _value(nodes: tuple[Node, ...], choice: dict[str, int], found: dict[Words, float]) -> float:
    """The best estimate among candidates whose units all have this choice's degrees."""
    device_of = {node.id: node.device for node in nodes}
    fitting = (
        seconds
        for words, seconds in found.items()
        if all(unit.tp <= choice[device_of[unit.node]] for word in words for unit in word)
        and any(unit.tp == choice[device_of[unit.node]] for word in words for unit in word)
    )
    return min(fitting, default=float("inf"))


def _units(nodes: tuple[Node, ...], choice: dict[str, int], apart: frozenset[str], kinds: Kinds) -> tuple[Unit, ...]:
    cuts = []
    for node in nodes:
        tp = min(choice[node.device], node.devices)
        cuts.append((node, (tp,) * (node.devices // tp)))
    return form_units(cuts, apart, kinds)


def _dealt(units: tuple[Unit, ...], pricer: Pricer, late: Late) -> Iterator[Words]:
    by_kind: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        by_kind[unit.kind].append(unit)
    for kinds in _subsets(list(by_kind.values()), pricer):
        if late(_START_SHARE):
            return
        yield from _counts(kinds, pricer)


def _subsets(kinds: list[list[Unit]], pricer: Pricer) -> Iterator[list[list[Unit]]]:
    """Which kinds take part: every choice of few kinds; of many every choice of device types, and all kinds but one."""
    if len(kinds) <= _FEW_KINDS:
        for size in range(len(kinds), 0, -1):
            yield from map(list, itertools.combinations(kinds, size))
        return
    types = [pricer.costs.device(units[0].node).name for units in kinds]
    names = sorted(set(types))
    for size in range(len(names), 0, -1):
        for chosen in itertools.islice(itertools.combinations(names, size), _MOST_SUBSETS):
            yield [units for units, name in zip(kinds, types, strict=True) if name in chosen]
    for left_out in range(len(kinds)):
        yield kinds[:left_out] + kinds[left_out + 1 :]


def _counts(kinds: list[list[Unit]], pricer: Pricer) -> Iterator[Words]:
    """All units of these kinds, dealt to several numbers of pipelines."""
    total = sum(map(len, kinds))
    most = min(total, pricer.job.train.global_batch)
    deepest = min(_MAX_DEPTH, pricer.job.model.layers + 2)
    for count in sorted({*_COUNTS, *map(len, kinds), total}):
        if count <= most and total / count <= deepest:
            words = _deal(kinds, count)
            yield from (_ordered(words, pricer, large_first) for large_first in (True, False))


def _deal(kinds: list[list[Unit]], count: int) -> Words:
    """Units of each kind to pipelines in even runs, neighbours together; what is over goes on where the last kind
    ended, so that no pipeline gets all of the remainders."""
    words: list[list[Unit]] = [[] for _ in range(count)]
    start = 0
    for units in kinds:
        share, over = divmod(len(units), count)
        sizes = [share] * count
        for index in range(over):
            sizes[(start + index) % count] += 1
        start = (start + over) % count
        taken = 0
        for index, size in enumerate(sizes):
            words[index].extend(units[taken : taken + size])
            taken += size
    return tuple(tuple(word) for word in words if word)


def _ordered(words: Words, pricer: Pricer, large_first: bool) -> Words:
    """Devices with much memory for their speed at the front, where most micro-batches are in flight, or at the end."""
    return tuple(sorted(_order(word, pricer, large_first) for word in words))


def _order(word: Word, pricer: Pricer, large_first: bool) -> Word:
    def weight(unit: Unit) -> tuple[float, str, tuple[int, ...]]:
        memory = pricer.costs.device(unit.node).memory_bytes * unit.tp
        seconds = pricer.costs.part("block", unit.node, unit.tp, 1).total_s
        return (-memory * seconds if large_first else memory * seconds, unit.node, unit.devices)

    return tuple(sorted(word, key=weight))


def _spare(words: Words, best: list[tuple[float, Words]]) -> list[Unit]:
    """Units of the other good candidates that could join this one: their devices are free in it."""
    used = {(unit.node, index) for word in words for unit in word for index in unit.devices}
    spare: dict[tuple[str, tuple[int, ...]], Unit] = {}
    for _, others in best:
        for unit in itertools.chain.from_iterable(others):
            if not any((unit.node, index) in used for index in unit.devices):
                spare.setdefault((unit.node, unit.devices), unit)
                used.update((unit.node, index) for index in unit.devices)
    return list(spare.values())


def _improve(
    words: Words, seconds: float, spare: list[Unit], pricer: Pricer, generator: random.Random, late: Late
) -> tuple[float, Words]:
    """Random moves, kept when they help, until many in a row did not."""
    stale = 0
    while stale < _STALE_MOVES and not late(MOVE_SHARE):
        moved, left = _move(words, spare, generator)
        estimate = pricer.estimate(moved) if moved else float("inf")
        if estimate < seconds * (1 - 1e-9):
            words, spare, seconds, stale = moved, left, estimate, 0
        else:
            stale += 1
    return seconds, words


def _move(words: Words, spare: list[Unit], generator: random.Random) -> tuple[Words, list[Unit]]:
    """One of: exchange two units, move one, leave one out, take one in. A pipeline may vanish; a new one may begin."""
    changed = [list(word) for word in words]
    left = list(spare)
    action = generator.choice(("exchange", "exchange", "move", "move", "drop", "take"))
    here = generator.choice(changed)
    place = generator.randrange(len(here))
    there = generator.choice(changed)
    if action == "exchange":
        other = generator.randrange(len(there))
        here[place], there[other] = there[other], here[place]
    elif action == "take" and left:
        unit = left.pop(generator.randrange(len(left)))
        if generator.random() < 0.3:
            changed.append([unit])
        else:
            there.insert(generator.randint(0, len(there)), unit)
    elif action == "drop":
        left.append(here.pop(place))
    else:
        unit = here.pop(place)
        if generator.random() < 0.2:
            changed.append([unit])
        else:
            there.insert(generator.randint(0, len(there)), unit)
    return tuple(tuple(word) for word in changed if word), left
