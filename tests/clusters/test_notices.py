"""Notices on their way: kept by an agent, told to whoever watches, written down by a supervisor until they are over."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from pathlib import Path
from typing import Any

import pytest
from agents import running_agents, watch
from process_cluster import SETTINGS, ProcessCluster
from supervised import tiny_job
from waiting import eventually

from shoal_planner.cluster import Node
from shoal_recovery.journal import Event, NodeNoticed, NoticeEnded
from shoal_workers import messages as m
from shoal_workers.doomed import Doomed
from shoal_workers.herald import Herald
from shoal_workers.keeper import Keeper
from shoal_workers.nodes import NodeSeen, NodeUnreachable
from shoal_workers.record import JobRecord
from shoal_workers.roster import Contact, Roster, Said, _Entry
from shoal_workers.supervisor import Supervisor
from shoal_workers.wire import Connection, connect

SPOT = m.GiveNotice(source="aws spot", name="terminate at noon", why="terminate", lead_s=120.0)
OVERDUE_S = 60.0


def hears(connection: Connection) -> m.Noticed | m.Withdrawn:
    """The next message that is more than a sign of life."""
    while True:
        message = m.decode(connection.receive()[0])
        if not isinstance(message, m.Heartbeat):
            assert isinstance(message, m.Noticed | m.Withdrawn)
            return message


def test_an_agent_tells_all_who_watch_also_those_who_come_later(tmp_path: Path) -> None:
    with running_agents(tmp_path, "n0") as (agent,):
        early = watch(agent)
        assert agent.ask(SPOT) == m.Done()
        assert agent.ask(SPOT) == m.Done()  # the same once more is no news
        late = watch(agent)
        for watcher in (early, late):
            told = hears(watcher)
            assert isinstance(told, m.Noticed)
            assert (told.source, told.why, told.lead_s) == ("aws spot", "terminate", 120.0)
            assert 0 < told.left_s <= 120.0
        agent.agent.notices.withdraw("aws spot")
        agent.agent.notices.withdraw("aws spot")
        agent.ask(m.GiveNotice(source="drill", name="d", why="asked for", lead_s=1.0))
        for watcher in (early, late):
            assert hears(watcher) == m.Withdrawn(source="aws spot")
            assert isinstance(hears(watcher), m.Noticed)


def test_a_notice_is_given_again_to_an_agent_that_was_started_anew(tmp_path: Path) -> None:
    """As long as it lasts; and not to one that has it."""
    cluster, now_s = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1)}), [0.0]
    herald = Herald(cluster, lambda: now_s[0])
    drill = m.GiveNotice(source="drill", name="d", why="asked for", lead_s=120.0)

    def first_word(within_s: float) -> object:
        """Of the agent that runs now, to whoever begins to watch it; None where it is only heartbeats."""
        (seen,) = cluster.nodes()
        connection = connect(cluster.agent(seen))
        try:
            connection.set_timeout(within_s)
            connection.send(m.encode(m.Watch(job="job", after_step=0)))
            heard = [m.decode(connection.receive()[0]) for _ in range(3)]
            return next((each for each in heard if not isinstance(each, m.Heartbeat)), None)
        finally:
            connection.close()

    def told_to(notice: m.GiveNotice) -> bool:
        herald.pass_on("a", notice)
        return first_word(10.0) is not None

    try:
        eventually(lambda: told_to(drill), 20.0)
        eventually(lambda: herald._due_s == {"d": 5.0})
        cluster.kill_agent("a")
        assert not told_to(drill), "it was given a moment ago"
        now_s[0] = 6.0
        ended = dataclasses.replace(drill, lead_s=0.0)
        assert not told_to(ended), "it lasts no more"
        eventually(lambda: told_to(drill), 20.0)
    finally:
        cluster.close()


class Watched:
    """A supervisor's view, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.record = JobRecord(Keeper("job", lambda: 0.0), lambda: self.now_s)
        self.doomed = Doomed(self.record, lambda: self.now_s, OVERDUE_S)

    def events(self) -> list[Event]:
        return [entry.event for entry in self.record.keeper.entries()]

    def restarted(self) -> Watched:
        other = Watched()
        other.record.adopt(self.record.keeper.entries())
        return other


def told(source: str = "aws spot", left_s: float = 120.0) -> m.Noticed:
    return m.Noticed(source=source, why="terminate", lead_s=120.0, left_s=left_s)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def outcomes(watched: Watched) -> list[tuple[str, str]]:
    return [(event.source, event.outcome) for event in watched.events() if isinstance(event, NoticeEnded)]


def test_a_notice_holds_until_the_node_is_gone(watched: Watched) -> None:
    watched.doomed.hear("a", told())
    watched.now_s += 20.0
    watched.doomed.settle(frozenset({"a", "b"}))
    assert watched.doomed.told() == (("a", "aws spot: terminate, in 100 s"),)
    watched.doomed.settle(frozenset({"b"}))
    assert watched.doomed.told() == ()
    assert outcomes(watched) == [("aws spot", "gone")]


def test_a_notice_that_comes_to_nothing_is_over_some_time_later(watched: Watched) -> None:
    watched.doomed.hear("a", told())
    watched.now_s += 120.0 + OVERDUE_S
    watched.doomed.settle(frozenset({"a"}))
    assert watched.doomed.told() == (("a", "aws spot: terminate, by now"),)
    watched.now_s += 1.0
    watched.doomed.settle(frozenset({"a"}))
    assert watched.doomed.told() == ()
    assert outcomes(watched) == [("aws spot", "overdue")]
    watched.doomed.hear("a", told(left_s=-OVERDUE_S - 1.0))  # as one who comes much later is told
    assert watched.doomed.told() == ()


def test_a_node_is_doomed_as_long_as_anybody_says_so(watched: Watched) -> None:
    watched.doomed.hear("a", told("aws rebalance", 600.0))
    watched.doomed.hear("a", told())
    assert watched.doomed.told() == (("a", "aws spot: terminate, in 120 s"),)
    watched.doomed.hear("a", m.Withdrawn(source="aws spot"))
    watched.doomed.hear("a", m.Withdrawn(source="drill"))
    assert watched.doomed.told() == (("a", "aws rebalance: terminate, in 600 s"),)
    assert outcomes(watched) == [("aws spot", "withdrawn")]


def test_a_supervisor_that_comes_later_writes_nothing_twice(watched: Watched) -> None:
    watched.doomed.hear("a", told())
    later = watched.restarted()
    later.doomed.hear("a", told(left_s=70.0))
    assert [type(event) for event in later.events()] == [NodeNoticed]
    assert later.doomed.told() == (("a", "aws spot: terminate, in 70 s"),)
    lonely = watched.restarted()
    lonely.doomed.settle(frozenset())
    assert outcomes(lonely) == [("aws spot", "gone")]


def test_a_notice_of_a_machine_that_was_replaced_while_nobody_watched_is_over(watched: Watched) -> None:
    """The agent of the new one says nothing of it."""
    watched.doomed.hear("a", told())
    later = watched.restarted()
    later.doomed.settle(frozenset({"a"}))
    later.now_s += 1.0
    later.doomed.settle(frozenset({"a"}))
    assert later.doomed.told(), "it may yet be told"
    later.now_s += 2.0
    later.doomed.settle(frozenset({"a"}))
    assert later.doomed.told() == ()
    assert outcomes(later) == [("aws spot", "gone")]


class SilentWire:
    """A connection that stays open and carries nothing."""

    def close(self) -> None:
        pass


def with_agent(roster: Roster, heard_s: float) -> Contact:
    """The one of node a, which was heard then."""
    wire: Any = SilentWire()
    node = Node(id="a", device="T4", devices=1, host_memory_bytes=1, intra_bytes_per_s=1.0, inter_bytes_per_s=1.0)
    agent = Contact(node="a", index=None, address=("", 0), connection=wire, last_heard_s=heard_s, last_word_s=heard_s)
    roster._entries["a"] = _Entry(NodeSeen(node=node, incarnation="a#1"), [agent])
    return agent


@pytest.mark.parametrize(("silent_s", "ends"), [(5.0, []), (15.0, ["gone"])])
def test_a_supervisor_waits_for_a_silent_agent_before_it_ends_a_notice(
    tmp_path: Path, silent_s: float, ends: list[str]
) -> None:
    """After `silence_s` of 4 seconds it is still listened to; after `out_of_sight_s` it has to be recruited anew."""
    supervisor = Supervisor(
        job="job",
        spec=tiny_job("stdlib:", steps=1),
        cluster=ProcessCluster(tmp_path, {}),
        settings=SETTINGS,
        restarted=False,
        clock=lambda: 100.0,
    )
    with_agent(supervisor._roster, 100.0 - silent_s)
    supervisor._doomed.hear("a", told())
    supervisor.tick()
    ended = [entry.event for entry in supervisor.entries_after(0, 0.0) if isinstance(entry.event, NoticeEnded)]
    assert [event.outcome for event in ended] == ends


def test_silence_on_an_open_connection_ends_no_notice(watched: Watched) -> None:
    """The agent goes on where it was, and says nothing twice; where it is forgotten it is found again, and does."""
    nowhere: Any = None
    roster = Roster(nowhere, "job", queue.SimpleQueue(), lambda: watched.now_s)
    roster.forgive_s = 12.0
    agent = with_agent(roster, watched.now_s)
    watched.doomed.hear("a", told())
    for passed_s, ends in ((11.0, []), (2.0, [("aws spot", "gone")])):
        watched.now_s += passed_s
        watched.doomed.settle(roster.there(watched.now_s, 2.0))
        assert outcomes(watched) == ends
    agent.last_heard_s = watched.now_s - 3.0
    assert roster.there(watched.now_s, 2.0) == {"a"}
    roster.forget("a")
    assert roster.there(watched.now_s, 4.0) == {"a"}
    assert roster.there(watched.now_s, 2.0) == set()
    agent.connected = False
    assert roster.there(watched.now_s, 4.0) == set()


class Drained(ProcessCluster):
    """Agents run on, but nothing begins on its nodes any more, as where Ray drains them."""

    refused = 0

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        self.refused += 1
        raise NodeUnreachable(seen.node.id, "the node is being drained")


def test_a_node_that_takes_no_ranks_any_more_is_told_of_once(watched: Watched, tmp_path: Path) -> None:
    """It is asked again and again; what its agent has told of its end holds meanwhile, and is no news."""
    cluster, events = Drained(tmp_path, {"a": ("cpu-1t", 1)}), queue.SimpleQueue[Any]()
    roster = Roster(cluster, "job", events, lambda: watched.now_s)

    def refused(often: int) -> bool:
        roster.refresh()
        with contextlib.suppress(queue.Empty):
            match events.get_nowait():
                case Said(contact=contact, message=m.Noticed() as message):
                    watched.doomed.hear(contact.node, message)
        watched.doomed.settle(roster.there(watched.now_s, 4.0))
        return cluster.refused >= often

    try:
        eventually(lambda: refused(1), 20.0)
        cluster.notice("a", 120.0)
        eventually(lambda: refused(1) and bool(watched.events()), 20.0)
        often = cluster.refused + 5
        eventually(lambda: refused(often), 20.0)
        assert [type(event) for event in watched.events()] == [NodeNoticed]
    finally:
        roster.close()
        cluster.close()


class Reluctant(ProcessCluster):
    """Its agent cannot be started the first time, and its head has a hiccup the second time."""

    asked = 0

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        self.asked += 1
        if self.asked == 1:
            raise NodeUnreachable(seen.node.id, "not now")
        if self.asked == 2:
            raise RuntimeError("the head does not answer")
        return super().agent(seen)


def test_a_notice_is_brought_to_the_agent_of_its_node(tmp_path: Path) -> None:
    """Once, and again where that did not succeed; an agent that does not run yet is started."""
    cluster = Reluctant(tmp_path, {"a": ("cpu-1t", 1)})
    herald = Herald(cluster)
    try:
        herald.pass_on("elsewhere", SPOT)

        def asked_often() -> bool:
            herald.pass_on("a#1", dataclasses.replace(SPOT, name="another"))
            return cluster.asked >= 3

        eventually(asked_often, 20.0)
        (seen,) = cluster.nodes()
        connection = connect(cluster.agent(seen))
        connection.send(m.encode(m.Watch(job="job", after_step=0)))
        told = hears(connection)
        assert isinstance(told, m.Noticed)
        assert told.source == "aws spot"
        asked = cluster.asked
        herald.pass_on("a#1", dataclasses.replace(SPOT, name="another"))
        connection.close()
        assert cluster.asked == asked
        cluster.kill_node("a")
        cluster.bring_back("a")
        later = Herald(cluster)
        later.pass_on("a", dataclasses.replace(SPOT, name="another"))  # as the next connector is told
        later.pass_on("a", dataclasses.replace(SPOT, name="of the new machine", source="drill"))
        eventually(lambda: cluster.asked > asked, 20.0)
        (seen,) = cluster.nodes()
        connection = connect(cluster.agent(seen))
        connection.send(m.encode(m.Watch(job="job", after_step=0)))
        told = hears(connection)
        assert isinstance(told, m.Noticed)
        assert told.source == "drill"
        connection.close()
    finally:
        cluster.close()
