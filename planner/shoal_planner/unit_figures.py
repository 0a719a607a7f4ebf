"""What stages of one replica take, as arrays over units: devices of a kind of node with a degree of tensor parallelism.

Owns the figures that bounds on many pipelines at once are made of. Figures of one pipeline are in `chain_times`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shoal_planner.chain_times import ChainTimes
from shoal_planner.hiding import hop_s
from shoal_planner.memory import ELEMENT_BYTES, unit_elements
from shoal_planner.options import Floats, Ints
from shoal_planner.rows import AfterStage
from shoal_planner.shapes import Chain, Rooms
from shoal_planner.stage_costs import Held

# Where a stage stands: in the middle, last, first, both.
_ENDS = ((False, False), (False, True), (True, False), (True, True))


def ends_of(stages: int) -> Ints:
    """[S]: where each stage of a pipeline stands."""
    found = np.zeros(stages, dtype=np.int64)
    found[0] += 2
    found[-1] += 1
    return found


class Hops(NamedTuple):
    """Seconds of passing a micro-batch on to the next stage and of getting it back: what computing does not hide, at
    least, and the rest, for which the first one waits all the same."""

    exposed_s: Floats
    hidden_s: Floats


class UnitFigures:
    """On one cluster for one job; U units, B sizes of micro-batches from 1 up."""

    def __init__(
        self, times: ChainTimes, rooms: Rooms, degrees: tuple[int, ...], host_elements: dict[int, float]
    ) -> None:
        """`host_elements`: by kind, the optimizer state that a node may own for its host's sake."""
        self.times, self._rooms, self._host_elements = times, rooms, host_elements
        self.units = [(kind, tp) for kind, room in sorted(rooms.items()) for tp in degrees if tp <= room.devices]
        self.number = {unit: number for number, unit in enumerate(self.units)}
        self._costs = [[times.end_cost(*unit, *ends) for ends in _ENDS] for unit in self.units]
        plain = np.array([[cost.plain_s[:2, 1:] for cost in some] for some in self._costs])
        self.block_s: Floats = plain[:, 0, 1] - plain[:, 0, 0]  # [U, B]
        self.end_s: Floats = plain[:, :, 0]  # [U, 4, B]
        places = {kind: place for place, kind in enumerate(sorted(rooms))}
        self._places = np.array([places[kind] for kind, _ in self.units])
        self._own_hop = np.array([self._hop_s(kind, kind, own=True) for kind in places])  # [N, 2, B] within a node
        self._hop_of = np.array([[self._hop_s(a, b, own=False) for b in places] for a in places])  # [N, N, 2, B]
        self.ample = all(times.never_binds(cost) for some in self._costs for cost in some) and all(
            map(math.isinf, host_elements.values())
        )
        self._stages: dict[tuple[int, int], Floats] = {}
        self._after: dict[int, tuple[Floats, Floats]] = {}

    def _hop_s(self, here: int, there: int, *, own: bool) -> Floats:
        """[2, B]: exposed and hidden."""
        costs, counts = self.times.costs, np.arange(1, self.times.batch + 1)
        node, other = self.times.node_of(here), self.times.node_of(there, 0 if own or here != there else 1)
        if node is None or other is None:
            return np.array([np.full(len(counts), np.inf), np.zeros(len(counts))])
        return np.array([hop_s(costs, node, other, int(samples)) for samples in counts]).T

    def hops(self, here: Ints, there: Ints, same: Ints) -> Hops:
        """[.., B]: from these units to those, and back; `same`: on the same node."""
        a, b = self._places[here], self._places[there]
        found = np.where(same[..., None, None], self._own_hop[a], self._hop_of[a, b])
        return Hops(found[..., 0, :], found[..., 1, :])

    def held(self, count: int) -> Held:
        """As many as may share the ends of the model where there are so many pipelines."""
        return Held(count - 1, count * (2 if self.times.costs.job.model.tie_embeddings else 1), count)

    def stage_s(self, count: int, flights: int) -> Floats:
        """[U, 4, L+1, B]: seconds of a stage where there are so many pipelines, and so many micro-batches in flight."""
        key = (count, 1 if self.ample else flights)
        if key not in self._stages:
            held = self.held(count)
            found = np.array(
                [
                    [self.times.lone_s(cost, ends, held, key[1]) for cost, ends in zip(some, _ENDS, strict=True)]
                    for some in self._costs
                ]
            )
            for number, unit in enumerate(self.units):
                for end, ends in enumerate(_ENDS):
                    found[number, end, self._host_layers(unit, ends, count) + 1 :] = np.inf
            self._stages[key] = found
        return self._stages[key]

    def _host_layers(self, unit: tuple[int, int], ends: tuple[bool, bool], count: int) -> int:
        """Layers whose snapshots the host has room for, where there are so many pipelines; -1: not even the ends."""
        kind, tp = unit
        owned = self.times.lone_owned(self.times.end_cost(kind, tp, *ends), ends, self.held(count))
        share = 1.0 if self.times.split else 1.0 / count
        return int((owned * tp * share <= self._host_elements[kind]).sum()) - 1

    def most_layers(self, types: Ints, count: int, flights: Ints, sizes: Ints) -> Floats:
        """[E, S, Q]: that stages of pipelines of these units [E, S] have memory for, -1 if not for the ends; with
        `flights` [S, Q] micro-batches of these sizes [Q] in flight."""
        every = [np.isfinite(self.stage_s(count, number)).sum(axis=2) - 1.0 for number in _upto(flights)]
        ends = ends_of(types.shape[1])[None, :, None]
        found: Floats = np.stack(every)[flights[None] - 1, types[:, :, None], ends, sizes - 1]
        return found

    def tables(self, types: Ints, count: int, flights: Ints, sizes: Ints) -> Floats:
        """[E, S, L+1, Q]: seconds of their stages without sending."""
        flights = np.ones_like(flights) if self.ample else flights
        every = np.stack([self.stage_s(count, number) for number in _upto(flights)])
        layers = np.arange(every.shape[3])[:, None]
        ends = ends_of(types.shape[1])[None, :, None, None]
        found: Floats = every[flights[None, :, None] - 1, types[:, :, None, None], ends, layers, sizes - 1]
        return found

    def after_stage(self, chain: Chain, count: int) -> AfterStage:
        """At least, whoever the others are where there are so many pipelines."""
        blocks, ends = self.after(count)
        units = [self.number[chain.slots[cell.slot].kind, cell.tp] for (cell,) in chain.stages]
        return AfterStage(per_block=blocks[units], at_ends=ends[units, ends_of(len(units))])

    def after(self, count: int) -> tuple[Floats, Floats]:
        """[U, 2] and [U, 4, 2]: seconds of exchange and update at least, of each block and of the ends."""
        if count not in self._after:
            found = [self._after_of(kind, tp, count) for kind, tp in self.units]
            blocks, ends = zip(*found, strict=True)
            self._after[count] = (np.array(blocks), np.array(ends))
        return self._after[count]

    def _after_of(self, kind: int, tp: int, count: int) -> tuple[Floats, Floats]:
        times, costs = self.times, self.times.costs
        model, tied = costs.job.model, costs.job.model.tie_embeddings
        held, units = self.held(count) if times.split else Held(0, 1, 1), (1, 0, model.layers + 1)
        # A tied embedding is shared by last stages, too; how many is not known here, so they are not counted.
        block_s, first_s, last_s = (2 * self._half_s(kind, tp, count, unit) for unit in units)
        node = times.node_of(kind) or ""
        each_s = (times.least_update_s(node), *[costs.update_s(node, 1.0)] * 2)
        block, own_first, own_last = (
            unit_elements(model, unit, tp) / share * seconds
            for unit, share, seconds in zip(units, (1 + held.others, held.first, held.last), each_s, strict=True)
        )
        first, last = np.array([first_s, own_first]), np.array([last_s, own_last])
        return np.array([block_s, block]), np.array([np.zeros(2), last + first if tied else last, first, first + last])

    def _half_s(self, kind: int, tp: int, count: int, unit: int) -> float:
        """The least that half an exchange of a unit of the model takes, whoever the others are. What interfaces need is
        no part of that: where links are measured as faster, it is not spent on blocks exchanged within the node."""
        if count < 2:
            return 0.0
        costs, node = self.times.costs, self.times.node_of(kind) or ""
        num_bytes = unit_elements(costs.job.model, unit, 1) * ELEMENT_BYTES[costs.job.train.precision]
        found = math.inf
        if self._rooms[kind].devices >= tp + count - 1:
            found = costs.half_exchange_s(frozenset({(node, tp)}), count, num_bytes)
        for other, other_tp in self.units:
            name = self.times.node_of(other, 1 if other == kind else 0)
            if name is not None:
                found = min(found, costs.half_exchange_s(frozenset({(node, tp), (name, other_tp)}), count, num_bytes))
        return found


def _upto(flights: Ints) -> range:
    return range(1, int(flights.max()) + 1)
