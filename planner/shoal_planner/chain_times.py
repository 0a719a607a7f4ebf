"""Seconds of one pipeline of a tiny cluster for every choice that it has: layers of its stages, micro-batch size and
number, shares of each micro-batch, and blocks that it must compute again to fit.

Owns the tables that the exact search sums up, each made once, and the choice behind an entry of one. Agrees with
`predict` and `score` to rounding: they judge what is found (test_planner_exact).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_planner.again import Mix, fulls, mixes, steps
from shoal_planner.costs import CostModel
from shoal_planner.hiding import hop_s
from shoal_planner.memory import OPTIMIZER_BYTES
from shoal_planner.options import Floats, Ints
from shoal_planner.profile import Part
from shoal_planner.shapes import Cell, Chain, Slots
from shoal_planner.shares import Shares, ways
from shoal_planner.stage_costs import Cost, Held, stage_cost

Bools = NDArray[np.bool_]
# What rounding may add to the bytes that `score` sums up in another order.
_ROUNDING = 1e-12
_ENDS: tuple[Part, Part] = ("embedding", "head")


class Choice(NamedTuple):
    """How a pipeline is run: size and number of micro-batches, the samples of each replica, and how many layers of each
    stage are computed again selectively and fully."""

    size: int
    number: int
    samples: tuple[int, ...]
    again: tuple[tuple[int, int], ...]


class ChainTimes:
    """On one cluster for one job. Every question is answered once."""

    def __init__(self, costs: CostModel, nodes: dict[int, tuple[str, ...]], away: float = 0.0) -> None:
        """`nodes` by their kind; `away`: the share of each stage's layers whose optimizer state is on hosts. Only where
        each stage has one replica."""
        self.costs = costs
        self._nodes = nodes
        self.num_layers = costs.job.model.layers
        counts = np.arange(self.num_layers + 1)
        self.away: Ints = np.ceil(away * counts).astype(np.int64)  # [L+1], by layers how many of them
        self._kept_share: Floats = 1 - self.away / np.maximum(counts, 1)
        self.batch = costs.job.train.global_batch
        self.split = costs.job.train.sharding != "none"
        self._costs: dict[tuple[int, int, bool, bool], Cost] = {}
        self._shares: dict[tuple[tuple[int, ...], bool], Shares] = {}
        self._rows: dict[int, Ints] = {}
        self._stages: dict[tuple[object, ...], Floats] = {}
        self._sends: dict[Chain, tuple[list[Floats], list[Floats], Floats]] = {}
        self._tables: dict[tuple[Chain, Held | None], Floats] = {}
        self._ample: dict[Chain, tuple[bool, ...]] = {}

    def rows(self, stages: int) -> Ints:
        """[K, stages]: all numbers of layers. Only the first and the last stage may hold none."""
        if stages not in self._rows:
            cuts = itertools.combinations_with_replacement(range(self.num_layers + 1), stages - 1)
            found = [np.diff((0, *some, self.num_layers)) for some in cuts]
            self._rows[stages] = np.array([row for row in found if row[1:-1].all()], dtype=np.int64)
        return self._rows[stages]

    def table(self, chain: Chain, held: Held) -> Floats:
        """[K, B+1]: the least seconds by layers and samples per step, inf where nothing fits. Exact where each stage
        has one replica; else a bound, for others may hold the same blocks less often than they can."""
        key = (chain, None if self.ample(chain) else held)
        if key not in self._tables:
            self._tables[key] = self.row_table(chain, held, self.rows(len(chain.stages)))
        return self._tables[key]

    def row_table(self, chain: Chain, held: Held, rows: Ints) -> Floats:
        """[K, B+1]: the same for these layers [K, S]."""
        values, shares = self._values(chain, rows, self.least_owned(chain, held), None if self.ample(chain) else held)
        found = np.full((len(rows), self.batch + 1), np.inf)
        if shares.least <= self.batch:
            found[:, shares.least :] = np.minimum.reduceat(values, shares.starts, axis=1)
        return found

    def least_owned(self, chain: Chain, held: Held) -> list[Floats]:
        """Elements of optimizer state [R, L+1] by stage, at least; exact where all stages have one replica."""
        return [self._owned(chain, s, held) for s in range(len(chain.stages))]

    def row(self, chain: Chain, layers: Ints, owned: list[Floats]) -> Floats:
        """[B+1]: the same for given layers where it is known what each replica owns."""
        values, shares = self._values(chain, layers[None], owned, None if self.ample(chain) else ())
        found = np.full(self.batch + 1, np.inf)
        if shares.least <= self.batch:
            found[shares.least :] = np.minimum.reduceat(values[0], shares.starts)
        return found

    def choice(self, chain: Chain, layers: Ints, owned: list[Floats], samples: int) -> Choice:
        """What takes the seconds of `row` for so many samples."""
        values, shares = self._values(chain, layers[None], owned, None if self.ample(chain) else ())
        begin = shares.starts[samples - shares.least]
        end = shares.starts[samples - shares.least + 1] if samples < self.batch else len(shares.ways)
        pair = begin + int(np.argmin(values[0, begin:end]))
        way, number = int(shares.ways[pair]), int(shares.numbers[pair])
        again = [(0, 0)] * len(chain.stages)
        if not self.ample(chain):
            for s in range(len(chain.stages)):
                mixes = self._again(chain, s, min(len(chain.stages) - s, number), owned[s], shares)
                seconds = [self._mixed_s(chain, s, shares, mix)[layers[s], way] for mix in mixes]
                again[s] = mixes[int(np.argmin(seconds))].at((int(layers[s]), way))
        return Choice(
            int(shares.size[way]), number, tuple(int(count) for count in shares.samples[:, way]), tuple(again)
        )

    def ample(self, chain: Chain) -> bool:
        """Whether memory binds nowhere, whatever the choice."""
        return all(self._ample_stages(chain))

    def _ample_stages(self, chain: Chain) -> tuple[bool, ...]:
        if chain not in self._ample:
            self._ample[chain] = tuple(
                all(self._most_bytes(chain, s, cell) <= self._cost(chain, s, cell).room_bytes for cell in stage)
                for s, stage in enumerate(chain.stages)
            )
        return self._ample[chain]

    def _most_bytes(self, chain: Chain, s: int, cell: Cell) -> float:
        cost = self._cost(chain, s, cell)
        owned = sum(cost.end_elements) + self.num_layers * cost.block_elements
        flight = (len(chain.stages) - s) * cost.flight_bytes[-1, -1]
        return float(cost.fixed_bytes[-1] + OPTIMIZER_BYTES * owned + flight + cost.once_bytes[-1])

    def network_s(self, chain: Chain) -> tuple[float, ...]:
        """By slot: seconds of the node's interfaces for each sample, where every stage has one replica."""
        crossed = [0] * len(chain.slots)
        for (here,), (there,) in itertools.pairwise(chain.stages):
            if here.slot != there.slot:
                crossed[here.slot] += 1
                crossed[there.slot] += 1
        per_sample = self.costs.activation_bytes(1)
        names = self.names(chain)
        return tuple(
            count * per_sample / self.costs.node_rate(name) for count, name in zip(crossed, names, strict=True)
        )

    def names(self, chain: Chain) -> tuple[str, ...]:
        return self.names_of(chain.slots)

    def node_of(self, kind: int, number: int = 0) -> str | None:
        """The first node of a kind or a later one; none if there are not so many."""
        return self._nodes[kind][number] if number < len(self._nodes[kind]) else None

    def names_of(self, slots: Slots) -> tuple[str, ...]:
        """A node for each slot: all nodes of a kind cost the same."""
        taken: dict[int, int] = {}
        found = []
        for slot in slots:
            place = taken[slot.kind] = taken.get(slot.kind, -1) + 1
            found.append(self._nodes[slot.kind][place])
        return tuple(found)

    def ends(self, chain: Chain, s: int) -> tuple[bool, bool]:
        return s == 0, s == len(chain.stages) - 1

    def owned(self, chain: Chain, s: int, held: Held, blocks: Floats) -> Floats:
        """Elements of optimizer state [R, L+1] of each replica of a stage that owns so many `blocks` [L+1]."""
        first, last = self.ends(chain, s)
        tied = self.costs.job.model.tie_embeddings and last
        found = []
        for cell in chain.stages[s]:
            cost = self._cost(chain, s, cell)
            embedding, head = cost.end_elements
            ends = (embedding / held.first if first or tied else 0.0) + (head / held.last if last else 0.0)
            found.append(ends + cost.block_elements * blocks)
        return np.array(found)

    def update_s(self, node: str, owned: Floats, ends: Floats, layers: Ints) -> Floats:
        """Seconds of updating so many elements, those at the `ends` among them, of stages of so many layers."""
        hosted = (owned - ends) * (1 - self._kept_share[layers])
        return (owned - hosted) * self.costs.update_s(node, 1.0) + hosted * self.costs.update_s(node, 1.0, 1.0)

    def least_update_s(self, node: str) -> float:
        """Of an element of a block, at least."""
        here_s, hosted_s = self.costs.update_s(node, 1.0), self.costs.update_s(node, 1.0, 1.0)
        share = float(self._kept_share[1:].max(initial=0.0))
        return min(share * here_s + (1 - share) * hosted_s, hosted_s if self.away.any() else here_s)

    def _on_device(self, owned: Floats) -> Floats:
        """[.., L+1]: of the elements by layers, those whose optimizer state is on the device."""
        ends = owned[..., :1]
        return ends + (owned - ends) * self._kept_share

    def _owned(self, chain: Chain, s: int, held: Held) -> Floats:
        """The least they may own: as many others as can hold the same blocks do."""
        counts = np.arange(self.num_layers + 1, dtype=np.float64)
        if not self.split:
            return self.owned(chain, s, Held(0, 1, 1), counts)
        return self.owned(chain, s, held, counts / (len(chain.stages[s]) + held.others))

    def _values(
        self, chain: Chain, rows: Ints, owned: list[Floats], key: tuple[int, ...] | None
    ) -> tuple[Floats, Shares]:
        """[K, pairs]: seconds of each choice. `key` names what is owned, for tables that others can use too; empty: no
        others can; None: memory binds nowhere."""
        shares = self._ways(chain)
        send_s, hidden_s, network_s = self._send_s(chain)
        stages, ample, ahead = len(chain.stages), self._ample_stages(chain), any(some.any() for some in hidden_s)
        values = np.empty((len(rows), len(shares.ways)))
        # The number of micro-batches in flight decides what fits. In a stage it grows up to the number of those from
        # there to the last one, so it stops where it does in the first stage that memory binds in.
        widest = stages - ample.index(False) if key is not None else 0
        for most in range(min(1, widest), widest + 1):
            columns = _columns(shares.numbers, most, widest)
            if not len(columns):
                continue
            total = np.zeros((len(rows), len(shares.size)))
            slowest = np.zeros_like(total)
            for s in reversed(range(stages)):
                flights = min(stages - s, most)
                bound = None if ample[s] else key
                time = self._stage_s(chain, s, flights, owned[s], bound, shares)[rows[:, s]]
                total += time
                if s < len(send_s):
                    time = time + send_s[s] - np.minimum(hidden_s[s], time)
                    total += send_s[s]
                np.maximum(slowest, time, out=slowest)
                if ahead:  # one more in flight only when one is back
                    np.maximum(slowest, total / (stages - s), out=slowest)
            ways, numbers = shares.ways[columns], shares.numbers[columns]
            with np.errstate(invalid="ignore"):  # 0 x inf: of what does not fit, one micro-batch does not either
                found = total[:, ways] + (numbers - 1) * slowest[:, ways]
            found = np.where(np.isnan(found), np.inf, found)
            values[:, columns] = np.maximum(found, numbers * network_s[ways])
        return values, shares

    def _stage_s(
        self, chain: Chain, s: int, flights: int, owned: Floats, key: tuple[int, ...] | None, shares: Shares
    ) -> Floats:
        """[L+1, Q]: seconds of the slowest replica of a stage, inf beyond memory."""
        known = self._stage_key(chain, s, flights, key)
        if known is not None and known in self._stages:
            return self._stages[known]
        mixes = (None,) if key is None else self._again(chain, s, flights, owned, shares)
        found: Floats = np.minimum.reduce([self._mixed_s(chain, s, shares, mix) for mix in mixes])
        if known is not None:
            self._stages[known] = found
        return found

    def _mixed_s(self, chain: Chain, s: int, shares: Shares, mix: Mix | None) -> Floats:
        """[L+1, Q]: seconds of the slowest replica of a stage that computes so many layers again."""
        found = np.zeros((self.num_layers + 1, len(shares.size)))
        for place, cell in enumerate(chain.stages[s], sum(chain.replicas[:s])):
            cost, samples = self._cost(chain, s, cell), shares.samples[place]
            time = cost.plain_s[:, samples]
            if mix is not None:
                time = time + mix.seconds(cost.kinds.of(samples))
            np.maximum(found, time, out=found)
        return found

    def _stage_key(self, chain: Chain, s: int, flights: int, key: tuple[int, ...] | None) -> tuple[object, ...] | None:
        """Stages of different pipelines are alike where the samples of their replicas are."""
        if key == ():
            return None
        cells = tuple((chain.slots[cell.slot].kind, cell.tp) for cell in chain.stages[s])
        alone = max(chain.replicas) == 1
        counts: tuple[object, ...] = () if alone else (chain.replicas, s, self._ordered(chain))
        return (cells, self.ends(chain, s), counts, 0 if key is None else flights, key)

    def _again(self, chain: Chain, s: int, flights: int, owned: Floats, shares: Shares) -> tuple[Mix, Mix]:
        """[L+1, Q]: how many layers must be computed again so that all replicas of the stage fit, inf where they never
        do. Recomputation costs time and nothing else, so the least is best."""
        begin = sum(chain.replicas[:s])
        layers = np.arange(self.num_layers + 1.0)[:, None]
        climbed, full = np.zeros((2, self.num_layers + 1, len(shares.size)))
        for place, cell in enumerate(chain.stages[s], begin):
            cost, samples = self._cost(chain, s, cell), shares.samples[place]
            state = cost.fixed_bytes + OPTIMIZER_BYTES * self._on_device(owned[place - begin])
            climbing, fully = self._wanted(cost, state, flights)
            np.maximum(climbed, climbing[:, samples], out=climbed)
            np.maximum(full, fully[:, samples], out=full)
        return self._mixes(climbed, full, layers)

    def _wanted(self, cost: Cost, state: Floats, flights: int) -> tuple[Floats, Floats]:
        """[L+1, B+1]: steps up the ladder, and full ones, that make room beside so many bytes of state [L+1]."""
        layers = np.arange(self.num_layers + 1.0)[:, None]
        room = cost.room_bytes * (1 - _ROUNDING) - state[:, None]
        over = flights * cost.flight_bytes + cost.once_bytes - room
        over = np.where(over > 0, over + cost.again_bytes, 0.0)
        kinds = cost.kinds._replace(
            selective_bytes=flights * cost.kinds.selective_bytes, full_bytes=flights * cost.kinds.full_bytes
        )
        return steps(over, layers, kinds), fulls(over, kinds)

    def _mixes(self, climbed: Floats, full: Floats, layers: Floats) -> tuple[Mix, Mix]:
        """None are computed again where the job says so."""
        if self.costs.job.train.recompute == "none":
            climbed, full = (np.where(counts > 0, np.inf, 0.0) for counts in (climbed, full))
        return mixes(climbed, full, layers)

    def _send_s(self, chain: Chain) -> tuple[list[Floats], list[Floats], Floats]:
        """By stage but the last, seconds [Q] that its slowest sender or receiver is at it, and those of them that may
        go on beside computing; and the seconds [Q] that the busiest node's interfaces need for a micro-batch."""
        if chain not in self._sends:
            names, shares = self.names(chain), self._ways(chain)
            busy = {name: np.zeros(len(shares.size)) for name in names}
            found, hidden = [], []
            for s, (here, there) in enumerate(itertools.pairwise(chain.stages)):
                begin = sum(chain.replicas[:s])
                leaving = [np.zeros((2, len(shares.size))) for _ in here]  # in all, and exposed
                arriving = [np.zeros((2, len(shares.size))) for _ in there]
                for i, j in itertools.product(range(len(here)), range(len(there))):
                    rows = shares.overlaps[begin + i, begin + len(here) + j]
                    source, target = names[here[i].slot], names[there[j].slot]
                    seconds = self._both_ways_s(source, target)[:, rows]
                    leaving[i] += seconds
                    arriving[j] += seconds
                    if source != target:
                        moved = self.costs.activation_bytes(1) * rows
                        busy[source] += moved
                        busy[target] += moved
                whole_s, exposed_s = np.maximum.reduce([*leaving, *arriving])
                found.append(whole_s)
                hidden.append(whole_s - exposed_s)
            network = [moved / self.costs.node_rate(name) for name, moved in busy.items()]
            self._sends[chain] = (found, hidden, np.maximum.reduce(network))
        return self._sends[chain]

    def _both_ways_s(self, source: str, target: str) -> Floats:
        """[2, B+1], by samples: seconds to the next stage and back, and what of them computing cannot hide. Nothing is
        sent for none."""
        hops = [hop_s(self.costs, source, target, samples) for samples in range(1, self.batch + 1)]
        return np.array(
            [[0.0, *(exposed_s + hidden_s for exposed_s, hidden_s in hops)], [0.0, *(hop[0] for hop in hops)]]
        )

    def _ordered(self, chain: Chain) -> bool:
        """Whether the replicas are equal and alone, so that any order of their shares costs the same."""
        kinds = {(chain.slots[cell.slot], cell.tp) for cell in chain.stages[0]}
        return len(chain.stages) == 1 and len(kinds) == 1 and len(chain.stages[0]) > 1

    def _ways(self, chain: Chain) -> Shares:
        alone = max(chain.replicas) == 1
        key = ((1,) * len(chain.stages) if alone else chain.replicas, self._ordered(chain))
        if key not in self._shares:
            self._shares[key] = ways(*key, self.batch)
        return self._shares[key]

    def _cost(self, chain: Chain, s: int, cell: Cell) -> Cost:
        return self.end_cost(chain.slots[cell.slot].kind, cell.tp, *self.ends(chain, s))

    def end_cost(self, kind: int, tp: int, first: bool, last: bool) -> Cost:
        """Of a replica in such a place."""
        key = (kind, tp, first, last)
        if key not in self._costs:
            self._costs[key] = stage_cost(self.costs, self._nodes[kind][0], tp, first, last)
        return self._costs[key]

    def never_binds(self, cost: Cost) -> bool:
        """Whether a device has memory for all layers of as many stages as there may be."""
        owned = sum(cost.end_elements) + self.num_layers * cost.block_elements
        flight = (self.num_layers + 2) * cost.flight_bytes[-1, -1]
        return bool(cost.fixed_bytes[-1] + OPTIMIZER_BYTES * owned + flight + cost.once_bytes[-1] <= cost.room_bytes)

    def lone_owned(self, cost: Cost, ends: tuple[bool, bool], held: Held) -> Floats:
        """[L+1]: elements of optimizer state that a rank of a stage of one replica owns."""
        share = Held(0, 1, 1) if not self.split else held
        tied = self.costs.job.model.tie_embeddings and ends[1]
        embedding, head = cost.end_elements
        owned = (embedding / share.first if ends[0] or tied else 0.0) + (head / share.last if ends[1] else 0.0)
        return np.asarray(owned + cost.block_elements * np.arange(self.num_layers + 1.0) / (1 + share.others))

    def lone_s(self, cost: Cost, ends: tuple[bool, bool], held: Held, flights: int) -> Floats:
        """[L+1, B]: least seconds of a stage of one replica by layers and size of micro-batches, of which so many are
        in flight; inf beyond memory."""
        layers = np.arange(self.num_layers + 1.0)[:, None]
        state = cost.fixed_bytes + OPTIMIZER_BYTES * self._on_device(self.lone_owned(cost, ends, held))
        climbed, full = (some[:, 1:] for some in self._wanted(cost, state, flights))
        kinds = cost.kinds.of(np.arange(1, self.batch + 1))
        one, other = (mix.seconds(kinds) for mix in self._mixes(climbed, full, layers))
        least_s = cost.plain_s[:, 1:] + np.minimum(one, other)
        found: Floats = np.minimum.accumulate(least_s[::-1], axis=0)[::-1]  # more layers never take less
        return found

    def least_s(self, kind: int, tp: int) -> tuple[float, float, float]:
        """Least seconds per sample of a block, the embedding and the head."""
        node, counts = self._nodes[kind][0], np.arange(1, self.batch + 1)
        cost = stage_cost(self.costs, node, tp, False, False)
        block_s = (cost.plain_s[1] - cost.plain_s[0])[1:] / counts
        ends = [[self.costs.part(part, node, tp, int(rows)).total_s / rows for rows in counts] for part in _ENDS]
        return float(block_s.min()), min(ends[0]), min(ends[1])


def _columns(numbers: Ints, most: int, widest: int) -> Ints:
    """The pairs with so many micro-batches in flight at most; 0: all."""
    if most == 0:
        return np.arange(len(numbers))
    return np.flatnonzero(numbers >= most if most == widest else numbers == most)
