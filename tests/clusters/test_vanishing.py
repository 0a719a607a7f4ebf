"""Hosts that vanish without a packet, and networks that fall apart: each node has a link of its own, which is cut."""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from networks import Network, enter, missing
from process_cluster import SETTINGS, ProcessCluster
from supervised import Supervised, supervised, tiny_job

from shoal_planner.job import CheckpointSpec, LimitsSpec
from shoal_recovery.journal import JobState, NodeJoined, NodeLost, PlanAdopted, RecoveryDone, StepDone
from shoal_workers import messages as m
from shoal_workers.solo import run_solo
from shoal_workers.wire import ConnectionClosed, Server, connect

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "networks can be made")

_COMPARED = 150  # steps: while one waits for other things the job makes as many as the machine allows

QUICK = SETTINGS.model_copy(
    update={"silence_s": 4.0, "silence_confirmed_s": 1.0, "cut_off_s": 3.0, "ends_itself_s": 6.0}
)
PATIENT = QUICK.model_copy(update={"silence_s": 2.0, "cut_off_s": 30.0, "ends_itself_s": 60.0})


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(("a", "b", "c")) as made:
        yield made


def begins(running: Supervised, step: int) -> None:
    """However long it takes."""
    running.eventually(lambda: running.step >= step, 120.0)


def assert_one_epoch_at_a_time(running: Supervised) -> None:
    """Of a job that is over: no step of an epoch is written after a later one has begun, and the losses are those of
    one process."""
    epochs = [event.epoch for event in running.events(StepDone)]
    assert epochs == sorted(epochs)
    losses = running.losses()
    assert sorted(losses) == list(range(1, running.step + 1))
    reference = run_solo(running.spec, min(running.step, _COMPARED)).losses
    for step, loss in enumerate(reference, start=1):
        assert abs(losses[step] - loss) < 1e-4 * loss, step


def test_a_host_that_vanishes_is_missed_by_two_and_ends_itself(network: Network, text: str, tmp_path: Path) -> None:
    """One of three: the others go on from copies. When the network heals it joins as if it were new."""
    shapes = dict.fromkeys(("a", "b", "c"), ("cpu-1t", 1))
    cluster = ProcessCluster(tmp_path / "nodes", shapes, network=network, settings=QUICK)
    spec = tiny_job(text, steps=100_000, min_devices=2)
    try:
        with supervised(cluster, "vanishes", spec, settings=QUICK) as running:
            begins(running, 5)
            victim = min(running.devices())
            alone = cluster.pids("vanishes")[victim, 0], cluster.agent_pid(victim)
            known = len(running.events(RecoveryDone))
            network.cut(victim)
            done = running.recovers(known)
            assert (done.cause, done.nodes_lost) == ("node_lost", (victim,))
            assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
            assert done.redone_steps <= 1
            evidence = running.events(NodeLost)[-1].evidence
            others = sorted(shapes.keys() - {victim})
            seconds = [f"the agent of {who} does not hear its node either" for who in (", ".join(others), *others)]
            seconds += [f"{who} cannot reach a peer" for who in others]  # a rank may say so before an agent does
            assert "silent" in evidence
            assert any(second in evidence for second in seconds), evidence
            running.steps_on()
            for pid in alone:
                running.eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists())
            network.mend(victim)
            running.eventually(lambda: [event.node for event in running.events(NodeJoined)].count(victim) == 2)
            running.steps_on()
            assert set(alone).isdisjoint(cluster.pids("vanishes").values())
        assert_one_epoch_at_a_time(running)
    finally:
        cluster.close()


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_question_is_given_up_when_the_other_machine_is_gone(network: Network, asked: str) -> None:
    """Whether it had come to the other side, which only takes its time, or not."""
    servers: list[Server] = []
    over = threading.Event()

    def serve() -> None:
        enter(network.namespace("a"))
        servers.append(Server(network.host("a"), lambda connection: over.wait(60.0), "slow"))
        servers[0].start()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    connection = connect((network.host("a"), servers[0].port))
    connection.give_up_after(2.0)
    try:
        if asked == "before":
            connection.send({"kind": "Anything"})
            assert not connection.poll(5.0), "it may take as long as it likes"
        network.cut("a")
        with pytest.raises(ConnectionClosed):
            if asked == "after":
                connection.send({"kind": "Anything"})
            connection.receive()
    finally:
        over.set()
        connection.close()
        servers[0].close()


@pytest.mark.long
@pytest.mark.parametrize("needed", [2, 3])
def test_two_nodes_that_do_not_reach_each_other_do_not_stay_together(
    network: Network, text: str, tmp_path: Path, needed: int
) -> None:
    """Both answer the supervisor, so neither is lost; with both of them no step would ever be done again. Where the job
    needs both, it goes on by itself once they reach each other again."""
    settings = QUICK.model_copy(update={"cut_off_s": 5.0, "silence_s": 1.0, "group_timeout_s": 5.0, "apart_s": 5.0})
    shapes = dict.fromkeys(("a", "b", "c"), ("cpu-1t", 1))
    cluster = ProcessCluster(tmp_path / "nodes", shapes, network=network, settings=settings)
    spec = tiny_job(text, steps=100_000, min_devices=needed)
    try:
        with supervised(cluster, "severed", spec, settings=settings) as running:
            begins(running, 5)
            known = len(running.events(RecoveryDone))
            one, other = sorted(running.devices())[:2]
            network.sever(one, other)
            if needed == 2:
                done = running.recovers(known)
                (gone,) = done.nodes_lost
                assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
                running.steps_on(20)
                assert not {one, other} <= running.devices()
            else:
                running.becomes(JobState.WAITING)
                assert "do not reach each other" in running.reason
                (gone,) = {lost.node for lost in running.events(NodeLost)}
                network.mend(one, other)
                running.eventually(lambda: running.state is JobState.RUNNING)
                running.steps_on(20)
                assert {one, other} <= running.devices()
            assert gone in (one, other)
            assert "do not reach each other" in running.events(NodeLost)[0].evidence
        assert_one_epoch_at_a_time(running)
    finally:
        cluster.close()


class Bystander:
    """Stands on a node that is cut off, and notes when its rank says that a step is done."""

    def __init__(self, namespace: str, address: tuple[str, int], job: str) -> None:
        self.steps: list[tuple[int, float]] = []
        self._namespace = namespace
        self._job = job
        self._address = address
        threading.Thread(target=self._listen, name="bystander", daemon=True).start()

    def _listen(self) -> None:
        enter(self._namespace)
        connection = connect(self._address)
        connection.send(m.encode(m.Watch(job=self._job, after_step=0)))
        try:
            while True:
                message = m.decode(connection.receive()[0])
                if isinstance(message, m.Stepped):
                    self.steps.append((message.epoch, time.time()))
        except ConnectionClosed:
            connection.close()


@pytest.mark.long
def test_an_epoch_out_of_sight_has_stopped_before_the_next_begins(network: Network, text: str, tmp_path: Path) -> None:
    """The only node that computes is cut off, and needs nobody: it goes on for a while, but never beside the next."""
    shapes = {"a": ("cpu-2t", 1), "b": ("cpu-2t", 1), "c": ("cpu-1t", 1)}
    cluster = ProcessCluster(tmp_path / "nodes", shapes, network=network, settings=QUICK)
    store = tmp_path / "store"
    checkpoint = CheckpointSpec(uri=store.as_uri(), every_steps=5, keep=100, copies=0)
    spec = tiny_job(text, steps=100_000, checkpoint=checkpoint)
    spec = dataclasses.replace(spec, limits=LimitsSpec(device_types=("cpu-2t",)))
    cluster.kill_node("b")
    try:
        with supervised(cluster, "alone", spec, settings=QUICK) as running:
            begins(running, 20)
            assert running.devices() == {"a"}
            (address,) = [each for each in cluster.addresses("alone") if each[0] == network.host("a")]
            bystander = Bystander(network.namespace("a"), address, "alone")
            running.eventually(lambda: bystander.steps)
            cut_s = time.time()
            network.cut("a")
            cluster.bring_back("b")
            running.eventually(lambda: bystander.steps[-1][1] > cut_s)  # it does go on: nobody can tell it anything
            running.recovers()
            running.steps_on()
            second = _plans(running)[1]
            assert bystander.steps[-1][1] < second
            written = _of_epoch(store, 1)
            running.steps_on(20)
            assert bystander.steps[-1][1] < second
            assert _of_epoch(store, 1) <= written
            network.mend("a")
            running.eventually(lambda: [event.node for event in running.events(NodeJoined)].count("a") == 2)
            running.steps_on(20)
            epochs = [event.epoch for event in running.events(StepDone)]
            assert epochs == sorted(epochs)
            assert {epoch for epoch, at_s in bystander.steps if at_s > second} <= set(epochs) - {1}
    finally:
        cluster.close()


@pytest.mark.long
def test_an_epoch_out_of_sight_ends_though_its_supervisor_died_before(
    network: Network, text: str, tmp_path: Path
) -> None:
    """Nobody was told that nobody hears it: the connection closed, and only then the network fell apart."""
    shapes = {"a": ("cpu-2t", 1), "b": ("cpu-2t", 1), "c": ("cpu-1t", 1)}
    orphaned = QUICK.model_copy(update={"orphaned_s": 30.0})
    cluster = ProcessCluster(tmp_path / "nodes", shapes, network=network, settings=orphaned)
    spec = dataclasses.replace(tiny_job(text, steps=100_000), limits=LimitsSpec(device_types=("cpu-2t",)))
    checkpoint = CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=5, copies=0)
    spec = dataclasses.replace(spec, checkpoint=checkpoint)
    cluster.kill_node("b")
    try:
        with supervised(cluster, "orphans", spec, settings=orphaned) as running:
            begins(running, 10)
            assert running.devices() == {"a"}
            (address,) = [each for each in cluster.addresses("orphans") if each[0] == network.host("a")]
            bystander = Bystander(network.namespace("a"), address, "orphans")
            running.eventually(lambda: bystander.steps)
            history = running.supervisor.entries_after(0, 0.0)
            running.vanish()
            gone_s = time.time()
            network.cut("a")
            cluster.bring_back("b")
            later = Supervised(cluster, "orphans", spec, restarted=True, history=history, settings=orphaned)
            try:
                later.eventually(lambda: len(_plans(later)) == 2, 180.0)
                second = _plans(later)[1]
                assert second > gone_s + 30.0
                assert gone_s + 10.0 < bystander.steps[-1][1] < second
                later.steps_on(20)
                assert bystander.steps[-1][1] < second
            finally:
                later.supervisor.cancel()
                later.supervisor.ended.wait(20.0)
    finally:
        cluster.close()


def _plans(running: Supervised) -> list[float]:
    """When each was adopted."""
    entries = running.supervisor.entries_after(0, 0.0)
    return [entry.at_s for entry in entries if isinstance(entry.event, PlanAdopted)]


def _of_epoch(store: Path, epoch: int) -> set[str]:
    return {str(path) for path in store.rglob(f"{epoch:06d}-*")}


@pytest.mark.long
def test_a_supervisor_that_lost_its_network_leaves_the_job_alone(network: Network, text: str, tmp_path: Path) -> None:
    """All nodes are silent at once, for longer than one of them might be; and they step on all the while."""
    shapes = dict.fromkeys(("a", "b", "c"), ("cpu-1t", 1))
    cluster = ProcessCluster(tmp_path / "nodes", shapes, network=network, settings=PATIENT)
    spec = tiny_job(text, steps=100_000, min_devices=3)
    try:
        with supervised(cluster, "blind", spec, settings=PATIENT) as running:
            begins(running, 5)
            roster = running.supervisor._roster
            network.cut_head()
            running.eventually(lambda: min(one.silent_s for one in roster.members(time.monotonic())) > 4.0)
            before = running.step
            network.mend_head()
            running.steps_on(20)
            assert running.step > before
            assert not running.events(NodeLost)
            assert not running.events(RecoveryDone)
        assert_one_epoch_at_a_time(running)
    finally:
        cluster.close()
