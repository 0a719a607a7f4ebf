"""Steps from one set of pipelines to others use the devices that there are, and what they lead to is no worse."""

from __future__ import annotations

import itertools

import pytest
from random_clusters import draw_large

from shoal_planner.cluster import parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.finish import Word
from shoal_planner.improve import HOPELESS, Improver, simple
from shoal_planner.job import parse_job
from shoal_planner.options import usable_nodes
from shoal_planner.parts import fastest_s, least_s
from shoal_planner.profile import Profile
from shoal_planner.ways import Ground, ground_of, ways_of, words_of
from shoal_planner.ways_steps import steps

SEEDS = range(12)


def ground(seed: int) -> Ground:
    instance = draw_large(seed, 9, 24)
    costs = CostModel(instance.job, instance.cluster, Profile())
    return ground_of(usable_nodes(instance.job, instance.cluster), costs)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_uses_a_device_twice_or_one_that_is_not_there(seed: int) -> None:
    here = ground(seed)
    for start in simple(here):
        for ways in (start, *steps(start, here)):
            assert ways and all(ways)
            assert all(count >= 0 for count in here.free(ways).values())
            units = [unit for word in words_of(ways) for unit in word]
            devices = [(unit.node, device) for unit in units for device in unit.devices]
            assert len(set(devices)) == len(devices)
            assert ways_of(words_of(ways)) == ways


def test_descends_to_what_the_judge_likes_best_and_counts_its_tries() -> None:
    here, judged = ground(1), list[tuple[float, tuple[Word, ...]]]()

    def judge(words: tuple[Word, ...]) -> float:
        seconds = abs(sum(unit.tp for word in words for unit in word) - 7) + 0.1 * len(words)
        judged.append((seconds, words))
        return seconds

    starts = len({here.named(ways) for ways in simple(here)})
    Improver(here, judge, starts + 100, 100).run(())
    assert len(judged) == starts + 100
    _, best = min(judged)
    assert sum(unit.tp for word in best for unit in word) == 7 and len(best) == 1


def test_no_steps_are_taken_from_what_takes_far_longer() -> None:
    here = ground(1)
    first = next(simple(here))
    named = {here.named(first)}
    judged = list[object]()

    def judge(words: tuple[Word, ...]) -> float:
        judged.append(here.named(ways_of(words)))
        return 1.0 if judged[-1] in named else HOPELESS * 1.01

    Improver(here, judge, 10_000, 10_000).run(())
    reached = itertools.chain(simple(here), steps(first, here))
    assert set(judged) == {here.named(ways) for ways in reached} and len(judged) == len(set(judged))


def test_nothing_more_is_judged_once_it_ends() -> None:
    here = ground(1)
    for most in (1, len({here.named(ways) for ways in simple(here)}) + 3):
        left = [1.0] * most
        Improver(here, lambda _, left=left: left.pop(), 10_000, 100).run((), lambda left=left: not left)
        assert not left


def test_equal_nodes_may_change_places() -> None:
    instance = draw_large(8, 9, 64)
    here = ground_of(instance.cluster.nodes, CostModel(instance.job, instance.cluster, Profile()))
    one, other, *_ = [name for name in here.nodes if here.kind[name] == here.kind["n0-2"]]
    first = next(ways for ways in simple(here) if {place.node for way in ways for place in way} == {one})
    moved = tuple(tuple(place._replace(node=other) for place in way) for way in first)
    assert here.named(first) == here.named(moved) and first != moved


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_bound_is_no_less_than_the_bound(seed: int) -> None:
    instance = draw_large(seed, 9, 24)
    costs = CostModel(instance.job, instance.cluster, Profile())
    nodes = instance.cluster.nodes
    assert least_s(nodes, costs, (1, 2)) >= fastest_s(nodes, costs) * (1 - 1e-9) or instance.job.train.global_batch < 2


def test_the_quick_bound_knows_of_pipelines_that_fill_and_of_copies_that_exchange() -> None:
    """One sample cannot be computed by two devices at once, nor do copies of the weights come for nothing."""

    def least(count: int, batch: int, gbit_per_s: float) -> float:
        document = {"device": "A100-80G", "count": count, "devices": 1, "name": "n", "inter_gbit_per_s": gbit_per_s}
        train = {"global_batch": batch, "seq_len": 1024, "steps": 10, "precision": "bf16"}
        job = parse_job({"name": "j", "model": {"preset": "gpt2"}, "data": {"uri": "stdlib:"}, "train": train})
        cluster = parse_cluster({"nodes": [document]})
        return least_s(cluster.nodes, CostModel(job, cluster, Profile()), (1,))

    assert least(8, 1, 1e6) == pytest.approx(least(1, 1, 1e6), rel=1e-6)
    assert least(8, 8, 1e6) == pytest.approx(least(1, 1, 1e6), rel=1e-3)
    assert least(8, 8, 1.0) > 1.5 * least(8, 8, 1e6)
