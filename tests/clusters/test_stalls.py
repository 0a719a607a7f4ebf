"""For how long the ranks of an epoch may say nothing, and what counts as a word."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator

import pytest
from supervised import tiny_job

from shoal_planner.cluster import ClusterSnapshot, DeviceRef, Node
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.journal import JobState, StateChanged, StepDone
from shoal_recovery.tenure import Life
from shoal_workers import messages as m
from shoal_workers.epoch_view import EpochView
from shoal_workers.keeper import Keeper
from shoal_workers.nodes import NodeSeen
from shoal_workers.record import JobRecord
from shoal_workers.roster import Event, NodeReady, Roster
from shoal_workers.stalls import Stalls
from shoal_workers.watched import report
from shoal_workers.wire import Connection, ConnectionClosed, Server

LEAST_S = 100.0
STEP = StepDone(epoch=1, step=1, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, duration_s=10.0, samples=())
STAGE = Stage(layers=((0, 4),), replicas=(Replica(node="a", devices=(0,)),))
PLAN = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(STAGE,)),))


class Ground:
    """Of a job that is in this state."""

    def __init__(self, state: JobState = JobState.RUNNING, least_s: float = LEAST_S, **train: int) -> None:
        self.silent_s = 0.0
        spec = tiny_job("stdlib:", steps=5)
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, **train))
        self.record = JobRecord(Keeper("j", lambda: 0.0), lambda: 0.0)
        for entered in (JobState.STARTING, JobState.RUNNING, *({state} - {JobState.RUNNING})):
            self.record.append(StateChanged(state=entered.value, code="", reason=""))
        self.stalls = Stalls(spec, self.record, least_s, lambda nodes: self.silent_s if nodes == {"a"} else 0.0)

    def after(self, silent_s: float, epoch: EpochView) -> float | None:
        self.silent_s = silent_s
        return self.stalls.seen(epoch)


def epoch_of(number: int, *, last_step: int = 0) -> EpochView:
    view = EpochView.begun(number, PLAN, ClusterSnapshot(nodes=()), 0, frozenset({"a"}))
    view.last_step = last_step
    return view


def test_a_long_silence_is_a_stall() -> None:
    ground = Ground()
    assert ground.after(LEAST_S, epoch_of(1)) is None
    assert ground.after(LEAST_S + 1.0, epoch_of(1)) == LEAST_S + 1.0


def test_only_while_ranks_are_to_step() -> None:
    over = epoch_of(1)
    assert Ground(JobState.RECOVERING).after(1e6, over) is None
    assert Ground(JobState.DRAINING).after(1e6, over) is not None
    over.hear(DeviceRef(node="a", index=0), m.Left(epoch=1, step=5, finished=True), 0.0)
    assert Ground().after(1e6, over) is None
    assert Ground().stalls.seen(None) is None
    assert Ground(least_s=0.0).after(1e6, epoch_of(1)) is None


@pytest.mark.parametrize(("train", "steps"), [({}, 20), ({"eval_every": 2, "eval_batches": 30}, 50)])
def test_where_steps_are_long_it_may_be_longer(train: dict[str, int], steps: int) -> None:
    """Also in the next epoch, before it has done one."""
    ground = Ground(**train)
    ground.record.append(STEP)
    assert ground.after(steps * STEP.duration_s, epoch_of(2)) is None
    assert ground.after(steps * STEP.duration_s + 1.0, epoch_of(2)) is not None


def test_after_each_stall_it_is_twice_as_long_until_a_step_is_done() -> None:
    ground = Ground()
    for number, limit_s in enumerate((LEAST_S, 2 * LEAST_S, 4 * LEAST_S), start=1):
        assert ground.after(limit_s, epoch_of(number)) is None
        for _ in range(2):  # it is seen until something is done about it
            assert ground.after(limit_s + 1.0, epoch_of(number)) is not None
    assert ground.after(0.0, epoch_of(4, last_step=1)) is None
    assert ground.after(LEAST_S + 1.0, epoch_of(4, last_step=1)) is not None


class OneNode:
    """A cluster of one node whose agent and rank show life on real connections, and say only what a test has them."""

    def __init__(self) -> None:
        self.words: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._agent, self._rank = (
            Server("127.0.0.1", lambda connection, mine=mine: self._live(connection, mine), "test")  # type: ignore[misc]
            for mine in (queue.SimpleQueue[object](), self.words)
        )
        for server in (self._agent, self._rank):
            server.start()

    def close(self) -> None:
        for server in (self._agent, self._rank):
            server.close()

    def _live(self, connection: Connection, words: queue.SimpleQueue[object]) -> None:
        connection.receive()
        connection.send(m.encode(m.Hello(pid=0, epoch=0, stepping=True)))
        threading.Thread(target=self._hear, args=(connection,), daemon=True).start()
        report(connection, words, 0.02)

    def _hear(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                connection.receive()

    def life(self) -> Life:
        return Life(cluster="c", incarnation="1")

    def nodes(self) -> tuple[NodeSeen, ...]:
        node = Node(
            id="a",
            device="cpu-1t",
            devices=1,
            host_memory_bytes=2**30,
            intra_bytes_per_s=1e9,
            inter_bytes_per_s=1e9,
        )
        return (NodeSeen(node=node, incarnation="1"),)

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(nodes=tuple(seen.node for seen in self.nodes()))

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        return "127.0.0.1", self._agent.port

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        return "127.0.0.1", self._rank.port

    def end_ranks(self, job: str) -> None:
        pass

    def claim_epoch(self, job: str, at_least: int) -> int:
        return at_least

    def first_meant(self, notice: str, incarnation: str) -> str:
        return incarnation


@pytest.fixture
def node() -> Iterator[OneNode]:
    made = OneNode()
    yield made
    made.close()


def test_a_heartbeat_is_no_word(node: OneNode) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    roster = Roster(node, "j", events, time.monotonic)
    roster.refresh()
    while not isinstance(events.get(timeout=10.0), NodeReady):
        pass
    began_s = time.monotonic()
    while roster.wordless_s({"a"}) < 0.5:
        assert time.monotonic() < began_s + 20.0
        time.sleep(0.01)
    assert roster.members(time.monotonic())[1].silent_s < roster.wordless_s({"a"})
    while roster.wordless_s({"a"}) > 0.4:
        node.words.put(m.Progress(epoch=0))
        assert time.monotonic() < began_s + 20.0
        time.sleep(0.01)
    assert roster.wordless_s({"b"}) == 0.0
    roster.close()
