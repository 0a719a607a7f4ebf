"""Random plans of any shape for a job on a cluster: no search would make most of them, and the model must be right on
all of them. Owns the drawing alone; a plan may need more memory than there is."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import defaultdict

from oracle import num_copies
from random_clusters import Instance

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import JobSpec
from shoal_planner.plan import Level, Override, Pipeline, Plan, Recompute, Replica, Sharding, Stage

LEVELS: tuple[Level, ...] = ("none", "group", "node", "cluster")
RECOMPUTATIONS: tuple[Recompute, ...] = ("none", "selective", "full")
Cell = tuple[str, tuple[int, ...]]  # a replica: its node and devices


def random_plan(rng: random.Random, instance: Instance) -> Plan:
    """Some of the devices in some pipelines; each deals the batch as it likes."""
    job, cluster = instance.job, instance.cluster
    cells = _cells(rng, job, cluster)
    used = rng.sample(cells, rng.randint(1, len(cells)))
    num_pipelines = rng.randint(1, min(len(used), job.train.global_batch))
    pieces: dict[int, list[Cell]] = defaultdict(list)
    for index, cell in enumerate(used):
        pieces[index if index < num_pipelines else rng.randrange(num_pipelines)].append(cell)
    counts = _deal(rng, job.train.global_batch, num_pipelines, least=1)
    made = Plan(
        pipelines=tuple(_pipeline(rng, job, pieces[index], count) for index, count in enumerate(counts)),
        copies=num_copies(job, cluster),
        sharding=_sharding(rng),
    )
    apart = random.Random()
    apart.setstate(rng.getstate())  # what is drawn after this plan does not hang on it
    return _with_whole_layers(apart, made)


def _with_whole_layers(rng: random.Random, made: Plan) -> Plan:
    """In half of the stages of a plan that splits others."""
    if made.sharding.weights == made.sharding.gradients == "none":
        return made

    def change(stage: Stage) -> Stage:
        first, last = stage.first, stage.last
        if first == last or stage.overrides or rng.random() < 0.5:
            return stage
        begin = rng.randrange(first, last)
        whole = Override(layers=(begin, rng.randint(begin + 1, last)), sharding="none")
        return dataclasses.replace(stage, overrides=(whole,))

    pipelines = (dataclasses.replace(one, stages=tuple(map(change, one.stages))) for one in made.pipelines)
    return dataclasses.replace(made, pipelines=tuple(pipelines))


def _sharding(rng: random.Random) -> Sharding:
    """All combinations that may be; in half of the plans nothing is split within a step."""
    optimizer: Level = rng.choice(("none", "cluster"))
    if rng.random() < 0.5:
        return Sharding(optimizer=optimizer)
    weights, gradients = (rng.choice(LEVELS) for _ in range(2))
    return Sharding(weights=weights, gradients="none" if optimizer == "none" else gradients, optimizer=optimizer)


def _cells(rng: random.Random, job: JobSpec, cluster: ClusterSnapshot) -> list[Cell]:
    """All devices, in groups of legal degrees."""
    found: list[Cell] = []
    heads = math.gcd(job.model.heads, job.model.num_kv_heads)
    for node in cluster.nodes:
        free = rng.sample(range(node.devices), node.devices)
        while free:
            tp = rng.choice([tp for tp in range(1, len(free) + 1) if heads % tp == 0])
            found.append((node.id, tuple(sorted(free[:tp]))))
            free = free[tp:]
    return found


def _pipeline(rng: random.Random, job: JobSpec, cells: list[Cell], samples: int) -> Pipeline:
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    micro_batch = rng.choice(sizes)
    depth = min(rng.randint(1, len(cells)), job.model.layers + 2)
    stages: list[list[Cell]] = [[cell] for cell in cells[:depth]]
    for cell in cells[depth:]:
        chosen = rng.choice(stages)
        if len(chosen) < micro_batch:  # else this device stays idle: every replica runs a sample at least
            chosen.append(cell)
    made, first = [], 0
    for here, count in zip(stages, _layers(rng, job.model.layers, depth), strict=True):
        shares = _deal(rng, micro_batch, len(here), least=1)
        replicas = tuple(
            Replica(
                node=node,
                devices=devices,
                tp=len(devices),
                samples=share,
                state_share=rng.choice((1.0, 1.0, 1.0, 0.25, 3.0)),
            )
            for (node, devices), share in zip(here, shares, strict=True)
        )
        recompute = rng.choice(RECOMPUTATIONS) if job.train.recompute == "auto" else "none"
        layers = (first, first + count)
        made.append(Stage(layers=(layers,), replicas=replicas, recompute=recompute, overrides=_hosted(rng, layers)))
        first += count
    return Pipeline(micro_batch=micro_batch, micro_batches=samples // micro_batch, stages=tuple(made))


def _hosted(rng: random.Random, layers: tuple[int, int]) -> tuple[Override, ...]:
    """In a quarter of the stages the optimizer state of some layers is on the host."""
    first, last = layers
    if first == last or rng.random() < 0.75:
        return ()
    begin = rng.randrange(first, last)
    return (Override(layers=(begin, rng.randint(begin + 1, last)), offload="optimizer"),)


def _layers(rng: random.Random, layers: int, depth: int) -> list[int]:
    """The first and the last of several stages may hold no block."""
    if depth == 1:
        return [layers]
    counts = _deal(rng, layers - max(0, depth - 2), depth, least=0)
    return [count + (0 < index < depth - 1) for index, count in enumerate(counts)]


def _deal(rng: random.Random, total: int, parts: int, *, least: int) -> list[int]:
    """`total` in so many parts of `least` at least."""
    marks = sorted(rng.randint(0, total - least * parts) for _ in range(parts - 1))
    return [b - a + least for a, b in zip([0, *marks], [*marks, total - least * parts], strict=True)]
