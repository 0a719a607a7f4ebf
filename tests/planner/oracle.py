"""The best plan by trying every one: what the search is judged by on tiny clusters.

Shares nothing with the search but `score`: shapes, layers, shares and micro-batches are enumerated here. What is left
out is left out by symmetry alone, and each symmetry is tested against `score` (test_planner_oracle). Two spaces: all
plans over any subset of the devices, or those with one replica per stage.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from random_clusters import Instance, draw_tiny, num_parameters

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Pipeline, Plan, Recompute, Replica, Sharding, Stage
from shoal_planner.profile import Profile
from shoal_planner.score import score_with

Cell = tuple[int, int]  # a replica: its node's number in the snapshot, and its tp
StageShape = tuple[Cell, ...]
PipelineShape = tuple[StageShape, ...]
Shape = tuple[PipelineShape, ...]  # who runs with whom; no layers, samples or micro-batches yet

# More than any engine keeps on hosts per parameter: above that, host memory tells no two nodes apart.
AMPLE_HOST_BYTES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a pipeline of some shape is run: layers, samples and recomputation by stage."""

    micro_batch: int
    micro_batches: int
    layers: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...]
    recompute: tuple[Recompute, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest plan (None: no plan fits), its seconds, and how many were tried."""

    plan: Plan | None
    step_s: float
    num_plans: int


def best_plan(instance: Instance, *, one_replica: bool = False) -> Best:
    """Scores every plan of the space. An InvalidField from `score` is a mistake of the enumeration, and passes up."""
    costs = CostModel(instance.job, instance.cluster, Profile())
    found, step_s, tried = None, math.inf, 0
    fewest = 0 if instance.job.checkpoint.copies == "auto" else num_copies(instance.job, instance.cluster)
    for copies in range(num_copies(instance.job, instance.cluster), fewest - 1, -1):
        for made in plans(instance, one_replica=one_replica, copies=copies):
            tried += 1
            try:
                scored = score_with(_ahead(made, instance.job), costs)
            except NoPlanFits:
                continue
            assert scored.prediction is not None
            if scored.prediction.step_s < step_s:
                found, step_s = scored, scored.prediction.step_s
        if found is not None:
            break  # without copies only where hosts have no room for them
    return Best(plan=found, step_s=step_s, num_plans=tried)


def _ahead(made: Plan, job: JobSpec) -> Plan:
    """What passes between stages is received ahead of its use wherever that may be."""
    stages = job.train.overlap == "auto" and any(len(pipeline.stages) > 1 for pipeline in made.pipelines)
    return dataclasses.replace(made, overlap=Overlap(stages=stages))


def draw_countable(seed: int, limit: int, *, most_devices: int = 4, one_replica: bool = False) -> Instance:
    """The first draw of this seed whose space has at most `limit` plans."""
    for attempt in itertools.count():
        instance = draw_tiny(seed, attempt, most_devices=most_devices)
        space = Space(instance, one_replica=one_replica)
        if sum(1 for _ in itertools.islice(space.choices(), limit + 1)) <= limit:
            return instance
    raise AssertionError("unreachable")


def plans(instance: Instance, *, one_replica: bool = False, copies: int | None = None) -> Iterator[Plan]:
    """Every plan of the space, up to symmetry; `copies`: those that plans have where hosts have room, if not given."""
    space = Space(instance, one_replica=one_replica)
    if copies is None:
        copies = num_copies(instance.job, instance.cluster)
    cache: dict[tuple[tuple[tuple[int, ...], ...], PipelineShape, Choice], Pipeline] = {}
    for shape, chosen in space.choices():
        made = []
        for piece, first, choice in zip(shape, _first_devices(shape), chosen, strict=True):
            key = (first, piece, choice)
            if key not in cache:
                cache[key] = _pipeline(piece, first, choice, instance.cluster)
            made.append(cache[key])
        for sharding in shardings(instance.job):
            yield Plan(pipelines=tuple(made), copies=copies, sharding=sharding)


def shardings(job: JobSpec) -> tuple[Sharding, ...]:
    """Held to none: no state is split. Else optimizer state may be split among all who hold a weight, or not."""
    whole = Sharding(optimizer="none")
    return (whole,) if job.train.sharding == "none" else (Sharding(), whole)


def recomputations(job: JobSpec) -> tuple[Recompute, ...]:
    """What a stage may compute again; not by block, which is more than this space holds."""
    return ("none", "full") if job.train.recompute == "auto" else ("none",)


def num_copies(job: JobSpec, cluster: ClusterSnapshot) -> int:
    """One, where there is another node; or what the job says."""
    wanted = job.checkpoint.copies
    return min(1, len(cluster.nodes) - 1) if wanted == "auto" else int(wanted)


class Space:
    """All shapes and choices of one instance."""

    def __init__(self, instance: Instance, *, one_replica: bool) -> None:
        self.job = instance.job
        self.nodes = instance.cluster.nodes
        self.one_replica = one_replica
        self.kinds = exchangeable(instance.job, instance.cluster)
        model = self.job.model
        most = max(node.devices for node in self.nodes)
        self.degrees = [tp for tp in range(1, most + 1) if model.heads % tp == 0 and model.num_kv_heads % tp == 0]
        self._options: dict[tuple[object, ...], dict[int, list[Choice]]] = {}

    def choices(self) -> Iterator[tuple[Shape, tuple[Choice, ...]]]:
        for shape in self.shapes():
            symmetries = self._symmetries(shape)
            options = [self._options_of(piece) for piece in shape]
            for numbers in _sums(options, self.job.train.global_batch):
                lists = [found[number] for found, number in zip(options, numbers, strict=True)]
                for indices in itertools.product(*(range(len(entries)) for entries in lists)):
                    keyed = tuple(zip(numbers, indices, strict=True))
                    if all(keyed <= tuple(keyed[i] for i in order) for order in symmetries):
                        yield shape, tuple(entries[i] for entries, i in zip(lists, indices, strict=True))

    def shapes(self) -> Iterator[Shape]:
        """Each once up to exchange of equal nodes, the order of the pipelines, and the order of samples."""
        least, seen = self.job.limits.min_devices, set()
        allowed = self.job.limits.device_types
        free = tuple(0 if allowed and node.device not in allowed else node.devices for node in self.nodes)
        for shape in self._extend((), free):
            if sum(tp for piece in shape for stage in piece for _, tp in stage) >= least:
                key = self._canonical(shape)
                if key not in seen:
                    seen.add(key)
                    yield shape

    def _extend(self, shape: Shape, free: tuple[int, ...]) -> Iterator[Shape]:
        """`shape` and all that grow from it: one more replica in the last stage, or in a new one, or in a new
        pipeline. So each ordered shape comes up once."""
        if shape:
            yield shape
        for node, tp in self._next_cells(free):
            left = (*free[:node], free[node] - tp, *free[node + 1 :])
            cell: StageShape = ((node, tp),)
            if shape:
                *before, last = shape
                if not self.one_replica and len(last[-1]) < self.job.train.global_batch:
                    yield from self._extend((*before, (*last[:-1], last[-1] + cell)), left)
                if len(last) < self.job.model.layers + 2:
                    yield from self._extend((*before, (*last, cell)), left)
            if len(shape) < self.job.train.global_batch:
                yield from self._extend((*shape, (cell,)), left)

    def _next_cells(self, free: tuple[int, ...]) -> Iterator[Cell]:
        """Of equal nodes that nothing uses yet, the first alone."""
        fresh: set[int] = set()
        for number, node in enumerate(self.nodes):
            if free[number] == node.devices:
                if self.kinds[number] in fresh:
                    continue
                fresh.add(self.kinds[number])
            for tp in self.degrees:
                if tp <= free[number]:
                    yield number, tp

    def _canonical(self, shape: Shape) -> tuple[object, ...]:
        forms = (_orders(piece) for piece in shape)
        return min(
            self.relabelled(order) for variant in itertools.product(*forms) for order in itertools.permutations(variant)
        )

    def relabelled(self, shape: Shape) -> tuple[object, ...]:
        """Nodes by kind and by where they first appear."""
        names: dict[int, int] = {}
        return tuple(
            tuple(
                tuple((self.kinds[node], names.setdefault(node, len(names)), tp) for node, tp in stage)
                for stage in piece
            )
            for piece in shape
        )

    def _symmetries(self, shape: Shape) -> list[tuple[int, ...]]:
        """Exchanges of whole pipelines that lead to the same shape with other names."""
        same = self.relabelled(shape)
        return [
            order
            for order in itertools.permutations(range(len(shape)))
            if self.relabelled(tuple(shape[i] for i in order)) == same
        ]

    def _options_of(self, piece: PipelineShape) -> dict[int, list[Choice]]:
        """By number of samples per step."""
        alone = len(piece) == 1
        # In a pipeline of one stage nobody sends to anybody, so equal replicas may exchange their samples.
        equal = tuple(
            tuple(alone and i > 0 and cell == stage[i - 1] for i, cell in enumerate(stage)) for stage in piece
        )
        if equal not in self._options:
            self._options[equal] = self._all_options(equal)
        return self._options[equal]

    def _all_options(self, equal: tuple[tuple[bool, ...], ...]) -> dict[int, list[Choice]]:
        found: dict[int, list[Choice]] = {}
        none: tuple[Recompute, ...] = ("none",)
        for micro_batch in range(max(map(len, equal)), self.job.train.global_batch + 1):
            shares = [list(_shares(micro_batch, stage)) for stage in equal]
            for layers in _layer_splits(self.job.model.layers, len(equal)):
                kinds = [recomputations(self.job) if count else none for count in layers]
                for samples in itertools.product(*shares):
                    for recompute in itertools.product(*kinds):
                        for micro_batches in range(1, self.job.train.global_batch // micro_batch + 1):
                            choice = Choice(
                                micro_batch=micro_batch,
                                micro_batches=micro_batches,
                                layers=layers,
                                samples=samples,
                                recompute=recompute,
                            )
                            found.setdefault(micro_batch * micro_batches, []).append(choice)
        return found


def exchangeable(job: JobSpec, cluster: ClusterSnapshot) -> tuple[int, ...]:
    """A number for each node, the same for those that may change places: equal but for the name, and their hosts have
    room for whatever they may keep. Where hosts are tight, it matters whose copies a node keeps, so nobody is equal."""
    ample = AMPLE_HOST_BYTES * num_parameters(job.model) * len(cluster.nodes)
    if any(node.host_memory_bytes < ample for node in cluster.nodes):
        return tuple(range(len(cluster.nodes)))
    kinds: dict[tuple[object, ...], int] = {}
    return tuple(kinds.setdefault(_figures(node), len(kinds)) for node in cluster.nodes)


def _figures(node: Node) -> tuple[object, ...]:
    return tuple(getattr(node, name) for name in node.__dataclass_fields__ if name != "id")


def _orders(piece: PipelineShape) -> list[PipelineShape]:
    """Orders of the samples that cost the same: any in a pipeline of one stage, else all stages turned round."""
    if len(piece) == 1:
        return [(order,) for order in set(itertools.permutations(piece[0]))]
    return [piece, tuple(stage[::-1] for stage in piece)]


def _sums(options: list[dict[int, list[Choice]]], total: int) -> Iterator[tuple[int, ...]]:
    for numbers in itertools.product(*(sorted(found) for found in options)):
        if sum(numbers) == total:
            yield numbers


def _shares(total: int, equal: tuple[bool, ...], least: int = 1) -> Iterator[tuple[int, ...]]:
    """Ways to deal `total` samples, at least one each; who equals the one before gets no fewer."""
    if len(equal) == 1:
        if total >= (least if equal[0] else 1):
            yield (total,)
        return
    for first in range(least if equal[0] else 1, total):
        for rest in _shares(total - first, equal[1:], first):
            yield (first, *rest)


def _layer_splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """The first and the last of several stages may hold no block."""
    for cuts in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        counts = tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))
        if all(counts[1:-1]):
            yield counts


def _first_devices(shape: Shape) -> list[tuple[tuple[int, ...], ...]]:
    """The first device of each replica: devices of a node are equal, so they are given out in order."""
    used: dict[int, int] = {}
    found = []
    for piece in shape:
        stages = []
        for stage in piece:
            firsts = []
            for node, tp in stage:
                firsts.append(used.get(node, 0))
                used[node] = used.get(node, 0) + tp
            stages.append(tuple(firsts))
        found.append(tuple(stages))
    return found


def _pipeline(
    piece: PipelineShape, firsts: tuple[tuple[int, ...], ...], choice: Choice, cluster: ClusterSnapshot
) -> Pipeline:
    stages, first = [], 0
    rows = zip(piece, firsts, choice.layers, choice.samples, choice.recompute, strict=True)
    for cells, devices, count, samples, recompute in rows:
        replicas = tuple(
            Replica(node=cluster.nodes[node].id, devices=tuple(range(device, device + tp)), tp=tp, samples=share)
            for (node, tp), device, share in zip(cells, devices, samples, strict=True)
        )
        stages.append(Stage(layers=((first, first + count),), replicas=replicas, recompute=recompute))
        first += count
    return Pipeline(micro_batch=choice.micro_batch, micro_batches=choice.micro_batches, stages=tuple(stages))
