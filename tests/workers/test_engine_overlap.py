"""What overlaps changes when exchanges happen and nothing else: the same bits as one exchange after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_runs import LAYOUTS, assert_same_bits, job, on_nodes, part, plan
from late_runs import run_beside_late

from shoal_planner.levels import Sharding
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Plan
from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, whole_state
from shoal_workers.traffic import Wait

STEPS = 3
WHOLE = LAYOUTS["3 stages beside 1"]
TENSOR = plan((2, (part(2, (2, 4)), part(4, (2, 3), (1, 1)))))
STATE_ALONE = plan((2, (part(6, (1, 3), (1, 1), (1, 0)),)))  # one replica runs nothing
NEAR = on_nodes(plan((2, (part(6, (1, 1), (1, 2), (1, 1), (1, 0)),))), "n0", "n0", "n1", "n1")


def sharded(sharding: Sharding) -> Plan:
    return replace(NEAR, sharding=sharding)


ZERO_PP = Sharding(weights="cluster", gradients="cluster", gather="int8", scatter="int4", secondary=True)
EVERYTHING = Overlap(stages=True, gradients=True, tensor_chunks=3)
SHARDS = Overlap(stages=True, shards=True)


@pytest.mark.parametrize(
    ("given", "overlap", "tied"),
    [
        pytest.param(WHOLE, EVERYTHING, True, id="pipelines that are cut at different layers"),
        pytest.param(replace(WHOLE, schedule="zero_bubble"), EVERYTHING, False, id="gradients that are put off"),
        pytest.param(
            replace(WHOLE, sharding=Sharding(optimizer="none")),
            Overlap(gradients=True),
            True,
            id="state of several",
            marks=pytest.mark.long,
        ),
        pytest.param(TENSOR, Overlap(tensor_chunks=4), False, id="tensor parallelism in chunks"),
        pytest.param(STATE_ALONE, Overlap(gradients=True), True, id="one that runs nothing"),
        pytest.param(sharded(Sharding(weights="node")), replace(SHARDS, gradients=True), True, id="split weights"),
        pytest.param(
            sharded(Sharding(weights="node", gradients="cluster")),
            SHARDS,
            False,
            id="split gradients",
            marks=pytest.mark.long,
        ),
        pytest.param(sharded(ZERO_PP), SHARDS, False, id="two hops"),
    ],
)
def test_overlapping_changes_no_bit(processes: Processes, given: Plan, overlap: Overlap, tied: bool) -> None:
    spec = job(tied=tied, steps=STEPS)
    one, other = (
        processes.run(RunRequest(job=spec, plan=each, until_step=STEPS))
        for each in (given, replace(given, overlap=overlap))
    )
    assert one.losses == other.losses
    assert_same_bits(one.state, other.state)


LATE = (4, (part(6, (1, 1)),))
BESIDE_LATE = {
    "gloo": on_nodes(plan((1, (part(6, (1, 4)),)), LATE), "n0", "n1"),
    "shared memory": plan((1, (part(6, (1, 4)),)), LATE),
    "wires": plan((1, (part(6, (1, 4)),)), LATE),
    "two of three": on_nodes(plan(*[(1, (part(6, (1, 2)),))] * 2, LATE), "n0", "n1", "n2"),
    "stages, tp 2": on_nodes(plan((2, (part(2, (2, 2)), part(4, (1, 2)))), LATE), "n0", "n0", "n1"),
    "state of several": replace(plan((1, (part(6, (1, 4)),)), LATE), sharding=Sharding(optimizer="none")),
    "gradients put off": replace(plan((2, (part(2, (1, 2)), part(4, (1, 2)))), LATE), schedule="zero_bubble"),
}


@pytest.mark.parametrize("name", BESIDE_LATE)
def test_who_has_its_gradients_early_computes_on(processes: Processes, name: str) -> None:
    """What others have to give is not waited for before all of the own backward is done, and changes no bit."""
    spec, given = job(tied=False, steps=1), BESIDE_LATE[name]
    request = RunRequest(job=spec, plan=replace(given, overlap=Overlap(gradients=True)), until_step=1)
    size = sum(1 for _ in given.places())
    ranks, made = zip(*processes.call(size, run_beside_late, request, name == "wires"), strict=True)
    assert all(each and all(each) for each in made)
    alone = processes.run(RunRequest(job=spec, plan=given, until_step=1))
    assert_same_bits(whole_state(spec, ranks), alone.state)


def test_units_that_come_when_they_are_needed_take_less_memory(processes: Processes) -> None:
    given = sharded(Sharding(weights="cluster", gradients="cluster"))
    plain, ahead = (
        processes.run(RunRequest(job=job(steps=1), plan=replace(given, overlap=overlap), until_step=1))
        for overlap in (Overlap(), SHARDS)
    )
    for one, other in zip(plain.ranks, ahead.ranks, strict=True):
        assert one.peak_bytes <= other.peak_bytes
    assert sum(rank.peak_bytes for rank in plain.ranks) < sum(rank.peak_bytes for rank in ahead.ranks)


def test_every_rank_hears_what_all_ranks_waited(processes: Processes) -> None:
    kinds = {Wait.STAGES, Wait.TENSOR, Wait.GRADIENTS, Wait.WEIGHTS, Wait.VOTE}
    run = processes.run(RunRequest(job=job(steps=STEPS), plan=WHOLE, until_step=STEPS))
    first = run.ranks[0].reports
    for rank in run.ranks:
        assert [report.exposure for report in rank.reports] == [report.exposure for report in first]
        assert all(0.0 < report.compute_s <= report.duration_s for report in rank.reports)
    for reports in zip(*(rank.reports for rank in run.ranks), strict=True):
        for wait, (_, most_s) in reports[0].exposure.waited_s.items():
            assert max(report.waited_s[wait] for report in reports) == most_s
    for report in first:
        assert 0.0 < report.exposure.mean_share <= report.exposure.most_share <= 1.0
        assert all(mean_s <= most_s for mean_s, most_s in report.exposure.waited_s.values())
    found = {wait for wait, (_, most_s) in first[-1].exposure.waited_s.items() if most_s}
    assert found - {Wait.SAFETY} == kinds
