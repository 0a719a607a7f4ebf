"""Which pairs of nodes are asked to reach each other."""

from __future__ import annotations

import itertools

from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_workers.reaching import pairs_of


def stage(first: int, last: int, *nodes: str) -> Stage:
    return Stage(layers=((first, last),), replicas=tuple(Replica(node=node, devices=(0,), samples=1) for node in nodes))


def pipeline(*stages: Stage) -> Pipeline:
    return Pipeline(micro_batch=len(stages[0].replicas), micro_batches=1, stages=stages)


def test_every_pair_is_asked_once_and_those_that_exchange_come_first() -> None:
    """Of two pipelines that are cut at different layers: a-b and c-d-e."""
    plan = Plan(
        pipelines=(
            pipeline(stage(0, 2, "a"), stage(2, 4, "b")),
            pipeline(stage(0, 1, "c"), stage(1, 3, "d"), stage(3, 4, "e")),
        ),
        copies=0,
    )
    found = ["".join(sorted(pair)) for pair in pairs_of(plan)]
    assert sorted(found) == ["".join(pair) for pair in itertools.combinations("abcde", 2)]
    exchange = {"ab", "cd", "de", "ac", "ad", "bd", "be"}
    assert set(found[: len(exchange)]) == exchange
    assert found[:3] == ["ab", "cd", "de"]


def test_replicas_of_a_stage_exchange_and_one_node_alone_has_nobody() -> None:
    assert [sorted(pair) for pair in pairs_of(Plan(pipelines=(pipeline(stage(0, 4, "a", "b")),), copies=0))] == [
        ["a", "b"]
    ]
    assert not list(pairs_of(Plan(pipelines=(pipeline(stage(0, 4, "a")),), copies=0)))
