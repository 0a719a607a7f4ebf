"""Who keeps what: the invariants of every plan, and the rule worked out by hand for one."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import defaultdict

import layouts
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.levels import Sharding
from shoal_planner.parameters import parameters, stage_units
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.shard_map import is_replicated, shard_map
from shoal_recovery.state import RankState, Span


@given(st.data())
def test_somebody_vouches_for_every_element_and_has_its_gradient(data: st.DataObject) -> None:
    model = data.draw(layouts.models())
    plan = data.draw(layouts.plans(model))
    sharding = shard_map(plan, model)
    assert [state.rank for state in sharding.ranks] == list(range(len(sharding.ranks)))
    for parameter in parameters(model):
        vouched = sum(layouts.count(state.vouches, parameter.fqn, parameter.numel) for state in sharding.ranks)
        assert (vouched == 1).all(), parameter.fqn
    for state in sharding.ranks:
        _check_within(state.vouches, state.owns)
        _check_within(state.contributes, state.holds)
        if plan.sharding.gradients != "none":
            _check_within(state.owns, state.sums)
        else:
            assert state.sums == state.contributes
        for spans in (state.holds, state.keeps, state.contributes, state.sums, state.owns, state.vouches):
            assert list(spans) == sorted(spans)
            for one, other in itertools.pairwise(spans):
                assert one.fqn != other.fqn or one.last < other.first, "neighbours are one span"


def _check_within(inner: tuple[Span, ...], outer: tuple[Span, ...]) -> None:
    for span in inner:
        assert any(one.fqn == span.fqn and one.first <= span.first and span.last <= one.last for one in outer), span


@given(st.data())
def test_every_rank_holds_its_slices_of_its_units(data: st.DataObject) -> None:
    model = data.draw(layouts.models())
    plan = data.draw(layouts.plans(model))
    sharding = shard_map(plan, model)
    for place, state in zip(plan.places(), sharding.ranks, strict=True):
        assert (place.rank, place.device) == (state.rank, state.device)
        if not plan.pipelines[place.pipeline].stages[place.stage].replicas[place.replica].samples:
            assert state.holds == state.contributes == (), "it runs nothing"
            continue
        units = set(stage_units(plan, place.pipeline, place.stage))
        mine = [parameter for parameter in parameters(model) if units & set(parameter.units)]
        expected = {parameter.fqn: parameter.interval(place.tp_rank, place.tp) for parameter in mine}
        assert {span.fqn: (span.first, span.last) for span in state.holds} == {
            fqn: interval for fqn, interval in expected.items() if interval[0] < interval[1]
        }
        replicated = {parameter.fqn for parameter in mine if not parameter.cut}
        assert {span.fqn for span in state.contributes} == {span.fqn for span in state.holds} - (
            replicated if place.tp_rank else set()
        )


@given(st.data())
def test_a_circle_has_everything_once_and_by_its_shares(data: st.DataObject) -> None:
    """Weights: once among its replicas. Gradients: once among its ranks. What a rank keeps, sums or vouches for is its
    share of what its replicas would have whole, but for an element wherever something is cut."""
    model = data.draw(layouts.models())
    plan = data.draw(layouts.plans(model))
    sharding = shard_map(plan, model)
    replicas = {place.rank: (place.pipeline, place.stage, place.replica) for place in plan.places()}
    for name, level in (("weights", plan.sharding.weights), ("gradients", plan.sharding.gradients)):
        field = "keeps" if name == "weights" else "sums"
        members: dict[int, list[RankState]] = defaultdict(list)
        for state in sharding.ranks if level != "none" else ():
            members[getattr(state.circles, name)].append(state)
        for states, parameter in itertools.product(members.values(), parameters(model)):
            here = [layouts.count(getattr(state, field), parameter.fqn, parameter.numel) for state in states]
            if not any(found.any() for found in here):
                continue
            by_replica: dict[tuple[int, int, int], np.ndarray] = {}
            for state, found in zip(states, here, strict=True):
                one = by_replica.setdefault(replicas[state.rank], found)
                by_replica[replicas[state.rank]] = one | found
            assert (sum(by_replica.values()) == 1).all(), (name, parameter.fqn)
            share = {key: plan.pipelines[key[0]].stages[key[1]].replicas[key[2]].state_share / 1 for key in by_replica}
            for key, found in by_replica.items():
                wanted = parameter.numel * share[key] / sum(share.values())
                assert abs(found.sum() - wanted) <= 8 * len(sharding.ranks), (name, parameter.fqn, key)


def _stage(first: int, last: int, *replicas: Replica) -> Stage:
    return Stage(layers=((first, last),), replicas=replicas)


def _pipeline(*stages: Stage) -> Pipeline:
    return Pipeline(micro_batch=stages[0].samples, micro_batches=1, stages=stages)


def test_segments_are_split_in_proportion_to_the_shares() -> None:
    """q of block 0 has 64 elements: tp 2 in one pipeline, tp 1 (with a third of the share) in the other."""
    model = ModelSpec(layers=1, hidden=8, heads=4, ffn=4, vocab=4)
    pair = Replica(node="a", devices=(0, 1), tp=2, state_share=0.75)
    single = Replica(node="b", devices=(0,), state_share=0.25)
    plan = Plan(pipelines=(_pipeline(_stage(0, 1, pair)), _pipeline(_stage(0, 1, single))))
    ranks = shard_map(plan, model).ranks

    def spans(state: RankState, fqn: str) -> list[tuple[int, int]]:
        return [(span.first, span.last) for span in state.owns if span.fqn == fqn]

    q, norm = "layers.0.attention.q.weight", "final_norm.weight"
    assert [spans(state, q) for state in ranks] == [[(0, 24)], [(32, 56)], [(24, 32), (56, 64)]]
    assert [spans(state, norm) for state in ranks] == [[(0, 6)], [], [(6, 8)]]


def test_a_tied_embedding_is_contributed_by_first_and_last_stage() -> None:
    model = ModelSpec(layers=2, hidden=8, heads=4, ffn=4, vocab=6)
    nodes = [Replica(node=name, devices=(0,)) for name in "abc"]
    stages = [_stage(0, 1, nodes[0]), _stage(1, 2, nodes[1]), _stage(2, 2, nodes[2])]
    plan = Plan(pipelines=(_pipeline(*stages),))
    whole = Span(fqn="embedding.weight", first=0, last=48)
    ranks = shard_map(plan, model).ranks
    assert [whole in state.contributes for state in ranks] == [True, False, True]
    assert {span.fqn for span in ranks[2].holds} == {"embedding.weight", "final_norm.weight"}
    one_rank = Plan(pipelines=(_pipeline(_stage(0, 2, Replica(node="a", devices=(0,)))),))
    assert [span for span in shard_map(one_rank, model).ranks[0].contributes if span.fqn == whole.fqn] == [whole]


def test_where_plans_are_replicated_losses_leave_each_rank_what_it_has() -> None:
    model = ModelSpec(layers=2, hidden=8, heads=4, ffn=4, vocab=6)
    pair, single = Replica(node="a", devices=(0, 1), tp=2), Replica(node="b", devices=(0,))
    whole = Plan(
        pipelines=(_pipeline(_stage(0, 2, pair)), _pipeline(_stage(0, 2, single))), sharding=Sharding(optimizer="none")
    )
    assert is_replicated(whole)
    for gone in range(2):
        rest = dataclasses.replace(whole, pipelines=whole.pipelines[1 - gone :][:1])
        before = {state.device: (state.keeps, state.owns) for state in shard_map(whole, model).ranks}
        assert all(before[state.device] == (state.keeps, state.owns) for state in shard_map(rest, model).ranks)
    two = _pipeline(_stage(0, 1, pair), _stage(1, 2, Replica(node="c", devices=(0,))))
    for other in (
        dataclasses.replace(whole, sharding=Sharding()),
        dataclasses.replace(whole, sharding=Sharding(weights="cluster", optimizer="none")),
        dataclasses.replace(whole, pipelines=(whole.pipelines[1], two)),
    ):
        assert not is_replicated(other)


def test_equal_shares_differ_by_one_element_per_segment() -> None:
    model = ModelSpec(layers=4, hidden=64, heads=4, ffn=100, vocab=101)
    replicas = tuple(Replica(node=f"n{index}", devices=(0,)) for index in range(7))
    ranks = shard_map(Plan(pipelines=(_pipeline(_stage(0, 4, *replicas)),)), model).ranks
    for parameter in parameters(model):
        counts = [sum(span.numel for span in state.owns if span.fqn == parameter.fqn) for state in ranks]
        assert max(counts) - min(counts) <= 1


def test_a_plan_of_another_model_is_refused() -> None:
    plan = Plan(pipelines=(_pipeline(_stage(0, 4, Replica(node="a", devices=(0,)))),))
    with pytest.raises(InvalidField, match="must cover the 5 layers"):
        shard_map(plan, ModelSpec(layers=5, hidden=8, heads=4, ffn=4, vocab=6))


def test_a_thousand_ranks_take_a_moment() -> None:
    model = ModelSpec(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128000, tie_embeddings=False)
    pipelines = tuple(
        _pipeline(
            *(_stage(i * 10, i * 10 + 10, Replica(node=f"n{p}-{i}", devices=tuple(range(8)), tp=8)) for i in range(8))
        )
        for p in range(16)
    )
    began_s = time.process_time()
    assert len(shard_map(Plan(pipelines=pipelines), model).ranks) == 1024
    assert time.process_time() - began_s < 5
