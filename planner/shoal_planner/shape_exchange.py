"""What comes after the pipelines of a tiny cluster have run: summing gradients, the optimizer's step, gathering weights
and the vote, for all layers that their stages may hold at once.

Owns the sums over who holds what. What one exchange takes is asked from `predict`, as the prediction of a plan is.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from shoal_planner.chain_times import Bools, ChainTimes
from shoal_planner.loads import Holder, Segment
from shoal_planner.memory import snapshot_bytes, unit_elements
from shoal_planner.options import Floats, Ints
from shoal_planner.predict import Exchange, unit_exchange, vote_s
from shoal_planner.rows import AfterStage
from shoal_planner.shapes import Chain
from shoal_planner.stage_costs import Held

_ROUNDING = 1e-9  # that sums in another order may differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A pipeline on the nodes of its slots; by stage, the node and the degree of each replica."""

    chain: Chain
    nodes: tuple[str, ...]
    holders: tuple[tuple[tuple[str, int], ...], ...]


def placed_on(chain: Chain, nodes: tuple[str, ...]) -> Placed:
    holders = tuple(tuple((nodes[cell.slot], cell.tp) for cell in stage) for stage in chain.stages)
    return Placed(chain=chain, nodes=nodes, holders=holders)


Shape = tuple[Placed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """By the layers of each pipeline [K1, .., KP]: seconds after the pipelines; by pipeline and stage, of how many
    blocks it owns the optimizer state; and whether a host lacks memory for snapshots."""

    seconds: Floats
    blocks: dict[tuple[int, int], Floats]
    lacking: Bools


class Exchanges:
    """On one cluster for one job."""

    def __init__(self, times: ChainTimes, copies: int, *, ample_hosts: bool) -> None:
        self.times = times
        self._copies = copies
        self._ample_hosts = ample_hosts
        self.costs = times.costs
        self._tied = self.costs.job.model.tie_embeddings
        self._num_layers = times.num_layers
        self._exchanges: dict[tuple[int, tuple[tuple[str, int], ...]], Exchange] = {}
        self._update_s: dict[str, float] = {}
        self._votes_s: dict[frozenset[str], float] = {}
        self._nodes_lack: dict[frozenset[str], bool] = {}
        self._elements = [float(unit_elements(self.costs.job.model, unit, 1)) for unit in (0, 1, self._num_layers + 1)]

    def held(self, shape: Shape, pipeline: int) -> Held:
        """Who else holds what a pipeline holds, at most."""
        others = sum(max(other.chain.replicas) for p, other in enumerate(shape) if p != pipeline)
        return Held(others, len(self._firsts(shape)), len(self._lasts(shape)))

    def least_s(self, shape: Shape) -> float:
        """No layers do better. All blocks are exchanged by somebody in each pipeline, so its stages' seconds add up to
        all of them at least, and the longest stage takes the mean of its pipeline at least. In the same way all state
        is updated by somebody: at best everybody is at it for as long as the others."""
        block_s = min(
            self._exchange(1, tuple(itertools.chain.from_iterable(held))).seconds
            for held in itertools.product(*(placed.holders for placed in shape))
        )
        first_s = self._exchange(0, self._firsts(shape)).seconds
        last_s = self._exchange(self._num_layers + 1, self._lasts(shape)).seconds
        half_s = 0.0
        for placed in shape:
            stages = len(placed.chain.stages)
            times = 2 if self._tied and stages > 1 else 1
            half_s = max(half_s, (self._num_layers * block_s + times * first_s + last_s) / stages)
        return 2 * half_s + self._least_update_s(shape) + self._vote_s(shape)

    def _least_update_s(self, shape: Shape) -> float:
        total = self._elements[0] + self._num_layers * self._elements[1] + self._elements[2]
        if self.times.split:
            rate = sum(
                tp / self._per_element_s(node) for placed in shape for held in placed.holders for node, tp in held
            )
            return total / rate
        rates = [
            sum(min(tp / self._per_element_s(node) for node, tp in held) for held in placed.holders) for placed in shape
        ]
        return total / min(rates)

    def hosts_lack(self, shape: Shape) -> bool:
        """Whether hosts have no room for snapshots of all state, whoever holds which. Each pipeline owns its part of
        every block, at least as if each other one held it with its stage of most replicas."""
        if self._ample_hosts:
            return False
        if self.nodes_lack(frozenset(node for placed in shape for node in placed.nodes)):
            return True
        part = self._num_layers * self._elements[1] / sum(max(placed.chain.replicas) for placed in shape)
        return any(sum(self.host_elements(node) for node in placed.nodes) < part for placed in shape)

    def nodes_lack(self, nodes: frozenset[str]) -> bool:
        """Whether there is no room for snapshots of all state if these nodes own it: each no more than it and each of
        its backups have room for, and together no more than each host can keep of its own and as a backup."""
        if self._ample_hosts:
            return False
        if nodes not in self._nodes_lack:
            backups, most = self.costs.backups(self._copies), {node: self.host_elements(node) for node in nodes}
            room = sum(most.values())
            for host in self.costs.snapshot.nodes:
                elsewhere = (most[node] for node in nodes if host.id not in (node, *backups.get(node, ())))
                room = min(room, host.host_memory_bytes / snapshot_bytes(1.0) + sum(elsewhere))
            total = self._elements[0] + self._num_layers * self._elements[1] + self._elements[2]
            self._nodes_lack[nodes] = room < total * (1 - _ROUNDING)
        return self._nodes_lack[nodes]

    def host_elements(self, node: str) -> float:
        """Of how much optimizer state a node may be the owner, at most: it and its backups keep snapshots of that."""
        if self._ample_hosts:
            return math.inf
        hosts = (node, *self.costs.backups(self._copies).get(node, ()))
        return min(self.costs.node(host).host_memory_bytes for host in hosts) / snapshot_bytes(1.0)

    def lone_after(self, shape: Shape) -> list[AfterStage]:
        """By pipeline, where each stage has one replica: the least seconds of exchange and update, whatever layers the
        others hold."""
        held = self.shared_ends(shape)
        first_s = 2 * self._exchange(0, self._firsts(shape)).seconds
        last_s = 2 * self._exchange(self._num_layers + 1, self._lasts(shape)).seconds
        share = len(shape) if self.times.split else 1
        ways = [[some[0] for some in placed.holders] for placed in shape]
        found = []
        for p, mine in enumerate(ways):
            per_block, at_ends = np.zeros((len(mine), 2)), np.zeros((len(mine), 2))
            others = [way if q != p else [] for q, way in enumerate(ways)]
            for s, (node, tp) in enumerate(mine):
                others[p] = [(node, tp)]
                block_s = min(self._exchange(1, holders).seconds for holders in itertools.product(*others))
                owned = self.times.owned(shape[p].chain, s, held, np.array([0.0, 1.0 / share]))[0]
                each_s = self._per_element_s(node)
                per_block[s] = 2 * block_s, (owned[1] - owned[0]) * self.times.least_update_s(node)
                ends_s = first_s * (s == 0) + (last_s + first_s * (self._tied and s > 0)) * (s == len(mine) - 1)
                at_ends[s] = ends_s, owned[0] * each_s
            found.append(AfterStage(per_block=per_block, at_ends=at_ends))
        return found

    def vote_s(self, shape: Shape) -> float:
        return self._vote_s(shape)

    def after(self, shape: Shape, rows: list[Ints]) -> After:
        """Exact, for these layers [K, stages] of each pipeline."""
        count = len(shape)
        full = tuple(len(some) for some in rows)
        ends = [np.cumsum(some, axis=1) for some in rows]
        axes = [tuple(-1 if p == q else 1 for q in range(count)) for p in range(count)]
        low = [[(ends[p] - rows[p])[:, s].reshape(axes[p]) for s in range(rows[p].shape[1])] for p in range(count)]
        high = [[ends[p][:, s].reshape(axes[p]) for s in range(rows[p].shape[1])] for p in range(count)]
        spent: dict[tuple[int, int], Floats] = defaultdict(lambda: np.zeros(full))
        crowded: dict[str, Floats] = defaultdict(lambda: np.zeros(full))
        blocks: dict[tuple[int, int], Floats] = defaultdict(lambda: np.zeros(full))
        for stages in itertools.product(*(range(some.shape[1]) for some in rows)):
            places = list(enumerate(stages))
            upper = high[0][stages[0]]
            lower = low[0][stages[0]]
            for p, s in places[1:]:
                upper, lower = np.minimum(upper, high[p][s]), np.maximum(lower, low[p][s])
            shared = np.maximum(upper - lower, 0)
            holders = tuple(itertools.chain.from_iterable(shape[p].holders[s] for p, s in places))
            exchange = self._exchange(1, holders)
            for place in places:
                if exchange.seconds:
                    spent[place] += shared * exchange.seconds
                if self.times.split:
                    blocks[place] += shared / len(holders)
            for node, seconds in exchange.network_s:
                crowded[node] += shared * seconds
        self._add_ends(shape, spent, crowded)
        if not self.times.split:
            for p, some in enumerate(rows):
                for s in range(some.shape[1]):
                    blocks[p, s] = np.broadcast_to(some[:, s].reshape(axes[p]), full).astype(np.float64)
        half_s = np.zeros(full)
        for busy_s in itertools.chain(spent.values(), crowded.values()):
            np.maximum(half_s, busy_s, out=half_s)
        update_s, kept = self._owners(shape, blocks)
        lacking = np.zeros(full, dtype=bool)
        if not self._ample_hosts:
            lacking |= self._lacking(kept)
        return After(seconds=2 * half_s + update_s + self._vote_s(shape), blocks=dict(blocks), lacking=lacking)

    def _add_ends(self, shape: Shape, spent: dict[tuple[int, int], Floats], crowded: dict[str, Floats]) -> None:
        first, last = self._exchange(0, self._firsts(shape)), self._exchange(self._num_layers + 1, self._lasts(shape))
        for p, placed in enumerate(shape):
            end = len(placed.chain.stages) - 1
            spent[p, 0] += first.seconds
            spent[p, end] += last.seconds
            if self._tied and end:
                spent[p, end] += first.seconds
        for node, seconds in (*first.network_s, *last.network_s):
            crowded[node] += seconds

    def _owners(self, shape: Shape, blocks: dict[tuple[int, int], Floats]) -> tuple[Floats, dict[str, Floats]]:
        """Seconds of the longest update, and by node the elements of which it takes snapshots: of what is split among
        its holders all that its ranks own, else of each pipeline's whole state its part."""
        update_s, kept = np.zeros(()), dict[str, Floats]()
        share = 1.0 if self.times.split else 1.0 / len(shape)
        for (p, s), some in blocks.items():
            chain, ends = shape[p].chain, self.shared_ends(shape)
            owned, at_ends = (self.times.owned(chain, s, ends, blocks) for blocks in (some, np.zeros(1)))
            layers = np.rint(some * (len(shape) if self.times.split else 1)).astype(np.int64)
            for (node, tp), elements, fixed in zip(shape[p].holders[s], owned, at_ends, strict=True):
                update_s = np.maximum(
                    update_s,
                    self.times.update_s(node, elements, fixed, layers)
                    if self.times.away.any()
                    else elements * self._per_element_s(node),
                )
                if not self._ample_hosts:
                    kept[node] = kept.get(node, 0.0) + elements * tp * share
        return update_s, kept

    def _lacking(self, kept: dict[str, Floats]) -> Bools:
        """Whether some node has no room for its own snapshots and those of the nodes whose backup it is."""
        need = dict(kept)
        for node, others in self.costs.backups(self._copies).items():
            for other in others:
                if node in kept:
                    need[other] = need.get(other, 0.0) + kept[node]
        found: Bools = np.logical_or.reduce(
            [
                snapshot_bytes(1.0) * elements > self.costs.node(node).host_memory_bytes
                for node, elements in need.items()
            ]
        )
        return found

    def shared_ends(self, shape: Shape) -> Held:
        """By how many replicas the ends of the model are shared."""
        if not self.times.split:
            return Held(0, 1, 1)
        return Held(0, len(self._firsts(shape)), len(self._lasts(shape)))

    def _per_element_s(self, node: str) -> float:
        if node not in self._update_s:
            self._update_s[node] = self.costs.update_s(node, 1.0)
        return self._update_s[node]

    def _vote_s(self, shape: Shape) -> float:
        nodes = frozenset(node for placed in shape for node in placed.nodes)
        if nodes not in self._votes_s:
            self._votes_s[nodes] = vote_s(self.costs, sorted(nodes))
        return self._votes_s[nodes]

    def _firsts(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        """Who synchronises the embedding."""
        found = [placed.holders[0] for placed in shape]
        if self._tied:
            found += [placed.holders[-1] for placed in shape if len(placed.chain.stages) > 1]
        return tuple(itertools.chain.from_iterable(found))

    def _lasts(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        return tuple(itertools.chain.from_iterable(placed.holders[-1] for placed in shape))

    def _exchange(self, unit: int, holders: tuple[tuple[str, int], ...]) -> Exchange:
        key = (unit, holders)
        if key not in self._exchanges:
            named = tuple(Holder(0, 0, place, node, tp, 1.0) for place, (node, tp) in enumerate(holders))
            self._exchanges[key] = unit_exchange(Segment(first=unit, last=unit + 1, holders=named), self.costs)
        return self._exchanges[key]
