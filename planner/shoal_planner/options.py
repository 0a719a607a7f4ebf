"""What a stage can run on, and what it then costs: devices of one kind of node with one degree of tensor parallelism.

Owns the figures that the search sums up, as arrays over options: those of `costs` and `memory`, read once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_planner.again import Kinds, kinds_of
from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.hiding import hop_s
from shoal_planner.job import JobSpec
from shoal_planner.memory import ELEMENT_BYTES, StageBytes, snapshot_bytes, stage_bytes, unit_elements, usable_bytes
from shoal_planner.parameters import degrees_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Where a stage stands in its pipeline: rows of the arrays below.
MIDDLE, FIRST, LAST, ONLY = range(4)
_ENDS = ((False, False), (True, False), (False, True), (True, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Equal nodes, one of them for all, and how many devices of each there are to use: all, or one slice of them."""

    number: int
    node: Node
    nodes: tuple[str, ...]
    slice: int

    @property
    def devices(self) -> int:
        return len(self.nodes) * self.slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """`tp` devices of a node of this kind. `width` is what they take of a node's devices, with what no other unit of
    this option could use."""

    kind: Kind
    tp: int

    @property
    def per_node(self) -> int:
        return self.kind.slice // self.tp

    @property
    def width(self) -> float:
        return self.kind.slice / self.per_node


def usable_nodes(job: JobSpec, snapshot: ClusterSnapshot) -> tuple[Node, ...]:
    """Nodes of the device types that the job allows."""
    allowed = job.limits.device_types
    return tuple(node for node in snapshot.nodes if not allowed or node.device in allowed)


def group_kinds(nodes: tuple[Node, ...], costs: CostModel) -> tuple[Kind, ...]:
    found: dict[int, list[Node]] = {}
    for node in nodes:
        found.setdefault(costs.kind(node.id), []).append(node)
    return tuple(
        Kind(number=number, node=alike[0], nodes=tuple(node.id for node in alike), slice=alike[0].devices)
        for number, alike in found.items()
    )


def tp_degrees(costs: CostModel, most: int) -> tuple[int, ...]:
    """The degrees of tensor parallelism that divide the heads and the key heads, up to `most`."""
    return degrees_of(costs.job.model, most)


def options_of(kinds: tuple[Kind, ...], costs: CostModel) -> tuple[Option, ...]:
    return tuple(Option(kind=kind, tp=tp) for kind in kinds for tp in tp_degrees(costs, kind.slice))


class Ladder:
    """By option: what a block computed again takes and saves, of one micro-batch in flight, and what the same takes and
    saves more once all blocks are: selectively first and then fully, or fully at once where that is cheaper."""

    def __init__(self, kinds: list[Kinds]) -> None:
        selective_s, full_s, selective, full = np.array(kinds, dtype=np.float64).T
        first = selective_s * full < full_s * selective
        self.first_s, self.first_bytes = np.where(first, selective_s, full_s), np.where(first, selective, full)
        self.more_s = np.where(first, full_s - selective_s, full_s)
        self.more_bytes = np.where(first, full - selective, full)
        self.full_bytes = full


class Basis:
    """What of `Figures` does not depend on who shares state: by option, for micro-batches of `size` samples."""

    def __init__(self, costs: CostModel, options: tuple[Option, ...], size: int) -> None:
        self.options = options
        self.size = np.full(len(options), size)
        self.per_node = np.array([option.per_node for option in options])
        self.kind = np.array([option.kind.number for option in options])
        plain = [costs.part("block", o.kind.node.id, o.tp, size) for o in options]
        self.block_s = np.array([part.total_s for part in plain])
        self.end_s = np.array([[_end_s(costs, o, size, *where) for o in options] for where in _ENDS])
        self.capacity = np.array([usable_bytes(costs.device(o.kind.node.id)) for o in options])
        self.lines = [[_line(costs, o, size, *where) for o in options] for where in _ENDS]
        middle = self.lines[MIDDLE]
        self.flight_bytes = np.array([[line.flight for line in row] for row in self.lines])
        self.kept_bytes = np.array([line.block_flight["none"] for line in middle])
        self.again = Ladder(
            [kinds_of(costs, o.kind.node.id, o.tp, size, 1, line) for o, line in zip(options, middle, strict=True)]
        )
        self.again_bytes = np.array([[line.again for line in row] for row in self.lines])
        near = np.array([hop_s(costs, o.kind.node.id, o.kind.node.id, size) for o in options])
        hops = np.array([[_hop_s(costs, here, there, size) for there in options] for here in options])
        self.near_s, self.hop_s = np.moveaxis(near, -1, 0), np.moveaxis(hops, -1, 0)


class Figures:
    """By option, for micro-batches of `size` samples; [4, O] where the place in the pipeline matters.

    Optimizer state is shared by `holders` replicas. `hop_s[:, i, j]` is what sending from stage i to stage j and
    getting back takes on another node, exposed and hidden beside computing; `near_s[:, i]` the same within its node.
    """

    def __init__(self, basis: Basis, costs: CostModel, holders: float, copies: int) -> None:
        self.options = options = basis.options
        self.size, self.per_node, self.kind = basis.size, basis.per_node, basis.kind
        self.block_s, self.end_s, self.capacity = basis.block_s, basis.end_s, basis.capacity
        self.flight_bytes, self.kept_bytes = basis.flight_bytes, basis.kept_bytes
        self.again, self.again_bytes = basis.again, basis.again_bytes
        self.near_s, self.hop_s = basis.near_s, basis.hop_s
        train, model = costs.job.train, costs.job.model
        self.recompute = train.recompute != "none"
        shared = 1.0 if train.sharding == "none" else holders
        self.empty_bytes = np.array([[line.empty(shared) for line in row] for row in basis.lines])
        self.block_bytes = np.array([line.per_block(shared) for line in basis.lines[MIDDLE]])
        # Blocks whose snapshots, and as much of other nodes' as they keep of ours, a unit's part of its host can hold.
        each = snapshot_bytes(unit_elements(model, 1, 1) / holders) * (1 + copies)
        self.host_blocks = np.array([o.kind.node.host_memory_bytes / o.per_node // each for o in options])
        self.holders = max(1, round(holders))
        self._units = [unit_elements(model, unit, 1) for unit in (1, 0, model.layers + 1)]
        self.block_gradient_bytes = 2.0 * self._units[0] * ELEMENT_BYTES[train.precision]
        update = [costs.update_s(o.kind.node.id, unit_elements(model, 1, o.tp) / shared) for o in options]
        self._update_s = np.array(update)

    def sync_s(self, costs: CostModel, reach: tuple[Kind, ...], *, within: bool) -> Floats:
        """[5, O]: seconds of exchange and update, of what a stage has beside its blocks by its place in the pipeline,
        and of each block; where pipelines stand on these kinds of node, or all of them `within` the same nodes, in
        slices. Round a ring the narrowest replica counts, and there will be one with a single device."""
        block_s, first_s, last_s = (self._unit_s(costs, reach, elements, within=within) for elements in self._units)
        last_s = last_s + first_s if costs.job.model.tie_embeddings else last_s
        return np.stack([np.zeros_like(block_s), first_s, last_s, first_s + last_s, block_s])

    def _unit_s(self, costs: CostModel, reach: tuple[Kind, ...], elements: int, *, within: bool) -> Floats:
        update_s: Floats = self._update_s * (elements / self._units[0])
        if self.holders < 2:
            return update_s
        num_bytes = float(elements * ELEMENT_BYTES[costs.job.train.precision])
        if within:
            own = [frozenset({(option.kind.node.id, option.tp)}) for option in self.options]
            halves = np.array([costs.half_exchange_s(members, self.holders, num_bytes) for members in own])
        else:
            nodes = [node_id for kind in reach for node_id in kind.nodes[:2]]
            half_s = costs.half_exchange_s(frozenset((node_id, 1) for node_id in nodes), self.holders, num_bytes)
            moved = num_bytes * (1 - 1 / self.holders)
            crowd_s = [moved * option.per_node / costs.node_rate(option.kind.node.id) for option in self.options]
            halves = np.maximum(half_s, np.array(crowd_s) if costs.are_apart(nodes) else 0.0)
        total: Floats = 2 * halves + update_s
        return total


_BY_OPTION = (
    *("size", "per_node", "kind", "block_s", "end_s", "capacity", "empty_bytes", "flight_bytes", "block_bytes"),
    *("kept_bytes", "again_bytes", "host_blocks", "near_s"),
)
_OF_LADDER = ("first_s", "first_bytes", "more_s", "more_bytes", "full_bytes")


def side_by_side(parts: Sequence[Figures]) -> Figures:
    """Figures of the same options for several sizes of micro-batches as if they were of as many more options, one size
    after the other; `hop_s` is [2, parts x O, O]: the next stage has the same size."""
    first = parts[0]
    if len(parts) == 1:
        return first
    found, found.again = copy.copy(first), copy.copy(first.again)
    for name in _BY_OPTION:
        setattr(found, name, np.concatenate([getattr(part, name) for part in parts], axis=-1))
    for name in _OF_LADDER:
        setattr(found.again, name, np.concatenate([getattr(part.again, name) for part in parts]))
    found.hop_s = np.concatenate([part.hop_s for part in parts], axis=1)
    return found


def _line(costs: CostModel, option: Option, size: int, first: bool, last: bool) -> StageBytes:
    train = costs.job.train
    return stage_bytes(costs.job.model, train.seq_len, train.precision, option.tp, size, embedding=first, head=last)


def _another(kind: Kind, node_id: str) -> str:
    return next((other for other in kind.nodes if other != node_id), node_id)


def _end_s(costs: CostModel, option: Option, size: int, first: bool, last: bool) -> float:
    return costs.stage(option.kind.node.id, option.tp, size, {}, embedding=first, head=last).total_s


def _hop_s(costs: CostModel, here: Option, there: Option, size: int) -> tuple[float, float]:
    return hop_s(costs, here.kind.node.id, _another(there.kind, here.kind.node.id), size)


def sizes_of(batch: int) -> Iterator[int]:
    """Micro-batch sizes that the search tries."""
    return (size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if size <= batch)
