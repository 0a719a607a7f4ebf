"""Heartbeats between agents, over real sockets; what is counted as silence; how long one acts without an answer."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import RunningAgent, running_agents
from waiting import eventually

from shoal_workers import messages as m
from shoal_workers.beats import Hearing, Peer
from shoal_workers.lifeline import Lifeline
from shoal_workers.pulse import Pulse
from shoal_workers.roster import Contact, Roster, _Entry, _neighbours
from shoal_workers.watched import report
from shoal_workers.wire import Connection, ConnectionClosed, connect


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def beat_until(pulse: Pulse, clock: Clock, end_s: float) -> None:
    while clock.now_s < end_s - 1e-9:
        clock.now_s += 0.05
        pulse.beat()


# --- silence is counted while one listens ---


def test_a_process_that_runs_counts_all_silence(clock: Clock) -> None:
    pulse = Pulse(clock)
    beat_until(pulse, clock, 110.0)
    assert pulse.awake_s(101.0, clock.now_s) == pytest.approx(9.0)


def test_a_process_that_was_stopped_has_heard_nobody_and_blames_nobody(clock: Clock) -> None:
    pulse = Pulse(clock)
    beat_until(pulse, clock, 101.0)
    clock.now_s = 131.0
    assert pulse.awake_s(101.0, clock.now_s) == pytest.approx(0.25)  # before the first beat after it woke up
    pulse.beat()
    assert pulse.awake_s(101.0, clock.now_s) == pytest.approx(0.25)
    beat_until(pulse, clock, 132.0)
    assert pulse.awake_s(101.0, clock.now_s) == pytest.approx(1.25)
    assert pulse.awake_s(131.5, clock.now_s) == pytest.approx(0.5)


def test_a_process_that_always_gets_its_turn_late_still_finds_silence(clock: Clock) -> None:
    pulse = Pulse(clock)
    for _ in range(10):
        clock.now_s += 0.5
        pulse.beat()
    assert pulse.awake_s(100.0, clock.now_s) == pytest.approx(2.5)


class Link:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, wire: dict[str, Any]) -> None:
        self.sent.append(m.decode(wire))


def roster_of(clock: Clock, pulse: Pulse) -> tuple[Roster, Contact, Link]:
    """A supervisor's, that has reached the agent of one node."""
    nobody: Any = None
    link: Any = Link()
    agent = Contact(node="a", index=None, address=("h", 1), connection=link, last_heard_s=clock(), last_word_s=clock())
    roster = Roster(nobody, "job", queue.SimpleQueue(), clock, pulse.awake_s)
    roster._entries["a"] = _Entry(nobody, [agent], True)
    return roster, agent, link


def test_a_supervisor_that_wakes_up_late_gives_nobody_up(clock: Clock) -> None:
    pulse = Pulse(clock)
    roster, agent, _ = roster_of(clock, pulse)
    clock.now_s += 30.0
    for _ in range(2):  # before and after it notices how late it is
        assert roster.members(clock())[0].silent_s <= 0.25
        assert not roster.is_gone(agent, 0.5)
        assert not roster.drop(frozenset(), clock(), 2.0)
        assert roster.living_agents(clock(), 0.5) == (agent,)
        pulse.beat()
    beat_until(pulse, clock, clock() + 2.0)
    assert roster.is_gone(agent, 2.0)
    assert roster.drop(frozenset(), clock(), 2.0) == {"a"}


def test_heartbeats_are_answered_now_and_then_by_who_knows_the_epoch(clock: Clock) -> None:
    pulse = Pulse(clock)
    roster, agent, link = roster_of(clock, pulse)
    roster._hear(agent, m.encode(m.Heartbeat(at_s=1.0)))
    assert link.sent == []  # it has not read yet what the one before it has written
    roster.epoch = 3
    for tenths in range(10, 26):
        roster._hear(agent, m.encode(m.Heartbeat(at_s=tenths / 10, silent=[["b", 0.7]])))
    assert link.sent == [m.Heard(at_s=at_s, epoch=3) for at_s in (1.0, 1.5, 2.0, 2.5)]
    (witness,) = roster.witnesses(clock(), 0.5)
    assert (witness.node, witness.silent) == ("a", (("b", 0.7),))


def test_who_was_silent_for_so_long_that_it_was_given_up_is_not_answered(clock: Clock) -> None:
    pulse = Pulse(clock)
    roster, agent, link = roster_of(clock, pulse)
    roster.epoch, roster.forgive_s = 3, 12.0
    beat_until(pulse, clock, clock() + 12.1)
    assert roster.witnesses(clock(), 0.5) == ()
    with pytest.raises(ConnectionClosed, match=r"silent for 12\.1 s"):
        roster._hear(agent, m.encode(m.Heartbeat(at_s=1.0)))
    assert link.sent == []


# --- agents hear each other ---


def watch(agent: RunningAgent) -> Connection:
    connection = agent.connect()
    connection.set_timeout(10.0)
    connection.send(m.encode(m.Watch(job="job", after_step=0)))
    return connection


def attend(connection: Connection, *others: RunningAgent) -> None:
    connection.send(m.encode(m.Attend(peers=[[other.node, *other.address] for other in others])))


def silent(connection: Connection) -> dict[str, float]:
    """What the next heartbeat says."""
    while not isinstance(message := m.decode(connection.receive()[0]), m.Heartbeat):
        pass
    return {node: silent_s for node, silent_s in message.silent}


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[tuple[RunningAgent, ...]]:
    with running_agents(tmp_path, "n0", "n1", "n2") as agents:
        yield agents


def test_agents_say_whom_they_hear_no_more(trio: tuple[RunningAgent, ...]) -> None:
    lines = [watch(agent) for agent in trio]
    assert silent(lines[0]) == {}
    for line, agent in zip(lines, trio, strict=True):
        attend(line, *(other for other in trio if other is not agent))
    for line, agent in zip(lines, trio, strict=True):
        eventually(lambda line=line, agent=agent: silent(line).keys() == {"n0", "n1", "n2"} - {agent.node})
    trio[2].close()
    eventually(lambda: (said := silent(lines[0]))["n2"] > 0.3 > said["n1"])
    eventually(lambda: (said := silent(lines[1]))["n2"] > 0.3 > said["n0"])
    attend(lines[0], trio[1])
    eventually(lambda: silent(lines[0]).keys() == {"n1"})
    lines[0].close()
    again = watch(trio[0])
    eventually(lambda: silent(again) == {})


def test_a_peer_that_was_never_heard_is_not_silent(trio: tuple[RunningAgent, ...]) -> None:
    """As on a network that carries no datagrams; nor does whatever else may come to the port count."""
    line = watch(trio[0])
    attend(line, trio[1])  # it is not told to send any
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for word in (b"", b"\xff" * 600, b"shoal-beat-1 x n1", b"shoal-beat-1 1 n1", b"shoal-beat-1 1"):
            stranger.sendto(word, trio[0].address)
        assert all(silent(line) == {} for _ in range(3))
        stranger.sendto(f"shoal-beat-1 {trio[1].address[1]} n1".encode(), trio[0].address)
    eventually(lambda: silent(line).keys() == {"n1"})


def test_several_watchers_are_served_at_once(clock: Clock) -> None:
    hearing = Hearing(Pulse(clock), clock)
    one, other = Peer("b", "h", 1), Peer("c", "h", 2)
    hearing.attend("first", (one,))
    hearing.attend("second", (one, other))
    assert hearing.peers() == {one, other}
    hearing.hear("b", 1)
    hearing.hear("c", 3)  # an earlier agent of that node
    assert hearing.silent() == [("b", 0.0)]
    hearing.leave("second")
    assert hearing.peers() == {one}
    assert hearing.silent() == [("b", 0.0)]
    hearing.attend("first", ())
    assert hearing.silent() == []


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 9])
def test_every_agent_is_heard_by_those_that_it_hears(num: int) -> None:
    link: Any = None
    agents = [
        Contact(node=f"n{i}", index=None, address=("h", i), connection=link, last_heard_s=0, last_word_s=0)
        for i in range(num)
    ]
    found = dict(zip((agent.node for agent in agents), _neighbours(agents), strict=True))
    heard = {node: {row[0] for row in rows} for node, rows in found.items()}
    assert all(len(others) == min(num - 1, 4) and node not in others for node, others in heard.items())
    assert all(node in heard[other] for node, others in heard.items() for other in others)


def test_heartbeats_come_although_there_is_always_something_to_report() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = connect(listener.getsockname()), Connection(listener.accept()[0])
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outbox.put(m.Progress(epoch=0))
    speaker = threading.Thread(target=_report, args=(theirs, outbox), daemon=True)
    speaker.start()
    ours.set_timeout(10.0)
    while not isinstance(m.decode(ours.receive()[0]), m.Heartbeat):
        outbox.put(m.Progress(epoch=0))
    ours.close()
    speaker.join(10.0)
    assert not speaker.is_alive()


def _report(connection: Connection, outbox: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(ConnectionClosed):
        report(connection, outbox, 0.01)
    connection.close()


# --- who is not answered ---


def lifeline(clock: Clock) -> Lifeline:
    return Lifeline(cut_off_s=10.0, ends_itself_s=60.0, clock=clock)


def test_a_lifeline_holds_from_answer_to_answer(clock: Clock) -> None:
    given = lifeline(clock)
    clock.now_s += 1000.0
    assert given.holds()  # nobody has ever watched
    given.answered("one", clock.now_s - 4.0)
    clock.now_s += 5.9
    assert given.holds()
    clock.now_s += 0.1
    assert not given.holds()
    given.answered("one", clock.now_s - 20.0)  # an answer that was long on its way
    assert not given.holds()
    given.answered("two", clock.now_s)
    assert given.holds()


def test_a_supervisor_that_dies_is_no_partition(clock: Clock) -> None:
    given = lifeline(clock)
    given.answered("one", clock.now_s)
    given.left("one")
    clock.now_s += 599.0
    assert given.holds()
    given.answered("next", clock.now_s)
    given.left("next")
    clock.now_s += 601.0
    assert not given.holds()  # the one after it may be on the other side of a partition
    given.answered("two", clock.now_s)
    given.answered("three", clock.now_s + 1.0)
    given.left("two")  # another one still watches
    clock.now_s += 11.0
    assert not given.holds()
    given.left("three")  # it may have given this process up before it went
    assert not given.holds()


def test_nobody_votes_in_an_epoch_that_is_over(clock: Clock) -> None:
    given = lifeline(clock)
    given.answered("one", clock.now_s, epoch=2)
    assert given.holds(2)
    assert given.holds(3)
    assert not given.holds(1)
    assert given.heard


def test_who_is_cut_off_ends_itself_but_not_for_having_been_stopped(clock: Clock) -> None:
    given = lifeline(clock)
    given.answered("one", clock.now_s)
    pauses = itertools.count()

    def pause(seconds_s: float) -> None:
        clock.now_s += seconds_s
        if next(pauses) == 50:
            clock.now_s += 500.0  # stopped, and woken up again
            given.answered("one", clock.now_s - 1.0)

    given.wait_for_end(pause)
    assert clock.now_s == pytest.approx(100.0 + 25.5 + 500.0 - 1.0 + 60.0, abs=1.0)
