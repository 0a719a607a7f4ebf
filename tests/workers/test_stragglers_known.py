"""What a supervisor makes of seconds that ranks tell: whose count, what is written, and when it is forgotten."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from shoal_planner.busy import busy_s
from shoal_planner.cluster import ClusterSnapshot, DeviceRef, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage
from shoal_planner.profile import Profile
from shoal_recovery.journal import JobState, NodeJoined, NodeLost, NodeRecovered, NodeSlowed
from shoal_workers import messages as m
from shoal_workers.epoch_view import EpochView
from shoal_workers.keeper import Keeper
from shoal_workers.record import JobRecord
from shoal_workers.stragglers import Stragglers

JOB = JobSpec(
    name="job",
    model=ModelSpec(layers=4, hidden=256, heads=4, ffn=512, vocab=256),
    data=DataSpec(uri="stdlib:"),
    train=TrainSpec(global_batch=6, seq_len=128, steps=1000),
)
READY = frozenset({"n-0", "n-1", "n-2"})
STEP_S = 1.0


def cluster(device: str = "cpu-1t") -> ClusterSnapshot:
    return parse_cluster({"nodes": [{"name": "n", "device": device, "count": 3}]})


def plan_on(*nodes: str, batch: int = 6, sharding: Sharding | None = None) -> Plan:
    replicas = tuple(Replica(node=node, devices=(0,), samples=batch // len(nodes)) for node in nodes)
    stage = Stage(layers=((0, 4),), replicas=replicas)
    pipeline = Pipeline(micro_batch=batch, micro_batches=1, stages=(stage,))
    return Plan(pipelines=(pipeline,), sharding=sharding or Sharding())


class Told:
    """Steps of an epoch as ranks tell them, one second each."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.record = JobRecord(Keeper("job", lambda: self.now_s), lambda: self.now_s)
        self.stragglers = Stragglers(JOB, self.record, lambda: self.now_s)
        self.begin(1, plan_on("n-0", "n-1", "n-2"))

    def begin(self, number: int, plan: Plan, snapshot: ClusterSnapshot | None = None) -> None:
        nodes = (snapshot or cluster()).at_speeds(self.record.speeds)
        self.epoch = EpochView.begun(number, plan, nodes, 0, frozenset(READY))
        self.expected = busy_s(plan, CostModel(JOB, nodes.at_speeds({}), Profile()))
        self.step = 0

    def see(self, steps: int, **times: float) -> None:
        for _ in range(steps):
            self.step += 1
            for device, seconds in self.expected.items():
                times_longer = times.get(device.node.replace("-", ""), 1.0)
                self.stragglers.heard(self.epoch, device, self.stepped(seconds * times_longer))
            self.now_s += STEP_S

    def stepped(self, computed_s: float, epoch: int | None = None) -> m.Stepped:
        return m.Stepped(
            epoch=self.epoch.number if epoch is None else epoch,
            step=self.step,
            loss=1.0,
            grad_norm=1.0,
            lr=1e-3,
            tokens=1,
            duration_s=STEP_S,
            samples=[],
            moved=[],
            exposed=[0.0, 0.0],
            waited=[],
            computed_s=computed_s,
        )

    def repaced(self) -> tuple[tuple[str, str], ...]:
        return self.stragglers.repaced(self.epoch, READY)


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.record.keeper.close()


def events(told: Told) -> list[object]:
    return [entry.event for entry in told.record.keeper.entries()]


def test_a_straggler_is_written_down_and_the_plan_does_not_suit_it_until_it_is_made_for_it(told: Told) -> None:
    told.see(20)
    assert told.repaced() == ()
    told.see(20, n1=2.0)
    (slowed,) = events(told)
    assert isinstance(slowed, NodeSlowed) and (slowed.node, slowed.slowdown) == ("n-1", 2.0)
    assert slowed.reason.startswith("It computes 2 times slower than it should") and "n-1:0" in slowed.reason
    assert told.repaced() == (("n-1", "is 2 times slower than it should be"),)
    assert told.stragglers.repaced(told.epoch, READY - {"n-1"}) == (), "nobody plans with it"
    assert told.stragglers.repaced(None, READY) == ()
    told.begin(2, told.epoch.plan)
    told.see(30, n1=2.0)
    assert told.repaced() == () and len(events(told)) == 1
    told.see(60)
    recovered = events(told)[-1]
    assert isinstance(recovered, NodeRecovered) and "it was 2 times slower" in recovered.reason
    assert told.repaced() == (("n-1", "counts as no straggler any more"),)


def test_first_steps_and_other_epochs_do_not_count(told: Told) -> None:
    told.see(2, n1=50.0)
    told.see(7)
    for device, seconds in told.expected.items():
        told.stragglers.heard(told.epoch, device, told.stepped(seconds * 50, epoch=7))
    told.see(40)
    assert events(told) == []


def test_who_has_next_to_nothing_to_do_is_not_judged(told: Told) -> None:
    told.expected = dict.fromkeys(told.expected, 1e-4)
    told.stragglers._spec = dataclasses.replace(JOB, model=ModelSpec(layers=4, hidden=16, heads=2, ffn=16, vocab=256))
    told.see(20)
    told.see(40, n1=20.0)
    assert events(told) == []


def test_where_a_gpu_waits_for_other_nodes_within_its_work_nobody_is_judged(told: Told) -> None:
    for sharding, found in ((Sharding(weights="cluster", gradients="cluster", optimizer="cluster"), 0), (None, 1)):
        told.begin(told.epoch.number + 1, plan_on("n-0", "n-1", "n-2", sharding=sharding), cluster("T4"))
        told.stragglers.least_s = 0.0
        told.see(20)
        told.see(20, n1=3.0)
        assert len(events(told)) == found


def test_a_straggler_that_is_left_out_is_forgotten_each_time_later(told: Told) -> None:
    told.see(20)
    for number, minutes in ((2, 10), (4, 20)):
        told.see(20, n1=9.0)
        assert told.record.slow.keys() == {"n-1"}
        told.begin(number, plan_on("n-0", "n-2"))
        told.see(4)
        assert told.repaced() == ()
        told.now_s += minutes * 60 - 1
        assert told.repaced() == ()
        told.now_s += 1
        assert told.repaced() == (("n-1", "counts as no straggler any more"),)
        recovered = events(told)[-1]
        assert isinstance(recovered, NodeRecovered) and f"for {minutes} min" in recovered.reason
        told.begin(number + 1, plan_on("n-0", "n-1", "n-2"))
        told.see(20)


def test_what_is_known_of_a_node_ends_with_it_and_a_new_supervisor_knows_the_rest(told: Told) -> None:
    told.see(20)
    told.see(20, n1=3.0)
    after = JobRecord(Keeper("job", lambda: 0.0), lambda: 0.0)
    after.adopt(told.record.keeper.entries())
    assert after.speeds == told.record.speeds == {"n-1": pytest.approx(1 / 3)}
    slowed = told.record.slow["n-1"]
    for event in (
        NodeLost(node="n-1", evidence="the connection closed", detect_s=0.1),
        NodeJoined(node="n-1", device="cpu-1t", devices=1),
    ):
        after.append(slowed)
        after.append(event)
        assert after.speeds == {}
    after.append(slowed)
    after.enter(JobState.STARTING, "", "")
    after.enter(JobState.PAUSED, "", "")
    assert after.speeds == {}
    assert after.times_slowed["n-1"] == 4
    after.keeper.close()


def test_what_a_rank_that_died_did_not_tell_holds_nobody_up(told: Told) -> None:
    told.see(20)
    told.step += 1
    told.stragglers.heard(told.epoch, DeviceRef(node="n-0", index=0), told.stepped(99.0))
    told.see(20, n1=3.0)
    assert len(events(told)) == 1
    assert not told.stragglers._steps
