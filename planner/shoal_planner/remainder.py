"""New pipelines for devices that a running plan does not keep: a few nodes, whole or in part.

Owns the small search there: templates like those that the plan has or had, some like them, packed at the pace of the
pipelines that stay. It is counted in templates, and stays small however large the cluster is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shoal_planner.assembly import assemble
from shoal_planner.columns import Columns
from shoal_planner.costs import CostModel
from shoal_planner.finish import Unit, Word
from shoal_planner.options import Kind, Option, options_of
from shoal_planner.packing import pack, worth
from shoal_planner.templates import Sequence, neighbours

_ROUNDS, _GROWN_FROM, _MOST_TEMPLATES = 2, 4, 600
_MOST_EQUAL = 24  # lengths of pipelines of equal stages that are tried, spread evenly
_STRETCHES = (1.0, 1.005, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2, 1.35, 1.6, 2.0)  # of the pace so far
_PACKED, _PACKINGS = (1.0, 1.03), 1  # further stretches that are packed, and packings of each

Devices = Mapping[str, tuple[int, ...]]  # by node


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What pipelines that stay allow: the seconds of a step so far, of which `sync_s` for the exchange, how many
    samples they get done within a time, and how many pipelines there are about."""

    step_s: float
    sync_s: float
    done: Callable[[float], float]
    holders: int


def remainder_words(
    devices: Devices, alike: tuple[Word, ...], costs: CostModel, sizes: tuple[int, ...], pace: Pace
) -> Iterator[tuple[Word, ...]]:
    """Sets of pipelines on these devices, those that promise most first; `alike` are pipelines to begin from."""
    kinds = _kinds(devices, costs)
    if not kinds:
        return
    options = options_of(kinds, costs)
    columns = Columns(costs, kinds, options, pace.holders, costs.job.train.global_batch, _MOST_TEMPLATES)
    columns.bound_s = pace.sync_s
    first = [*_sequences(alike, options, costs), *_equal(options, costs)]
    columns.add((sequence, size) for size in sizes for sequence in first)
    for _ in range(_ROUNDS):
        if len(columns.templates):
            _grow(columns, pace)
    if len(columns.templates):
        for found in dict.fromkeys(_packed(columns, pace)):
            words = assemble([columns.templates[row][0] for row in found], options, kinds)
            if words is not None:
                yield tuple(tuple(_real(unit, devices) for unit in word) for word in words)


def _kinds(devices: Devices, costs: CostModel) -> tuple[Kind, ...]:
    """Nodes with equally many free devices count as a kind of their own."""
    found: dict[tuple[int, int], list[str]] = {}
    for node_id in sorted(devices):
        found.setdefault((costs.kind(node_id), len(devices[node_id])), []).append(node_id)
    return tuple(
        Kind(number=number, node=costs.node(nodes[0]), nodes=tuple(nodes), slice=count)
        for number, ((_, count), nodes) in enumerate(found.items())
    )


def _sequences(alike: tuple[Word, ...], options: tuple[Option, ...], costs: CostModel) -> Iterator[Sequence]:
    """These pipelines as sequences of options, as far as there are such devices, whole and in shorter versions."""
    by_unit: dict[tuple[int, int], int] = {}
    for index, option in enumerate(options):
        key = (costs.kind(option.kind.node.id), option.tp)
        held = by_unit.get(key)
        if held is None or options[held].kind.devices < option.kind.devices:
            by_unit[key] = index
    seen = set()
    for word in alike:
        found = [by_unit.get((costs.kind(unit.node), unit.tp)) for unit in word]
        sequence = tuple(index for index in found if index is not None)
        blocks = tuple((index, len(list(run))) for index, run in itertools.groupby(sequence))
        if blocks and blocks not in seen:
            seen.add(blocks)
            yield sequence
            longest = max(range(len(blocks)), key=lambda at: blocks[at][1])
            for less in range(1, min(4, blocks[longest][1])):
                cut = tuple((i, count - less * (at == longest)) for at, (i, count) in enumerate(blocks))
                yield tuple(itertools.chain.from_iterable((index,) * count for index, count in cut))


def _equal(options: tuple[Option, ...], costs: CostModel) -> Iterator[Sequence]:
    for index, option in enumerate(options):
        most = min(48, costs.job.model.layers, len(option.kind.nodes) * option.per_node)
        for length in sorted({1 + (most - 1) * part // _MOST_EQUAL for part in range(_MOST_EQUAL + 1)}):
            yield (index,) * length


def _time_s(columns: Columns, pace: Pace) -> float:
    """The first stretch of the pace in which all samples get done, the last if none suffices."""
    for stretch in _STRETCHES:
        time_s = pace.step_s * stretch
        reached = worth(columns.values(time_s), columns.needs, columns.stock)[0]
        if pace.done(time_s) + reached >= columns.batch:
            break
    return time_s


def _grow(columns: Columns, pace: Pace) -> None:
    values = columns.values(_time_s(columns, pace))
    _, fractions, worths = worth(values, columns.needs, columns.stock)
    loss = (columns.needs @ worths - values) / np.maximum(columns.needs @ worths, 1e-12)
    best = np.argsort(np.where(fractions > 1e-9, -1.0, loss), kind="stable")[:_GROWN_FROM]
    grown = [columns.templates[row] for row in best]
    columns.add(
        (other, size) for sequence, size in grown for other in neighbours(sequence, columns.options, columns.num_layers)
    )


def _packed(columns: Columns, pace: Pace) -> Iterator[tuple[int, ...]]:
    """Rows of templates, each as often as it is packed."""
    time_s = _time_s(columns, pace)
    for stretch in _PACKED:
        values = columns.values(time_s * stretch)
        wanted = max(1.0, columns.batch - pace.done(time_s * stretch))
        for packing in pack(values, columns.needs, columns.stock, wanted=wanted)[:_PACKINGS]:
            rows = tuple(row for row, count in packing.counts for _ in range(count))
            if rows:
                yield rows


def _real(unit: Unit, devices: Devices) -> Unit:
    """With the devices that are free there, in place of those counted from 0."""
    return Unit(unit.node, tuple(devices[unit.node][index] for index in unit.devices))
