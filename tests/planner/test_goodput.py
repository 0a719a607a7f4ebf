"""Expected goodput: the formula against a simulation, and which number of copies pays where."""

from __future__ import annotations

import dataclasses
import random

import pytest
from rent_ground import rent_job

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.errors import InvalidField
from shoal_planner.goodput import (
    CopiesChoice,
    RecoveryFigures,
    choose_copies,
    expected_goodput,
    steps_per_s,
)
from shoal_planner.holding import state_held
from shoal_planner.job import JobSpec
from shoal_planner.levels import Level
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage
from shoal_planner.pools import PoolNode
from shoal_planner.preemption import ON_DEMAND, PreemptionRate
from shoal_planner.score import score

SINGLY = PreemptionRate(single_per_h=0.2)
SHAKEN = PreemptionRate(single_per_h=0.0, shocks_per_h=0.4, shares=((0.5, 1.0),))


def simulated_steps_per_s(step_s: float, rate: float, recovery_s: float, redone: int, draw: random.Random) -> float:
    """What comes of 20,000 interruptions, one after the other."""
    steps, clock_s = 0, 0.0
    for _ in range(20_000):
        up_s = draw.expovariate(rate)
        clock_s += up_s
        steps += max(0, int(up_s // step_s) - redone)
        while (quiet_s := draw.expovariate(rate)) < recovery_s:  # interrupted itself: it begins again
            clock_s += quiet_s
        clock_s += recovery_s
    return steps / clock_s


@pytest.mark.parametrize("redone", [0, 1])
@pytest.mark.parametrize(("step_s", "rate", "recovery_s"), [(1, 0.01, 3), (1, 0.3, 2), (5, 0.2, 1), (0.5, 1.5, 1)])
def test_the_formula_is_that_of_the_process(step_s: float, rate: float, recovery_s: float, redone: int) -> None:
    expected = simulated_steps_per_s(step_s, rate, recovery_s, redone, random.Random(4))
    assert steps_per_s(step_s, rate, recovery_s, redone) == pytest.approx(expected, rel=0.04)


def test_for_few_interruptions_it_is_the_simple_formula() -> None:
    rate, step_s, recovery_s = 1e-5, 2.0, 10.0
    simple = 1 / step_s * (1 - rate * (recovery_s + step_s + step_s / 2))
    assert steps_per_s(step_s, rate, recovery_s, 1) == pytest.approx(simple, rel=1e-6)
    assert steps_per_s(step_s, 0, recovery_s, 1) == 1 / step_s


def test_it_falls_towards_nothing_and_never_below() -> None:
    rates = [0, 1e-15, 1e-9, 1e-3, 0.1, 1, 10, 1e3, 1e9]
    found = [steps_per_s(3.0, rate, 60.0, 1.0) for rate in rates]
    assert found == sorted(found, reverse=True)
    assert found[0] == 1 / 3 and found[-1] == 0.0 and min(found) >= 0


def cluster(count: int = 4, **fields: object) -> ClusterSnapshot:
    node = {"name": "a", "device": "A100-80G", "count": count, "spot": True, "host_memory_gib": 512, **fields}
    return parse_cluster({"nodes": [{"inter_gbit_per_s": 100, **node}]})


def data_parallel(job: JobSpec, snapshot: ClusterSnapshot, **fields: object) -> Plan:
    """One pipeline of one stage on each node."""
    samples = job.train.global_batch // len(snapshot.nodes)
    plan = Plan(
        pipelines=tuple(
            Pipeline(
                micro_batch=1,
                micro_batches=samples,
                stages=(Stage(layers=((0, job.model.layers),), replicas=(Replica(node=node.id, devices=(0,)),)),),
            )
            for node in snapshot.nodes
        ),
        copies=0,
        **fields,  # type: ignore[arg-type]
    )
    return score(plan, job, snapshot)


def pools(snapshot: ClusterSnapshot, rate: PreemptionRate) -> dict[str, PoolNode]:
    return {node.id: PoolNode(pool="a", rate=rate) for node in snapshot.nodes}


def chosen(job: JobSpec, snapshot: ClusterSnapshot, rate: PreemptionRate, **fields: object) -> CopiesChoice:
    return choose_copies(data_parallel(job, snapshot, **fields), job, snapshot, pools(snapshot, rate))


@pytest.mark.parametrize("optimizer", ["cluster", "none"])
def test_state_is_counted_once(optimizer: Level) -> None:
    """Where all hold all of it, too: they share out its snapshots."""
    job, snapshot = rent_job(), cluster()
    held = state_held(data_parallel(job, snapshot, sharding=Sharding(optimizer=optimizer)), job)
    assert sum(held.values()) == pytest.approx(num_parameters(job.model))
    assert len(set(held.values())) == 1


def test_where_nothing_fails_a_copy_is_kept_only_if_it_costs_nothing() -> None:
    safe = PreemptionRate(single_per_h=0.0)
    hidden = chosen(rent_job(), cluster(spot=False), safe)
    assert hidden.best.copies == 1 and hidden.best.share > 0.999
    dear = chosen(rent_job(), cluster(spot=False, inter_gbit_per_s=0.05), safe)
    assert dear.best.copies == 0 and dear.best.share > 0.999
    assert dear.reason.startswith("without copies, 0 interruptions an hour")
    assert chosen(rent_job(), cluster(spot=False), ON_DEMAND).best.share > 0.99


def test_on_spot_nodes_a_copy_that_hides_beside_the_step_pays() -> None:
    choice = chosen(rent_job(), cluster(), SINGLY)
    bare, best = choice.options[0], choice.best
    assert best.copies >= 1 and best.tokens_per_s > 1.05 * bare.tokens_per_s
    assert best.interruptions_per_h == bare.interruptions_per_h == pytest.approx(0.8)
    assert bare.rollbacks_per_h == pytest.approx(0.8) and best.rollbacks_per_h < 0.01
    assert "hide" in choice.reason and "interruptions an hour" in choice.reason


def test_a_copy_that_costs_more_than_it_saves_is_left_out_only_where_the_job_says_so() -> None:
    """On a network where it takes minutes, for rare losses: a safe step is not given up for speed."""
    slow, rare = cluster(inter_gbit_per_s=0.05), PreemptionRate(single_per_h=0.001)
    choice = chosen(rent_job(every_steps=1), slow, rare)
    bare, one = choice.options[:2]
    assert one.step_s > 1.9 * bare.step_s and bare.tokens_per_s > 1.9 * one.tokens_per_s
    assert choice.best == one and [option.copies for option in choice.ranked()] == [1, 2, 3, 0]
    assert "no copy, which would keep no step safe, is planned only where checkpoint.copies is 0" in choice.reason
    asked = chosen(rent_job(every_steps=1, copies=0), slow, rare)
    assert (asked.best, asked.options) == (bare, (bare,))
    assert asked.reason.startswith("without copies, 0.004 interruptions an hour leave ")
    assert "is planned only where" not in chosen(rent_job(), cluster(), SINGLY).reason


def test_where_steps_may_be_done_again_copies_cost_less_of_each() -> None:
    """Every tenth step waits for its copies: a tenth of the cost, and a loss costs half of ten steps more."""
    slow, rare = cluster(inter_gbit_per_s=0.5), PreemptionRate(single_per_h=0.001)
    job = rent_job(copies=1)
    seldom = dataclasses.replace(job, checkpoint=dataclasses.replace(job.checkpoint, protect_every=10))
    every, tenth = (chosen(each, slow, rare).best for each in (job, seldom))
    predicted = data_parallel(job, slow).prediction
    assert predicted is not None
    plain_s = predicted.step_s
    assert tenth.step_s - plain_s == pytest.approx((every.step_s - plain_s) / 10)
    assert tenth.redone_steps == pytest.approx(every.redone_steps + 4.5)
    assert tenth.network_bytes_per_parameter == pytest.approx(every.network_bytes_per_parameter / 10)
    assert tenth.tokens_per_s > every.tokens_per_s
    often = PreemptionRate(single_per_h=60.0)
    assert chosen(job, cluster(), often).best.tokens_per_s > chosen(seldom, cluster(), often).best.tokens_per_s


def test_where_there_can_be_no_copy_the_reason_says_why() -> None:
    alone = chosen(rent_job(), cluster(1), SINGLY)
    assert alone.best.copies == 0
    assert alone.reason.startswith("without copies, as there is no other node for one, 0.2 interruptions an hour")
    full = chosen(rent_job(), cluster(host_memory_gib=20), SINGLY)
    assert full.best.copies == 0
    assert full.reason.startswith("without copies, as hosts have no room for one, 0.8 interruptions an hour")


def test_the_more_is_at_stake_without_copies_the_more_they_pay() -> None:
    def gain(job: JobSpec) -> float:
        bare, one = chosen(job, cluster(), SINGLY).options[:2]
        return one.tokens_per_s / bare.tokens_per_s

    assert gain(rent_job(every_steps=10)) < gain(rent_job(every_steps=100)) < gain(rent_job(every_steps=1000))
    nothing_stored = dataclasses.replace(rent_job(), checkpoint=dataclasses.replace(rent_job().checkpoint, uri=None))
    assert gain(nothing_stored) > gain(rent_job(every_steps=100))


def test_where_nothing_is_stored_the_reason_says_what_is_at_stake() -> None:
    stored = rent_job()
    unstored = dataclasses.replace(stored, checkpoint=dataclasses.replace(stored.checkpoint, uri=None))
    long = dataclasses.replace(unstored, train=dataclasses.replace(unstored.train, steps=10_000_000))
    assert stored.checkpoint.uri is not None
    hint = "without checkpoint.uri a loss of state with all its copies undoes the whole job"
    assert chosen(long, cluster(), SHAKEN).best.share < 0.5
    assert chosen(long, cluster(), SHAKEN).reason.endswith(hint)
    assert hint not in chosen(unstored, cluster(), SINGLY).reason
    assert hint not in chosen(stored, cluster(), SHAKEN).reason


def test_shocks_of_a_pool_take_copies_along() -> None:
    job, snapshot = rent_job(), cluster()
    plan = data_parallel(job, snapshot)
    alone, shaken = (
        expected_goodput(plan, job, snapshot, pools(snapshot, rate), copies=1) for rate in (SINGLY, SHAKEN)
    )
    assert SINGLY.per_node_h == SHAKEN.per_node_h
    assert shaken.interruptions_per_h < alone.interruptions_per_h
    assert shaken.rollbacks_per_h > 10 * alone.rollbacks_per_h
    apart = {node.id: PoolNode(pool=node.id, rate=SHAKEN) for node in snapshot.nodes}
    assert expected_goodput(plan, job, snapshot, apart, copies=1).rollbacks_per_h < shaken.rollbacks_per_h / 10


def test_copies_of_state_that_the_plan_holds_everywhere_cost_no_network() -> None:
    """What is in the memory of other ranks restores nobody but them until their nodes keep snapshots of it; they do."""
    job, slow = rent_job(every_steps=1), cluster(inter_gbit_per_s=0.05)
    live = chosen(job, slow, SINGLY, sharding=Sharding(optimizer="none"))
    sent = chosen(job, slow, SINGLY)
    assert live.best.copies >= 1 and live.best.network_bytes_per_parameter == 0
    assert [option.network_bytes_per_parameter for option in sent.options] == pytest.approx([0, 12, 24, 36])
    assert live.options[1].step_s < sent.options[1].step_s / 1.5
    assert live.options[1].rollbacks_per_h == pytest.approx(sent.options[1].rollbacks_per_h, rel=0.5)
    assert "cost no network" in live.reason or "costs no network" in live.reason


def test_a_number_that_the_job_states_is_the_only_one() -> None:
    choice = chosen(rent_job(copies=2), cluster(), SINGLY)
    assert [option.copies for option in choice.options] == [2]
    with pytest.raises(InvalidField, match="copies = 4: each copy needs another node, and there are 4"):
        chosen(rent_job(copies=4), cluster(), SINGLY)


def test_copies_for_which_hosts_have_no_room_are_not_considered() -> None:
    choice = chosen(rent_job(), cluster(host_memory_gib=40), SINGLY)
    assert [option.copies for option in choice.options] == [0, 1]


def test_waiting_for_replacements_costs_capacity() -> None:
    job, snapshot = rent_job(), cluster()
    plan = data_parallel(job, snapshot)
    soon, late = (
        expected_goodput(
            plan,
            job,
            snapshot,
            pools(snapshot, SINGLY),
            copies=1,
            figures=RecoveryFigures(replacement_s=seconds),
        )
        for seconds in (0, 3600)
    )
    assert late.tokens_per_s == pytest.approx(soon.tokens_per_s / 1.2)


def test_a_node_without_a_pool_is_named() -> None:
    job, snapshot = rent_job(), cluster()
    known = pools(snapshot, SINGLY)
    del known["a-1"]
    with pytest.raises(InvalidField, match="must say to which pool a-1 belongs"):
        expected_goodput(data_parallel(job, snapshot), job, snapshot, known, copies=0)
    with pytest.raises(InvalidField, match="fixed_s = -1"):
        RecoveryFigures(fixed_s=-1)


def test_an_idle_node_keeps_copies_and_its_loss_interrupts_nothing() -> None:
    job, snapshot = rent_job(batch=252), cluster()
    three = snapshot.without(["a-3"])
    plan = data_parallel(job, three)
    with_idle, without = (
        expected_goodput(plan, job, nodes, pools(nodes, SINGLY), copies=2) for nodes in (snapshot, three)
    )
    assert with_idle.interruptions_per_h == without.interruptions_per_h == pytest.approx(0.6)
    assert with_idle.rollbacks_per_h > 0
    assert expected_goodput(plan, job, snapshot, pools(snapshot, SINGLY), copies=3).copies == 3


def test_where_nodes_live_for_less_than_a_step_nothing_is_done() -> None:
    choice = chosen(rent_job(), cluster(), PreemptionRate(single_per_h=1e6))
    assert choice.best.tokens_per_s == 0 and choice.best.share == 0
