"""From pipelines with devices to a plan: layers, recomputation, micro-batch sizes and numbers, each as good as it gets.

Owns the exact choice of layers within a pipeline and the dealing of samples to pipelines; what pipelines there are
comes in as words (`assembly`). Whether the plan fits and what it takes is asked from `score` afterwards.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_planner.again import Kinds, Mix, cheapest, kinds_of, marked
from shoal_planner.costs import CostModel
from shoal_planner.dealing import deal
from shoal_planner.dividing import Divisions, divisions
from shoal_planner.hiding import hop_s
from shoal_planner.memory import ELEMENT_BYTES, snapshot_bytes, stage_bytes, unit_elements, usable_bytes
from shoal_planner.options import Floats, Ints, sizes_of
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage

_SYNC_STEP = 0.85  # by so much the bound on the exchange is lowered each time
_HOPELESS = 1.1  # larger micro-batches are not tried beyond this


class Unit(NamedTuple):
    """Devices of one node that run a stage together."""

    node: str
    devices: tuple[int, ...]

    @property
    def tp(self) -> int:
        return len(self.devices)


Word = tuple[Unit, ...]  # the units of a pipeline, from first stage to last
Key = tuple[tuple[int, int, int], ...]
_Divided = dict[tuple[tuple[int, ...], bytes, bool], Divisions | None]  # by stages, what is allowed, and whether once


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Layers of each stage, how many of them are computed again selectively and fully, and the seconds that follow: of
    the slowest stage, of one micro-batch through all of them, and of what is exchanged afterwards."""

    layers: tuple[int, ...]
    again: tuple[tuple[int, int], ...]
    period_s: float
    fill_s: float
    sync_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Seconds by number of layers, inf beyond memory, with the layers computed again for them: `over` bytes are then
    missing otherwise, and `kinds` says what each layer gives back. What of sending on computing hides is `hidden_s`,
    by layers, too: for that only the first micro-batch waits. `sync_s` is the exchange after the step, and the update,
    which is all there is without a way to reach others."""

    seconds: Floats
    hidden_s: Floats
    over: Floats
    again: Mix
    kinds: Kinds
    sync_s: Floats
    least: int

    def plain_s(self, count: int) -> float:
        """Without what is computed again."""
        return float(self.seconds[count] - Mix(*self.again.at(count)).seconds(self.kinds))


class Reach(NamedTuple):
    """Seconds of an exchange: of a block, and of what the stages with the first and the last of them have beside."""

    block_s: float
    first_s: float
    last_s: float

    def at_least(self, other: Reach) -> Reach:
        return Reach(*map(max, self, other))


class Common(NamedTuple):
    """What pipelines of a plan have in common: how many hold each layer, what its exchange among them takes as far as
    the links go, and how long a stage may be at it. `crowds` are kinds of node and what the exchange takes where most
    stages share a node's network interfaces."""

    holders: int
    reach: Reach
    most_sync_s: float
    crowds: tuple[tuple[int, Reach], ...] = ()

    def reach_of(self, kind: int) -> Reach:
        """What it takes of a stage on a node of this kind."""
        return self.reach.at_least(dict(self.crowds).get(kind, self.reach))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Pipelines with their keys, samples and micro-batch sizes; `seconds` is an estimate of the step, `sync_s` what of
    it goes to the exchange at its end."""

    seconds: float
    sync_s: float
    words: tuple[Word, ...]
    keys: tuple[Key, ...]
    samples: tuple[int, ...]
    sizes: tuple[int, ...]
    common: Common


class Finisher:
    """On one cluster for one job. Every question is answered once."""

    def __init__(self, costs: CostModel, copies: int) -> None:
        self.costs = costs
        self.copies = copies
        train = costs.job.train
        self.batch = train.global_batch
        self.num_layers = costs.job.model.layers
        self._counts = np.arange(self.num_layers + 1.0)
        self.sizes = tuple(sizes_of(self.batch))
        self._stages: dict[tuple[object, ...], _Stage] = {}  # with no way to reach others
        self._reaching: dict[tuple[tuple[object, ...], Reach], _Stage] = {}
        self._splits: dict[tuple[Key, int, int, Common], Split | None] = {}
        self._divided: _Divided = {}

    def draft(self, words: tuple[Word, ...], hopeless_s: float = np.inf) -> Draft | None:
        """How these pipelines share out the batch best, and about how long that takes; none if they do not fit.

        All exchange gradients at the end and update their state, and the longest counts, so it pays to bound that for
        all alike: ever lower bounds are tried for as long as the step gets hardly longer, and not at all where it takes
        more than `hopeless_s` even without the exchange.
        """
        if not words or len(words) > self.batch:
            return None
        keys = tuple(self.key(word) for word in words)
        best = self._draft(words, keys, self._common(words))
        if best is None or best.seconds - best.sync_s > hopeless_s:
            return best
        common = best.common
        found: Draft | None = best
        while found is not None:
            found = self._draft(words, keys, common._replace(most_sync_s=found.sync_s * _SYNC_STEP))
            if found is None or found.seconds > best.seconds * _HOPELESS:
                break
            best = found if found.seconds < best.seconds else best
        return best

    def least_sync_s(self, words: tuple[Word, ...]) -> float:
        """Seconds of the exchange of these pipelines, however their layers are split: of as many blocks as some stage
        has at least."""
        common = self._common(words)

        def block_s(unit: Unit) -> float:
            return common.reach_of(self.costs.kind(unit.node)).block_s

        return max(-(-self.num_layers // len(word)) * min(map(block_s, word)) for word in words)

    def _common(self, words: tuple[Word, ...]) -> Common:
        return Common(len(words), self.reach(words), np.inf, self._crowds(words))

    def _draft(self, words: tuple[Word, ...], keys: tuple[Key, ...], common: Common) -> Draft | None:
        one_of = dict(zip(keys, words, strict=True))
        rate = {key: self.rate(word, key, common) for key, word in one_of.items()}
        if not all(rate.values()):
            return None
        total = sum(rate[key] for key in keys)
        tables = {key: self.table(word, key, common, self.batch * rate[key] / total) for key, word in one_of.items()}
        dealt = deal([tables[key].seconds for key in keys], self.batch)
        if dealt is None:
            return None
        seconds = max(float(tables[key].seconds[samples]) for key, samples in zip(keys, dealt, strict=True))
        sizes = tuple(int(tables[key].sizes[samples]) for key, samples in zip(keys, dealt, strict=True))
        sync_s = max(tables[key].sync_s[size] for key, size in zip(keys, sizes, strict=True))
        return Draft(
            seconds=seconds + sync_s,
            sync_s=sync_s,
            words=words,
            keys=keys,
            samples=dealt,
            sizes=sizes,
            common=common,
        )

    def plan(self, draft: Draft) -> Plan:
        """With the layers that suit the numbers of micro-batches, and no longer an exchange than was drafted."""
        pipelines = []
        common = draft.common._replace(most_sync_s=min(draft.common.most_sync_s, draft.sync_s))
        for word, key, samples, size in zip(draft.words, draft.keys, draft.samples, draft.sizes, strict=True):
            split = self.split(word, key, size, samples // size, common)
            assert split is not None, "it fitted with more micro-batches in flight"
            pipelines.append(pipeline_of(word, size, samples // size, split))
        sharding = Sharding(optimizer="none" if self.costs.job.train.sharding == "none" else "cluster")
        return Plan(pipelines=tuple(pipelines), copies=self.copies, sharding=sharding)

    def key(self, word: Word) -> Key:
        """Equal for words that cost the same: kinds, degrees, and which units share a node."""
        names: dict[str, int] = {}
        return tuple((self.costs.kind(unit.node), unit.tp, names.setdefault(unit.node, len(names))) for unit in word)

    def reach(self, words: tuple[Word, ...]) -> Reach:
        """Of summing gradients and gathering weights, as far as all pipelines share them."""
        if len(words) < 2:
            return Reach(0.0, 0.0, 0.0)
        ways = {tuple(unit.node for unit in word) for word in words}
        if len(ways) == 1:  # slices of the same nodes: nobody else holds what they hold
            groups = [frozenset({(unit.node, unit.tp)}) for unit in words[0]]
        else:
            by_kind: dict[int, set[str]] = {}
            for node_id in sorted({node_id for way in ways for node_id in way}):
                some = by_kind.setdefault(self.costs.kind(node_id), set())
                if len(some) < 2:
                    some.add(node_id)
            groups = [frozenset((node_id, 1) for some in by_kind.values() for node_id in some)]

        def seconds(num_bytes: float) -> float:
            return 2 * max(self.costs.half_exchange_s(group, len(words), num_bytes) for group in groups)

        block_s, first_s, last_s = (seconds(num_bytes) for num_bytes in self._unit_bytes())
        return Reach(block_s, first_s, last_s + (first_s if self.costs.job.model.tie_embeddings else 0.0))

    def _crowds(self, words: tuple[Word, ...]) -> tuple[tuple[int, Reach], ...]:
        """As in `Common`. Slices of a node that hold the same layers leave it once."""
        ways = Counter(tuple(unit.node for unit in word) for word in words)
        if len(ways) < 2 or not self.costs.are_apart([node_id for way in ways for node_id in way]):
            return ()
        slices = min(ways.values())
        units = Counter(node_id for way, count in ways.items() for node_id in way for _ in range(count))
        most: dict[int, float] = {}
        for node_id, count in units.items():
            kind = self.costs.kind(node_id)
            per_byte_s = 2 * (1 - 1 / len(words)) * count / slices / self.costs.node_rate(node_id)
            most[kind] = max(most.get(kind, 0.0), per_byte_s)
        sizes = self._unit_bytes()
        return tuple((kind, Reach(*(size * per_byte_s for size in sizes))) for kind, per_byte_s in sorted(most.items()))

    def _unit_bytes(self) -> tuple[float, float, float]:
        """Of a block, the first unit and the last one."""
        model, size = self.costs.job.model, ELEMENT_BYTES[self.costs.job.train.precision]
        block, first, last = (float(unit_elements(model, unit, 1) * size) for unit in (1, 0, model.layers + 1))
        return block, first, last

    def rate(self, word: Word, key: Key, common: Common) -> float:
        split = self.split(word, key, 1, max(1, self.batch // common.holders), common)
        return 0.0 if split is None else 1 / split.period_s

    def table(self, word: Word, key: Key, common: Common, share: float) -> Table:
        """Seconds by number of samples, and with which micro-batches."""
        seconds = np.full(self.batch + 1, np.inf)
        sizes = np.zeros(self.batch + 1, dtype=np.int64)
        sync_s: dict[int, float] = {}
        best_s = np.inf
        for size in self.sizes:
            number = max(1, round(share / size))
            # More in flight than any number of micro-batches asks for: what fits so fits always.
            split = self.split(word, key, size, max(number, len(word)), common)
            if split is None:
                break  # what has no room for these has none for larger ones
            numbers = np.arange(1, self.batch // size + 1)
            times = split.fill_s + (numbers - 1) * split.period_s
            sync_s[size] = split.sync_s
            better = times < seconds[numbers * size]
            seconds[numbers[better] * size] = times[better]
            sizes[numbers[better] * size] = size
            typical_s = split.fill_s + (share / size - 1) * split.period_s
            if typical_s > best_s * _HOPELESS:
                break
            best_s = min(best_s, typical_s)
        return Table(seconds=seconds, sizes=sizes, sync_s=sync_s)

    def split(self, word: Word, key: Key, size: int, number: int, common: Common) -> Split | None:
        """The layers with the least time of so many micro-batches."""
        known = (key, size, number, common)
        if known not in self._splits:
            stages = [self.stage(word, s, size, number, common) for s in range(len(word))]
            self._splits[known] = split_layers(stages, self.num_layers, number, common.most_sync_s, self._divided)
        return self._splits[known]

    def stage(self, word: Word, s: int, size: int, number: int, common: Common) -> _Stage:
        unit, ends = word[s], (s == 0, s == len(word) - 1)
        in_flight = min(len(word) - s, number)
        onward = None if ends[1] else (self.costs.kind(word[s + 1].node), word[s + 1].node == unit.node)
        holders, kind = common.holders, self.costs.kind(unit.node)
        reach = common.reach_of(kind)
        known = (kind, unit.tp, size, ends, in_flight, onward, holders)
        if (known, reach) not in self._reaching:
            if known not in self._stages:
                hop = (0.0, 0.0) if ends[1] else hop_s(self.costs, unit.node, word[s + 1].node, size)
                self._stages[known] = self._figures(unit, size, ends, in_flight, hop, holders)
            alone = self._stages[known]
            reach_s = self._counts * reach.block_s + ends[0] * reach.first_s + ends[1] * reach.last_s
            self._reaching[known, reach] = dataclasses.replace(alone, sync_s=alone.sync_s + reach_s)
        return self._reaching[known, reach]

    def _figures(
        self, unit: Unit, size: int, ends: tuple[bool, bool], in_flight: int, hop: tuple[float, float], holders: int
    ) -> _Stage:
        costs, train, model = self.costs, self.costs.job.train, self.costs.job.model
        block_s = costs.part("block", unit.node, unit.tp, size).total_s
        exposed_s, hidden_s = hop
        fixed_s = costs.stage(unit.node, unit.tp, size, {}, embedding=ends[0], head=ends[1]).total_s
        line = stage_bytes(model, train.seq_len, train.precision, unit.tp, size, embedding=ends[0], head=ends[1])
        shared = 1 if train.sharding == "none" else holders
        room = usable_bytes(costs.device(unit.node)) - line.empty(shared) - in_flight * line.flight
        kinds = kinds_of(costs, unit.node, unit.tp, size, in_flight, line)
        counts = self._counts
        over: Floats = counts * (line.per_block(shared) + in_flight * line.block_flight["none"]) - room
        over = np.where(over > 0, over + line.again, 0.0)
        again = cheapest(over, counts, kinds)
        host = costs.node(unit.node)
        each = snapshot_bytes(unit_elements(model, 1, 1) / holders) * (1 + self.copies)
        on_host = counts * each <= host.host_memory_bytes * unit.tp / host.devices
        fits = ((over == 0) | (train.recompute != "none")) & on_host
        busy_s = fixed_s + counts * block_s + again.seconds(kinds)
        hidden = np.minimum(hidden_s, busy_s)
        seconds = np.where(fits, busy_s + (exposed_s + hidden_s - hidden), np.inf)
        middle = not (ends[0] or ends[1])
        held = line.end_elements + counts * unit_elements(model, 1, unit.tp)
        return _Stage(
            seconds=seconds,
            hidden_s=hidden,
            over=over,
            again=again,
            kinds=kinds,
            sync_s=held * costs.update_s(unit.node, 1.0 / shared),
            least=1 if middle or all(ends) else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """By number of samples (index 0 is not used): seconds, inf where it cannot be, and the micro-batch size; by that
    size, the seconds of the exchange."""

    seconds: Floats
    sizes: Ints
    sync_s: dict[int, float]


def split_layers(
    stages: list[_Stage], num_layers: int, number: int, most_sync_s: float, known: _Divided | None = None
) -> Split | None:
    """The least seconds of so many micro-batches. No stage gets more layers than it exchanges in `most_sync_s`.
    `known`: what was found before, which hardly ever depends on the number of micro-batches or on the bound."""
    allowed = None  # [P, L+1]
    if most_sync_s < np.inf:
        allowed = np.stack([stage.sync_s for stage in stages]) <= most_sync_s * (1 + 1e-9)
    known = {} if known is None else known
    # Stages that differ in nothing but their exchange have the same array.
    key = (tuple(id(stage.seconds) for stage in stages), b"" if allowed is None else allowed.tobytes(), number == 1)
    if key not in known:
        known[key] = _divisions(stages, num_layers, allowed, once=number == 1)
    found = known[key]
    if found is None:
        return None
    at = found.best(number)
    layers = found.layers[at].tolist()
    return Split(
        layers=tuple(layers),
        again=tuple(stage.again.at(count) for stage, count in zip(stages, layers, strict=True)),
        period_s=float(found.period_s[at]),
        fill_s=float(found.fill_s[at]),
        sync_s=max(float(stage.sync_s[count]) for stage, count in zip(stages, layers, strict=True)),
    )


def _divisions(
    stages: list[_Stage], num_layers: int, allowed: NDArray[np.bool_] | None, *, once: bool
) -> Divisions | None:
    times = np.maximum.accumulate(np.stack([stage.seconds for stage in stages]), axis=1)  # [P, L+1]
    if allowed is not None:
        times = np.where(allowed, times, np.inf)
    hidden = np.stack([stage.hidden_s for stage in stages]) if any(stage.hidden_s.any() for stage in stages) else None
    return divisions(times, np.array([stage.least for stage in stages]), num_layers, hidden, once=once)


def pipeline_of(word: Word, size: int, number: int, split: Split) -> Pipeline:
    first, stages = 0, []
    for unit, count, again in zip(word, split.layers, split.again, strict=True):
        replica = Replica(node=unit.node, devices=unit.devices, tp=unit.tp, samples=size)
        recompute, overrides = marked(first, first + count, *again)
        stages.append(
            Stage(layers=((first, first + count),), replicas=(replica,), recompute=recompute, overrides=overrides)
        )
        first += count
    return Pipeline(micro_batch=size, micro_batches=number, stages=tuple(stages))
