"""Mends a running plan: pipelines whose devices are all there stay as they are, layers and all; the rest is made new.

Owns what is tried: broken pipelines without what they lost or with spares in its place, new pipelines from all that is
free (`remainder`), and units of a pipeline that cannot live on handed to others. Every try deals the samples anew over
all pipelines. Tries are counted, so the same plan and cluster give the same answer. What is made new takes the place of
what was broken: owners of optimizer state follow each other in the order of the pipelines, so the others keep theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shoal_planner.again import Mix
from shoal_planner.costs import CostModel
from shoal_planner.dealing import deal
from shoal_planner.dividing import paced
from shoal_planner.finish import Common, Finisher, Table, Unit, Word, pipeline_of
from shoal_planner.plan import Pipeline, Plan, Sharding, Stage
from shoal_planner.remainder import Pace, remainder_words
from shoal_planner.standing import Broken, Standing, word_of

# A mended plan that gets this part of what the running one got out of its devices is not worth a search.
GOOD_ENOUGH = 0.95
_AS_GOOD = 0.965  # of that, what a plan gets that needs no better layers either
_RELAID, _FAR = 1, 1.2  # that try is made where what is there is not further from good enough
_SCORED = 3  # of all tries
# In plans of so many units and devices everything is tried; in larger ones nothing more than what is good enough.
_FEW_UNITS, _FEW_DEVICES = 100, 500
_NEAR_BOUND = 1.06  # of the least possible, where a search takes no time to speak of
_SLACK = 1.02  # by so much new pipelines may be longer at the exchange than those that stay

Slot = Pipeline | Word  # a pipeline that stays, or units for a new one
Slots = tuple[Slot, ...]
_Layers = tuple[int, Mix]  # of a stage, and how many of them are computed again
Consider = Callable[[Plan], float]  # scores a plan: its seconds, inf if it does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """An estimate of a plan's step, and how to make it."""

    seconds: float
    make: Callable[[], Plan]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Of a pipeline that stays: seconds of its slowest stage, of a micro-batch through all, and of its exchange."""

    period_s: float
    fill_s: float
    sync_s: float

    def done(self, time_s: float, size: int) -> float:
        """Samples within a time, the exchange not counted."""
        return max(0, math.floor((time_s - self.fill_s) / self.period_s) + 1) * size


def mend(standing: Standing, costs: CostModel, finisher: Finisher, consider: Consider) -> bool:
    """Scores mended plans; whether one of them is so good that nothing better need be searched for."""
    mender = Mender(standing, costs, finisher)
    found: list[Mended] = []
    for number, tries in enumerate((mender.near, mender.relaid, mender.remade, mender.handed)):
        if mender.is_large and number == _RELAID and (not found or found[0].seconds > mender.wanted_s * _FAR):
            continue
        found.extend(mended for slots in tries() if (mended := mender.fitted(slots)) is not None)
        found.sort(key=lambda mended: mended.seconds)
        enough_s = mender.wanted_s * (_AS_GOOD if number < _RELAID else 1.0)
        while mender.is_large and found and found[0].seconds <= enough_s:
            if consider(found.pop(0).make()) <= mender.wanted_s:
                return True
    return min((consider(mended.make()) for mended in found[:_SCORED]), default=math.inf) <= mender.wanted_s


class Mender:
    """What can be made of what stands; every question is answered once."""

    def __init__(self, standing: Standing, costs: CostModel, finisher: Finisher) -> None:
        self.standing = standing
        self.costs = costs
        self.finisher = finisher
        self.kept = tuple(pipeline for _, pipeline in standing.kept)
        self._clocks: dict[tuple[object, ...], _Clock | None] = {}
        self._tables: dict[tuple[_Clock, int], Table] = {}
        self._nodes = {node.id for node in costs.snapshot.nodes}
        units = [unit for pipeline in self.kept for unit in word_of(pipeline)]
        self.is_large = len(units) > _FEW_UNITS or sum(unit.tp for unit in units) > _FEW_DEVICES
        self._running = self._running_clocks()
        self.wanted_s = self._wanted_s()

    # --- the pace so far ---

    def _running_clocks(self) -> list[tuple[Pipeline, _Clock]]:
        if not self.kept:
            return []
        words = tuple(word_of(pipeline) for pipeline in self.kept)
        common = Common(self.standing.num_pipelines, self.finisher.reach(words), np.inf)
        clocks = ((pipeline, self._clock(pipeline, common)) for pipeline in self.kept)
        return [(pipeline, clock) for pipeline, clock in clocks if clock is not None]

    def _running_s(self) -> float:
        """About the running plan's step."""
        return max(
            clock.fill_s + (pipeline.micro_batches - 1) * clock.period_s for pipeline, clock in self._running
        ) + max(clock.sync_s for _, clock in self._running)

    def _wanted_s(self) -> float:
        """The step of a plan that gets out of all devices, those that were idle before left out, what the pipelines
        that stay got out of theirs in the running plan; 0 if none stays. Few devices may suit each other better than
        more did, so with these it must come near to what is possible at all."""
        if not self._running:
            return 0.0
        power = sum(self._power(unit.node, unit.tp) for pipeline, _ in self._running for unit in word_of(pipeline))
        samples = sum(pipeline.samples for pipeline, _ in self._running)
        per_power = samples / self._running_s() / power
        wanted_s = self.finisher.batch / (per_power * self._all_power()) / GOOD_ENOUGH
        return wanted_s if self.is_large else min(wanted_s, self._bound_s() * _NEAR_BOUND)

    def _bound_s(self) -> float:
        """No plan is faster: all devices that were not idle compute all the time."""
        layers, sizes = self.costs.job.model.layers, self.finisher.sizes
        return self.finisher.batch / sum(
            count / (layers * min(self.costs.part("block", node_id, 1, size).total_s / size for size in sizes))
            for node_id, count in self._available()
        )

    def _all_power(self) -> float:
        return sum(self._power(node_id, count) for node_id, count in self._available())

    def _available(self) -> Iterator[tuple[str, int]]:
        """Nodes and numbers of their devices, without those that were idle before."""
        units = [unit for pipeline in self.kept for unit in word_of(pipeline)]
        units += [unit for broken in self.standing.broken for unit in broken.rest()]
        yield from ((unit.node, unit.tp) for unit in units)
        yield from ((node_id, len(self.standing.free[node_id])) for node_id in self.standing.joined)

    def _power(self, node_id: str, devices: int) -> float:
        """Blocks a second."""
        return devices / self.costs.part("block", node_id, 1, 1).total_s

    # --- what is tried ---

    def near(self) -> Iterator[Slots]:
        """Broken pipelines live on, or are left out, and nobody else's layers change."""
        if self.standing.broken:
            patched = self._patched()
            yield self._arranged(patched)
            yield self._arranged({})
            if len(patched) > 1:
                yield self._arranged({min(patched): tuple(itertools.chain.from_iterable(patched.values()))})

    def relaid(self) -> Iterator[Slots]:
        """Broken pipelines live on, and all get the layers that suit their number now."""
        yield tuple(_word(slot) for slot in self._arranged(self._patched()))

    def remade(self) -> Iterator[Slots]:
        """New pipelines from all that is free, and from all that is left over by pipelines that live on."""
        free = _devices(self.standing.free, (unit for broken in self.standing.broken for unit in broken.rest()))
        for words in self._new_words(free):
            yield self._arranged({}, words)
        patched = self._patched()
        if patched and (joined := self.standing.new_devices(patched.values())):
            for words in self._new_words(joined):
                yield self._arranged(patched, words)

    def _new_words(self, devices: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[Word, ...]]:
        if not self._running:
            return
        alike = [word_of(pipeline) for pipeline in self.kept] + [broken.word for broken in self.standing.broken]
        there = [tuple(unit for unit in word if self._known(unit)) for word in alike]
        sync_s = max(clock.sync_s for _, clock in self._running)
        sizes = Counter(pipeline.micro_batch for pipeline in self.kept)

        def done(time_s: float) -> float:
            return sum(clock.done(time_s - sync_s, pipeline.micro_batch) for pipeline, clock in self._running)

        pace = Pace(step_s=self._running_s(), sync_s=sync_s * _SLACK, done=done, holders=self.standing.num_pipelines)
        common = tuple(size for size, _ in sizes.most_common(2))
        yield from remainder_words(devices, tuple(there), self.costs, common, pace)

    def handed(self) -> Iterator[Slots]:
        """Units of what is broken, and new ones, go to pipelines that are whole: to one, to some, or to all."""
        loose = [unit for broken in self.standing.broken for unit in broken.rest()]
        patched = self._patched()
        without, beside = self._joined_units({}), self._joined_units(patched)
        for slots, units in ((self._arranged({}), [*loose, *without]), (self._arranged(patched), beside)):
            if slots and units:
                for most in sorted({1, 4, len(slots)}):
                    yield self._handed_out(slots, units, most)

    def _arranged(self, words: Mapping[int, Word], others: tuple[Word, ...] = ()) -> Slots:
        """All that stays, and these by their places; others in the places of what is broken, and then behind."""
        slots: dict[int, Slot] = dict(self.standing.kept)
        slots.update({place: word for place, word in words.items() if word})
        free = [broken.place for broken in self.standing.broken if broken.place not in slots]
        slots.update(zip(itertools.chain(free, itertools.count(self.standing.num_pipelines)), others, strict=False))
        return tuple(slots[place] for place in sorted(slots))

    def _patched(self) -> dict[int, Word]:
        """Broken pipelines without what they lost, with free devices like its neighbours' in its place if there are."""
        free = {node_id: list(devices) for node_id, devices in self.standing.free.items()}
        found = {}
        for broken in self.standing.broken:
            units = [
                unit if alive else self._spare(broken, at, free)
                for at, (unit, alive) in enumerate(zip(broken.word, broken.alive, strict=True))
            ]
            found[broken.place] = tuple(unit for unit in units if unit is not None)
        return {place: word for place, word in found.items() if word}

    def _spare(self, broken: Broken, at: int, free: dict[str, list[int]]) -> Unit | None:
        """In the place of a lost unit, of whose node nothing is known any more: like the next one of its degree."""
        tp = broken.word[at].tp
        there = [
            (abs(place - at), unit.node)
            for place, (unit, alive) in enumerate(zip(broken.word, broken.alive, strict=True))
            if alive and unit.tp == tp
        ]
        if not there:
            return None
        kind = self.costs.kind(min(there)[1])
        fitting = [
            (len(devices), node_id)
            for node_id, devices in free.items()
            if len(devices) >= tp and self.costs.kind(node_id) == kind
        ]
        if not fitting:
            return None
        node_id = min(fitting)[1]
        taken, free[node_id] = free[node_id][:tp], free[node_id][tp:]
        return Unit(node_id, tuple(taken))

    def _joined_units(self, words: Mapping[int, Word]) -> list[Unit]:
        """New devices that these words do not use, in units as most of their kind have them."""
        degrees: dict[int, Counter[int]] = {}
        for pipeline in self.kept:
            for unit in word_of(pipeline):
                degrees.setdefault(self.costs.kind(unit.node), Counter())[unit.tp] += 1
        found: list[Unit] = []
        for node_id, devices in self.standing.new_devices(words.values()).items():
            kind = self.costs.kind(node_id)
            if kind in degrees:
                tp = degrees[kind].most_common(1)[0][0]
                found.extend(Unit(node_id, devices[at : at + tp]) for at in range(0, len(devices) - tp + 1, tp))
        return found

    def _handed_out(self, slots: Slots, units: list[Unit], most: int) -> Slots:
        """Each unit behind others like it, in turn in one of so many pipelines that have some."""
        words: dict[int, Word] = {}
        turn: Counter[tuple[int, int]] = Counter()
        for unit in units:
            key = self._key(unit)
            places = [at for at, slot in enumerate(slots) if any(self._key(own) == key for own in _word(slot))][:most]
            if places:
                at = places[turn[key] % len(places)]
                turn[key] += 1
                word = words.get(at, _word(slots[at]))
                last = max(place for place, own in enumerate(word) if self._key(own) == key)
                words[at] = (*word[: last + 1], unit, *word[last + 1 :])
        return tuple(words.get(at, slot) for at, slot in enumerate(slots))

    def _key(self, unit: Unit) -> tuple[int, int]:
        return self.costs.kind(unit.node), unit.tp

    def _known(self, unit: Unit) -> bool:
        return unit.node in self._nodes

    # --- how good it is ---

    def fitted(self, slots: Slots) -> Mended | None:
        """With the samples dealt so that all finish alike; None if something does not fit."""
        finisher, batch = self.finisher, self.finisher.batch
        if not slots or len(slots) > batch or self._num_devices(slots) < self.costs.job.limits.min_devices:
            return None
        common = Common(len(slots), finisher.reach(tuple(_word(slot) for slot in slots)), np.inf)
        slots = tuple(self._stays(slot, common) for slot in slots)
        if not any(isinstance(slot, Pipeline) for slot in slots):
            return self._remade(tuple(_word(slot) for slot in slots))
        columns = self._columns(slots, common)
        dealt = deal([table.seconds for table, _ in columns], batch) if columns else None
        if dealt is None:
            return None
        sizes = [int(table.sizes[samples]) for (table, _), samples in zip(columns, dealt, strict=True)]
        time_s = max(float(table.seconds[samples]) for (table, _), samples in zip(columns, dealt, strict=True))
        sync_s = max(table.sync_s[size] for (table, _), size in zip(columns, sizes, strict=True))

        def make() -> Plan:
            parts = zip(slots, sizes, dealt, columns, strict=True)
            return self._plan(
                tuple(self._pipeline(slot, size, samples // size, limit) for slot, size, samples, (_, limit) in parts)
            )

        return Mended(seconds=time_s + sync_s, make=make)

    def _remade(self, words: tuple[Word, ...]) -> Mended | None:
        draft = self.finisher.draft(words)
        return None if draft is None else Mended(seconds=draft.seconds, make=lambda: self.finisher.plan(draft))

    def _plan(self, pipelines: tuple[Pipeline, ...]) -> Plan:
        sharding = Sharding(optimizer="none" if self.costs.job.train.sharding == "none" else "cluster")
        return Plan(pipelines=pipelines, copies=self.finisher.copies, sharding=sharding)

    def _stays(self, slot: Slot, common: Common) -> Slot:
        """A pipeline whose memory no longer suffices, as fewer share its optimizer state, gets its layers anew."""
        return slot if isinstance(slot, tuple) or self._clock(slot, common) is not None else word_of(slot)

    def _pipeline(self, slot: Slot, size: int, number: int, common: Common) -> Pipeline:
        if isinstance(slot, Pipeline):
            return slot if slot.micro_batches == number else dataclasses.replace(slot, micro_batches=number)
        split = self.finisher.split(slot, self.finisher.key(slot), size, number, common)
        assert split is not None, "it fitted with more micro-batches in flight"
        return pipeline_of(slot, size, number, split)

    def _columns(self, slots: Slots, common: Common) -> list[tuple[Table, Common]]:
        """The table of each slot, and what bounds its layers: no exchange shall be longer than those that stay."""
        clocks = {at: clock for at, slot in enumerate(slots) if (clock := self._staying(slot, common)) is not None}
        bounded = common._replace(most_sync_s=max(clock.sync_s for clock in clocks.values()) * _SLACK)
        rates: list[float] = []
        limits: list[Common] = []
        for at, slot in enumerate(slots):
            if isinstance(slot, Pipeline):
                rates.append(slot.micro_batch / clocks[at].period_s)
                limits.append(common)
                continue
            key = self.finisher.key(slot)
            rate = self.finisher.rate(slot, key, bounded)
            limits.append(bounded if rate else common)
            rates.append(rate or self.finisher.rate(slot, key, common))
        if not all(rates):
            return []
        found: list[tuple[Table, Common]] = []
        for at, (slot, rate, limit) in enumerate(zip(slots, rates, limits, strict=True)):
            if isinstance(slot, Pipeline):
                table = self._table(clocks[at], slot.micro_batch)
            else:
                share = self.finisher.batch * rate / sum(rates)
                table = self.finisher.table(slot, self.finisher.key(slot), limit, share)
            found.append((table, limit))
        return found

    def _staying(self, slot: Slot, common: Common) -> _Clock | None:
        return self._clock(slot, common) if isinstance(slot, Pipeline) else None

    def _table(self, clock: _Clock, size: int) -> Table:
        known = (clock, size)
        if known not in self._tables:
            batch = self.finisher.batch
            numbers = np.arange(1, batch // size + 1)
            seconds, sizes = np.full(batch + 1, np.inf), np.zeros(batch + 1, dtype=np.int64)
            seconds[numbers * size] = clock.fill_s + (numbers - 1) * clock.period_s
            sizes[numbers * size] = size
            self._tables[known] = Table(seconds=seconds, sizes=sizes, sync_s={size: clock.sync_s})
        return self._tables[known]

    def _clock(self, pipeline: Pipeline, common: Common) -> _Clock | None:
        """With the layers that it has; None if they do not fit, with any number of micro-batches."""
        word = word_of(pipeline)
        layers = tuple(_counts(stage) for stage in pipeline.stages)
        key = (self.finisher.key(word), layers, pipeline.micro_batch, common)
        if key not in self._clocks:
            self._clocks[key] = self._timed(pipeline, word, layers, common)
        return self._clocks[key]

    def _timed(self, pipeline: Pipeline, word: Word, layers: tuple[_Layers, ...], common: Common) -> _Clock | None:
        exposed_s, hidden_s, sync_s = [], [], 0.0
        size, number = pipeline.micro_batch, max(pipeline.micro_batches, len(word))
        for s, (count, again) in enumerate(layers):
            stage = self.finisher.stage(word, s, size, number, common)
            if again.saved(stage.kinds) < stage.over[count] or not np.isfinite(stage.seconds[count]):
                return None
            exposed_s.append(float(stage.plain_s(count) + again.seconds(stage.kinds)))
            hidden_s.append(float(stage.hidden_s[count]))
            sync_s = max(sync_s, float(stage.sync_s[count]))
        period_s, fill_s = paced(np.array(exposed_s), np.array(hidden_s))
        return _Clock(float(period_s), float(fill_s), sync_s)

    def _num_devices(self, slots: Slots) -> int:
        return sum(unit.tp for slot in slots for unit in _word(slot))


def _counts(stage: Stage) -> _Layers:
    counts = stage.recomputed()
    return stage.num_layers, Mix(counts["selective"], counts["full"])


def _word(slot: Slot) -> Word:
    return word_of(slot) if isinstance(slot, Pipeline) else slot


def _devices(free: Mapping[str, tuple[int, ...]], units: Iterable[Unit]) -> dict[str, tuple[int, ...]]:
    """By node, these and those of the units."""
    found = {node_id: list(devices) for node_id, devices in free.items()}
    for unit in units:
        found.setdefault(unit.node, []).extend(unit.devices)
    return {node_id: tuple(sorted(devices)) for node_id, devices in found.items()}
