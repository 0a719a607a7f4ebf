"""When nodes were last heard: what a connector makes of what supervisors say, and what a roster keeps."""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping

import pytest
from waiting import eventually

from shoal_planner.cluster import ClusterSnapshot, Node, parse_cluster
from shoal_workers import messages as m
from shoal_workers.greeting import expect_greeting
from shoal_workers.nodes import NodeSeen
from shoal_workers.roster import Event, NodeReady, Roster
from shoal_workers.signs import Signs
from shoal_workers.wire import Connection


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def told(signs: Signs, nodes: Iterable[str], jobs: Iterable[str]) -> dict[str, tuple[float, str]]:
    return {sign["node"]: (sign["age_s"], sign["by"]) for sign in signs.look(nodes, jobs)}


def test_a_node_is_as_old_as_its_newest_sign_of_life() -> None:
    clock = Clock()
    answers: dict[str, dict[str, float]] = {"job_a": {"n1": 0.04, "n2": 7.0}, "job_b": {"n2": 0.02}}

    def ask(jobs: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        return {job: answers[job] for job in jobs if job in answers}

    signs = Signs(ask, clock)
    both = ("job_a", "job_b")
    found = told(signs, ["n1", "n2", "n3"], both)
    assert found == {"n1": (0.04, "processes"), "n2": (0.02, "processes"), "n3": (0.0, "ray")}

    clock.now_s += 5.0
    del answers["job_b"]
    answers["job_a"] = {"n1": 0.01}
    found = told(signs, ["n1", "n3"], both)
    assert found == {"n1": (0.01, "processes"), "n2": (5.02, "processes"), "n3": (0.0, "ray")}, "it grows old, unasked"

    assert told(signs, ["n1", "n2"], ()) == {"n1": (0.0, "ray"), "n2": (0.0, "ray")}, "nobody listens to them any more"


class OneNode:
    """A cluster whose node is a socket of this test."""

    def __init__(self, address: tuple[str, int], rank_address: tuple[str, int] | None = None) -> None:
        self._address, self._rank_address = address, rank_address
        self._seen = NodeSeen(node=_node(), incarnation="0" * 8)

    def nodes(self) -> tuple[NodeSeen, ...]:
        return (self._seen,)

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        return self._address

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        assert self._rank_address is not None
        return self._rank_address

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(nodes=(self._seen.node,))


def _node() -> Node:
    return parse_cluster({"nodes": [{"name": "n", "count": 1, "device": "T4", "devices": 1}]}).nodes[0]


@pytest.mark.timeout(30)
def test_a_roster_says_how_long_each_node_is_silent() -> None:
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        roster = Roster(OneNode(listener.getsockname()), "job", queue.SimpleQueue(), clock, with_ranks=False)  # type: ignore[arg-type]
        roster.refresh()
        accepted = listener.accept()[0]
        expect_greeting(accepted)
        agent = Connection(accepted)
        agent.receive()
        agent.send(m.encode(m.Heartbeat(at_s=1.0)))
        eventually(lambda: roster.silences_s() == {"n-0": 0.0})
        clock.now_s += 3.0
        assert roster.silences_s() == {"n-0": 3.0}
        agent.send(m.encode(m.Heartbeat(at_s=2.0)))
        eventually(lambda: roster.silences_s() == {"n-0": 0.0})
        roster.close()
        agent.close()


def _called(listener: socket.socket) -> tuple[Connection, object]:
    """Whoever calls next, and what it says first."""
    accepted = listener.accept()[0]
    expect_greeting(accepted)
    connection = Connection(accepted)
    return connection, m.decode(connection.receive()[0])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("answer", [m.SignalIs(name="SIGSEGV"), m.SignalIs(name=None), m.Done(problem="no"), None])
def test_what_a_rank_died_of_is_asked_and_not_waited_for(answer: m.SignalIs | m.Done | None) -> None:
    """`answer` is that of the agent; None: it is busy, and takes no calls."""
    with socket.create_server(("127.0.0.1", 0)) as agents, socket.create_server(("127.0.0.1", 0)) as ranks:
        node = OneNode(agents.getsockname(), ranks.getsockname())
        roster = Roster(node, "job", queue.SimpleQueue(), time.monotonic)  # type: ignore[arg-type]
        roster.refresh()
        agent, _ = _called(agents)
        agent.send(m.encode(m.Heartbeat(at_s=1.0)))
        rank, _ = _called(ranks)
        rank.send(m.encode(m.Hello(pid=71, epoch=0, stepping=False)))
        eventually(lambda: roster.ready() == {"n-0"})
        rank.close()
        closed_s = time.monotonic()
        if answer is not None:
            asked, question = _called(agents)
            assert question == m.GetSignal(job="job", pid=71)
            asked.send(m.encode(answer))
            asked.close()
        eventually(lambda: not roster.ready())
        assert time.monotonic() - closed_s < 5.0, "or a job would stand still for as long as somebody does not answer"
        (lost,) = (member for member in roster.members(time.monotonic()) if not member.connected)
        assert lost.ended_by == (answer.name if isinstance(answer, m.SignalIs) else None)
        roster.close()
        agent.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("answers", [True, False])
def test_a_node_is_ready_when_its_ranks_say_that_they_are_prepared(answers: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as agents, socket.create_server(("127.0.0.1", 0)) as ranks:
        node, order = OneNode(agents.getsockname(), ranks.getsockname()), m.Prepare(spec={"name": "job"})
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        roster = Roster(node, "job", events, time.monotonic, order=order)  # type: ignore[arg-type]
        roster.refresh()
        agent, _ = _called(agents)
        agent.send(m.encode(m.Heartbeat(at_s=1.0)))
        rank, _ = _called(ranks)
        rank.send(m.encode(m.Hello(pid=71, epoch=0, stepping=False)))
        assert m.decode(rank.receive()[0]) == order
        assert not roster.ready() and roster.coming() == {"n-0"}
        if answers:
            rank.send(m.encode(m.Prepared()))
            eventually(lambda: roster.ready() == {"n-0"} and not roster.coming())
            roster.close()
            agent.close()
            rank.close()
            return
        rank.close()
        asked, question = _called(agents)
        assert isinstance(question, m.GetSignal)
        asked.close()
        eventually(lambda: not roster.contacts() and not roster._recruiting)  # nobody waits for one that is lost
        roster.refresh()
        again, _ = _called(agents)
        again.send(m.encode(m.Heartbeat(at_s=1.0)))
        second, _ = _called(ranks)
        second.send(m.encode(m.Hello(pid=72, epoch=0, stepping=False)))
        eventually(lambda: roster.ready() == {"n-0"})  # what ended the first one shows when the next takes part
        told = [events.get_nowait() for _ in range(events.qsize())]
        assert sum(isinstance(each, NodeReady) for each in told) == 1 and isinstance(told[-1], NodeReady)
        roster.close()
        for connection in (agent, again, second):
            connection.close()


class SlowNode(OneNode):
    """Its processes are loaded when all of them are asked for."""

    def __init__(self, address: tuple[str, int], rank_address: tuple[str, int], num_devices: int) -> None:
        super().__init__(address, rank_address)
        self._seen = NodeSeen(node=dataclasses.replace(self._seen.node, devices=num_devices), incarnation="0" * 8)
        self._all_asked = threading.Barrier(1 + num_devices, timeout=20)

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        self._all_asked.wait()
        return super().agent(seen)

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        self._all_asked.wait()
        return super().rank(seen, job, index)


@pytest.mark.timeout(30)
def test_all_processes_of_a_node_are_started_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as agents, socket.create_server(("127.0.0.1", 0)) as ranks:
        node = SlowNode(agents.getsockname(), ranks.getsockname(), 3)
        roster = Roster(node, "job", queue.SimpleQueue(), time.monotonic)  # type: ignore[arg-type]
        roster.refresh()
        agent, _ = _called(agents)
        agent.send(m.encode(m.Heartbeat(at_s=1.0)))
        called = []
        for pid in range(3):
            assert not roster.ready()
            rank, _ = _called(ranks)
            rank.send(m.encode(m.Hello(pid=pid, epoch=0, stepping=False)))
            called.append(rank)
        eventually(lambda: roster.ready() == {"n-0"})
        assert [contact.index for contact in roster.contacts()] == [None, 0, 1, 2]
        roster.close()
        for connection in (agent, *called):
            connection.close()
