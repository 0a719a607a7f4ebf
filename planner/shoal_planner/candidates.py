"""Pipelines as the search sees them: an ordered tuple of units, priced as a table of seconds by number of samples.

Owns the reduction of a whole plan to pipelines that can be priced one by one: a plan takes as long as its slowest
pipeline, and a pipeline's own exchange of gradients is priced by how many pipelines there are. Does not own which
pipelines are tried (`layouts`, `heuristic`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.deal import deal, least_time
from shoal_planner.job import JobSpec
from shoal_planner.memory import ELEMENT_BYTES, GRADIENT_BYTES, held_elements, stage_memory, usable_bytes
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.split import Floats, Ints, StageCost, pipeline_seconds, split_layers

MICRO_BATCH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64)
# Splits are searched for so many numbers of micro-batches per size; others use the split of the next larger one.
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Unit:
    """`len(devices)` devices of one node that run a stage together. Units of one `kind` cost the same."""

    kind: int
    node: str
    devices: tuple[int, ...]

    @property
    def tp(self) -> int:
        return len(self.devices)


Word = tuple[Unit, ...]  # the units of a pipeline, from first stage to last
_WordKey = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A pipeline's best seconds for each number of samples (index 0 unused), and how: its micro-batch size by number of
    samples, and per size the layers by number of micro-batches minus one."""

    seconds: Floats
    sizes: Ints
    layers: dict[int, NDArray[np.int16]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A set of pipelines with the estimate of its step, and the samples that each pipeline runs (none: not dealt)."""

    seconds: float
    words: tuple[Word, ...]
    samples: tuple[int, ...] = ()


class Pricer:
    """Prices words on one cluster, each once. `sizes` are the micro-batch sizes that it may choose from; once it is
    `late`, only the first one is looked at, which needs the least memory."""

    def __init__(
        self,
        costs: CostModel,
        sizes: tuple[int, ...] = MICRO_BATCH_SIZES,
        max_splits: int = MAX_SPLITS,
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.costs = costs
        self.job: JobSpec = costs.job
        self.sizes = tuple(size for size in sizes if size <= self.job.train.global_batch)
        self.max_splits = max_splits
        self.late = late
        self.coarse = max_splits < MAX_SPLITS
        self.num_estimates = 0
        self._tables: dict[tuple[_WordKey, int], Table] = {}
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._rates: dict[int, float] = {}
        # One for all words without room: there may be many, and a large batch makes tables large.
        blank = np.full(self.job.train.global_batch + 1, np.inf)
        self._unfit = Table(seconds=blank, sizes=np.zeros(len(blank), dtype=np.int64), layers={})
        self._spread = len(costs.snapshot.nodes) > 1

    def table(self, word: Word, num_pipelines: int) -> Table:
        key = (word_key(word), num_pipelines)
        if key not in self._tables:
            self._tables[key] = self._table(word, num_pipelines)
        return self._tables[key]

    def estimate(self, words: tuple[Word, ...]) -> float:
        """A bound from below on `price`, and most often equal to it. Inf if some pipeline does not fit."""
        self.num_estimates += 1
        tables = tuple(self.table(word, len(words)).seconds for word in words)
        return least_time(tables, self.job.train.global_batch)

    def floor(self, words: tuple[Word, ...]) -> float:
        """A cheap bound from below on `estimate`: all units busy with blocks at their best rate, and nothing else."""
        rate = sum(self._rate(unit) for word in words for unit in word)
        return self.job.train.global_batch * self.job.model.layers / rate

    def _rate(self, unit: Unit) -> float:
        """Blocks of one sample per second."""
        if unit.kind not in self._rates:
            self._rates[unit.kind] = max(
                size / self.costs.part("block", unit.node, unit.tp, size).total_s for size in self.sizes
            )
        return self._rates[unit.kind]

    def price(self, words: tuple[Word, ...]) -> Candidate | None:
        """The best candidate with these pipelines; None if they do not fit or cannot share out the batch."""
        tables = tuple(self.table(word, len(words)).seconds for word in words)
        found = deal(tables, self.job.train.global_batch)
        return None if found is None else Candidate(seconds=found[0], words=words, samples=found[1])

    def plan(self, candidate: Candidate, copies: int) -> Plan:
        pipelines = []
        for word, samples in zip(candidate.words, candidate.samples, strict=True):
            table = self.table(word, len(candidate.words))
            size = int(table.sizes[samples])
            counts = table.layers[size][samples // size - 1]
            pipelines.append(_pipeline(word, size, samples // size, [int(count) for count in counts]))
        return Plan(pipelines=tuple(pipelines), copies=copies)

    def stages(self, word: Word, num_pipelines: int, size: int) -> tuple[StageCost, ...]:
        """The stages of a pipeline for micro-batches of this size."""
        found = []
        for index, unit in enumerate(word):
            first, last = index == 0, index == len(word) - 1
            onward = None if last else word[index + 1]
            next_key = (onward.kind, onward.node == unit.node) if onward else None
            key = (unit.kind, num_pipelines, size, first, last, next_key)
            if key not in self._stages:
                self._stages[key] = self._stage(unit, num_pipelines, size, first=first, onward=onward)
            found.append(self._stages[key])
        return tuple(found)

    def _table(self, word: Word, num_pipelines: int) -> Table:
        batch, num_layers = self.job.train.global_batch, self.job.model.layers
        seconds = np.full(batch + 1, np.inf)
        sizes = np.zeros(batch + 1, dtype=np.int64)
        layers: dict[int, NDArray[np.int16]] = {}
        for size in self.sizes:
            if size > 1 and (not layers or self.late()):
                break  # what has no room for one sample has none for more
            stages = self.stages(word, num_pipelines, size)
            numbers = np.arange(1, batch // size + 1)
            tried = _thinned(batch // size, self.max_splits)
            splits = split_layers(stages, num_layers, tried)
            nearest = np.searchsorted(tried, numbers)
            if not np.isfinite(splits.seconds).any():
                continue
            layers[size] = splits.layers.astype(np.int16)[nearest]
            fits = np.isfinite(splits.seconds[nearest])
            times = np.where(fits, pipeline_seconds(stages, splits.layers[nearest], numbers), np.inf)
            better = times < seconds[numbers * size]
            if size > 1 and self.coarse and not better.any():
                break  # larger micro-batches only lengthen fill and drain from here on
            seconds[numbers[better] * size] = times[better]
            sizes[numbers[better] * size] = size
        return Table(seconds=seconds, sizes=sizes, layers=layers) if layers else self._unfit

    def _stage(self, unit: Unit, num_pipelines: int, size: int, *, first: bool, onward: Unit | None) -> StageCost:
        costs, model, node_id, tp = self.costs, self.job.model, unit.node, unit.tp
        last = onward is None
        send_s = 2 * costs.send_s(node_id, onward.node, size) if onward else 0.0
        sync = [
            self._sync_s(unit, num_pipelines, held_elements(model, tp, layers, embedding=first, head=last))
            for layers in (0, 1)
        ]
        # Bytes are linear in layers and in micro-batches in flight: three points give all coefficients.
        empty, flight, layer = (
            self._bytes(unit, num_pipelines, size, layers, in_flight, first=first, last=last)
            for layers, in_flight in ((0, 0), (0, 1), (1, 0))
        )
        both = self._bytes(unit, num_pipelines, size, 1, 1, first=first, last=last)
        return StageCost(
            per_layer_s=costs.part("block", node_id, tp, size).total_s,
            fixed_s=costs.stage(node_id, tp, size, {}, embedding=first, head=last).total_s + send_s,
            sync_per_layer_s=sync[1] - sync[0],
            sync_fixed_s=sync[0],
            capacity_bytes=usable_bytes(costs.device(node_id)),
            layer_bytes=layer - empty,
            fixed_bytes=empty,
            flight_layer_bytes=both - layer - flight + empty,
            flight_fixed_bytes=flight - empty,
            least=0 if first != last else 1,
        )

    def _bytes(
        self, unit: Unit, num_pipelines: int, size: int, layers: int, in_flight: int, *, first: bool, last: bool
    ) -> float:
        train, model = self.job.train, self.job.model
        owned = held_elements(model, unit.tp, layers, embedding=first, head=last) / num_pipelines
        return stage_memory(
            model,
            train.seq_len,
            train.precision,
            tp=unit.tp,
            samples=size,
            in_flight=in_flight,
            layers={"none": layers},
            embedding=first,
            head=last,
            owned=owned,
        ).total

    def _sync_s(self, unit: Unit, num_pipelines: int, elements: int) -> float:
        """Reduction, update and gather of what a rank holds, when all units of its node exchange at once."""
        node = self.costs.node(unit.node)
        share = (num_pipelines - 1) / num_pipelines
        num_bytes = elements * share * (GRADIENT_BYTES + ELEMENT_BYTES[self.job.train.precision])
        rate = node.inter_bytes_per_s * node.nics / node.devices if self._spread else node.intra_bytes_per_s
        return num_bytes / rate + self.costs.update_s(unit.node, elements / num_pipelines)


@functools.lru_cache(maxsize=1024)
def _thinned(count: int, most: int) -> Ints:
    """1 to `count` if they are few, else about `most` of them, denser where they are small; always the last."""
    if count <= most:
        return np.arange(1, count + 1)
    return np.unique(np.geomspace(1, count, most).round().astype(np.int64))


def word_key(word: Word) -> _WordKey:
    """Equal for words that cost the same: the kinds, and which units share a node."""
    names: dict[str, int] = {}
    return tuple((unit.kind, names.setdefault(unit.node, len(names))) for unit in word)


def _pipeline(word: Word, size: int, micro_batches: int, counts: list[int]) -> Pipeline:
    first, stages = 0, []
    for unit, count in zip(word, counts, strict=True):
        replica = Replica(node=unit.node, devices=unit.devices, tp=unit.tp, samples=size)
        stages.append(Stage(layers=((first, first + count),), replicas=(replica,)))
        first += count
    return Pipeline(micro_batch=size, micro_batches=micro_batches, stages=tuple(stages))


def usable_nodes(job: JobSpec, snapshot: ClusterSnapshot) -> tuple[Node, ...]:
    """Nodes of the device types that the job allows."""
    allowed = job.limits.device_types
    return tuple(node for node in snapshot.nodes if not allowed or node.device in allowed)
