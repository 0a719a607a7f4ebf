"""The search against brute force over all plans, and brute force against itself: each symmetry that it uses must hold
of `score`, and what it finds must not hang on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator

import campaign
import oracle
import pytest
from oracle import Space, best_plan, draw_countable, plans
from random_clusters import Instance

from shoal_planner.cluster import DeviceRef
from shoal_planner.errors import NoPlanFits
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.score import score


def step_s(made: Plan, instance: Instance) -> float:
    try:
        prediction = score(made, instance.job, instance.cluster).prediction
    except NoPlanFits:
        return math.inf
    assert prediction is not None
    return prediction.step_s


# --- the symmetries --------------------------------------------------------------------------------------------------


def with_devices(made: Plan, names: dict[DeviceRef, DeviceRef]) -> Plan:
    """The plan on other devices."""

    def moved(replica: Replica) -> Replica:
        refs = [names[ref] for ref in replica.refs()]
        return dataclasses.replace(replica, node=refs[0].node, devices=tuple(ref.index for ref in refs))

    return with_stages(
        made, lambda stage: dataclasses.replace(stage, replicas=tuple(moved(replica) for replica in stage.replicas))
    )


def with_stages(made: Plan, change: Callable[[Stage], Stage]) -> Plan:
    return dataclasses.replace(
        made,
        pipelines=tuple(
            dataclasses.replace(pipeline, stages=tuple(change(stage) for stage in pipeline.stages))
            for pipeline in made.pipelines
        ),
    )


def turned(stage: Stage) -> Stage:
    return dataclasses.replace(stage, replicas=stage.replicas[::-1])


def images(made: Plan, instance: Instance, rng: random.Random) -> Iterator[tuple[str, Plan]]:
    """Plans that must take as long."""
    order = rng.sample(range(len(made.pipelines)), len(made.pipelines))
    yield "other order of pipelines", dataclasses.replace(made, pipelines=tuple(made.pipelines[i] for i in order))
    yield "samples turned round", with_stages(made, turned)
    yield (
        "replicas of lone stages in another order",
        dataclasses.replace(made, pipelines=tuple(shuffled(pipeline, rng) for pipeline in made.pipelines)),
    )
    nodes, kinds = instance.cluster.nodes, oracle.exchangeable(instance.job, instance.cluster)
    names: dict[DeviceRef, DeviceRef] = {}
    for kind in set(kinds):
        alike = [node for node, other in zip(nodes, kinds, strict=True) if other == kind]
        for node, target in zip(alike, rng.sample(alike, len(alike)), strict=True):
            indices = rng.sample(range(node.devices), node.devices)
            for ref, index in zip(node.refs(), indices, strict=True):
                names[ref] = DeviceRef(node=target.id, index=index)
    yield "equal devices and nodes exchanged", with_devices(made, names)


def shuffled(pipeline: Pipeline, rng: random.Random) -> Pipeline:
    if len(pipeline.stages) > 1:
        return pipeline
    replicas = pipeline.stages[0].replicas
    stage = dataclasses.replace(pipeline.stages[0], replicas=tuple(rng.sample(replicas, len(replicas))))
    return dataclasses.replace(pipeline, stages=(stage,))


@pytest.mark.parametrize("seed", range(10))
def test_score_knows_the_symmetries_that_brute_force_uses(seed: int) -> None:
    rng = random.Random(seed)
    instance = draw_countable(seed, 800)
    for made in rng.sample(some := list(plans(instance)), min(25, len(some))):
        expected_s = step_s(made, instance)
        for what, image in images(made, instance, rng):
            assert step_s(image, instance) == pytest.approx(expected_s, rel=1e-12), f"{what}: {made}"


@pytest.mark.parametrize("seed", range(10))
def test_symmetries_leave_out_no_better_plan(seed: int) -> None:
    """With a price of its own each node is told apart, and more plans are tried; the time of the best is the same."""
    instance = draw_countable(seed, 500)
    apart = [
        dataclasses.replace(node, price_per_hour=float(index)) for index, node in enumerate(instance.cluster.nodes)
    ]
    cluster = dataclasses.replace(instance.cluster, nodes=tuple(apart))
    fewer, more = best_plan(instance), best_plan(dataclasses.replace(instance, cluster=cluster))
    assert fewer.step_s == pytest.approx(more.step_s, rel=1e-12)
    assert fewer.num_plans <= more.num_plans


def test_the_space_of_two_devices_is_counted_by_hand() -> None:
    """Two unequal nodes of one device, two layers, a batch of two: 2 plans alone with each device (one micro-batch of
    two or two of one); in a row, 2 orders of 3 splits of 2 micro-batch sizes; side by side in a stage 1, as two
    pipelines 1."""
    instance = two_devices()
    assert sum(1 for _ in Space(instance, one_replica=False).choices()) == 2 * 2 + 2 * 3 * 2 + 1 + 1
    assert sum(1 for _ in Space(instance, one_replica=True).choices()) == 2 * 2 + 2 * 3 * 2 + 1
    found = list(plans(instance))
    assert len(set(found)) == len(found)


def two_devices() -> Instance:
    for seed in itertools.count():
        instance = draw_countable(seed, 100)
        if len(instance.cluster.nodes) == instance.cluster.num_devices == 2:
            break
    nodes = [
        dataclasses.replace(node, devices=1, price_per_hour=float(index))
        for index, node in enumerate(instance.cluster.nodes)
    ]
    train = dataclasses.replace(instance.job.train, global_batch=2, sharding="none", recompute="none")
    job = dataclasses.replace(
        instance.job,
        train=train,
        model=dataclasses.replace(instance.job.model, layers=2),
        limits=dataclasses.replace(instance.job.limits, min_devices=1),
    )
    return dataclasses.replace(instance, job=job, cluster=dataclasses.replace(instance.cluster, nodes=tuple(nodes)))


# --- the search ------------------------------------------------------------------------------------------------------


def judged(name: str, seeds: range, limit: int, processes: int = 2) -> None:
    tallies = campaign.run(name, seeds, processes, limit=limit)
    assert not any(tally.failures for tally in tallies), campaign.summary(name, tallies)


@pytest.mark.parametrize(("name", "num_seeds"), [("oracle", 12), ("units", 5)])
def test_the_search_equals_brute_force_on_a_sample(name: str, num_seeds: int) -> None:
    judged(name, range(num_seeds), 2000, processes=1)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("oracle", 11),  # snapshots of a tied embedding whose two ends stand on different nodes
        ("units", 311),  # a plan slower than what was looked for came up on the way, and ended the search
    ],
)
def test_what_once_was_wrong_is_not(name: str, seed: int) -> None:
    judged(name, range(seed, seed + 1), campaign.MOST_PLANS, processes=1)
