"""The real supervisor and nodes that are told to go away: they are left before they do, and nothing is done again."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import Supervised, assert_same_training, supervised, tiny_job

from shoal_planner.job import CheckpointSpec
from shoal_recovery.journal import (
    CheckpointCommitted,
    JobState,
    NodeLost,
    NodeNoticed,
    NodeStays,
    NoticeEnded,
    RecoveryDone,
    StateChanged,
)

SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 2), "c": ("cpu-1t", 1), "d": ("cpu-1t", 1)}
AN_HOUR_S = 3600.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path_factory.mktemp("nodes"), SHAPES)
    yield started
    started.close()


@pytest.fixture
def cluster(nodes: ProcessCluster) -> Iterator[ProcessCluster]:
    """Whoever was told to go away is gone at the end, and another machine stands in its place."""
    yield nodes
    nodes.kill_node(*SHAPES)
    nodes.heal()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


def test_a_node_that_is_told_to_go_is_left_before_it_goes(cluster: ProcessCluster, text: str) -> None:
    """Nothing is lost, done again or read from the store; that it dies afterwards concerns nobody."""
    spec = tiny_job(text, steps=200, min_devices=3)
    with supervised(cluster, "told", spec) as running:
        running.reaches(5)
        victim = min(running.devices() - {"b"})
        cluster.notice(victim, AN_HOUR_S)
        done = running.recovers()
        assert (done.cause, done.nodes_drained, done.nodes_lost) == ("preemption_notice", (victim,), ())
        assert (done.redone_steps, done.lost_steps, done.num_bytes["store"]) == (0, 0, 0)
        (noticed,) = running.events(NodeNoticed)
        assert (noticed.node, noticed.source, noticed.lead_s) == (victim, "test", AN_HOUR_S)
        assert f"{victim} is to go away (test: the machine is wanted back, in 3" in done.reason
        drained = [entered for entered in running.events(StateChanged) if entered.state == "draining"]
        assert [entered.code for entered in drained] == ["preemption_notice"]
        assert victim not in {node["id"] for node in running.epoch.snapshot["nodes"]}, "copies may be kept there"
        cluster.kill_node(victim)
        running.eventually(lambda: running.events(NoticeEnded))
        (ended,) = running.events(NoticeEnded)
        assert (ended.node, ended.outcome) == (victim, "gone")
        running.succeeds()
        assert_same_training(running, spec)
        assert len(running.events(RecoveryDone)) == 1
        assert not running.events(NodeLost)


def test_of_a_node_that_was_left_no_rank_stays_and_it_may_come_again(cluster: ProcessCluster, text: str) -> None:
    """Whoever ends it waits for its ranks (`pre_stop`); its agent gives what it holds."""
    spec = tiny_job(text, steps=100_000, min_devices=3)
    with supervised(cluster, "leaves", spec) as running:
        running.reaches(5)
        victim = min(running.devices() - {"b"})
        cluster.notice(victim, AN_HOUR_S)
        running.recovers()
        running.eventually(lambda: not cluster.ranks(victim, "leaves"))
        running.steps_on(20)
        assert not cluster.ranks(victim, "leaves"), "nobody starts them again"
        assert not running.events(NodeLost)
        running.supervisor._doomed._overdue_s = -AN_HOUR_S  # two hours pass
        running.eventually(lambda: len(cluster.ranks(victim, "leaves")) == SHAPES[victim][1])
        (ended,) = running.events(NoticeEnded)
        assert (ended.node, ended.outcome) == (victim, "overdue")


def test_a_node_that_was_left_is_used_where_nothing_fits_without_it_any_more(
    cluster: ProcessCluster, text: str
) -> None:
    spec = tiny_job(text, steps=100_000, min_devices=4)
    with supervised(cluster, "back", spec) as running:
        running.reaches(5)
        cluster.notice("d", AN_HOUR_S)
        running.eventually(lambda: "d" not in running.devices() and not cluster.ranks("d", "back"))
        running.steps_on()
        cluster.kill_node("c")
        running.eventually(lambda: "d" in running.devices())
        running.steps_on()


def test_a_node_without_which_no_plan_fits_is_used_until_it_is_gone(cluster: ProcessCluster, text: str) -> None:
    """A new supervisor knows what the one before it was told."""
    spec = tiny_job(text, steps=400, min_devices=5)
    with supervised(cluster, "needed", spec) as first:
        first.reaches(5)
        cluster.notice("d", AN_HOUR_S)
        first.eventually(lambda: first.events(NodeStays))
        (stays,) = first.events(NodeStays)
        assert stays.node == "d"
        assert "min_devices is 5" in stays.reason
        first.steps_on()
        first.vanish()
        second = Supervised(cluster, "needed", spec, restarted=True)
        second.reaches(first.step + 3)
        assert (len(second.events(NodeNoticed)), len(second.events(NodeStays))) == (1, 1)
        assert not second.events(RecoveryDone)
        assert "d" in second.devices()
        cluster.kill_node("d")
        second.becomes(JobState.WAITING)
        second.eventually(lambda: [ended.outcome for ended in second.events(NoticeEnded)] == ["gone"])
        cluster.bring_back("d")
        done = second.recovers()
        assert (done.cause, done.lost_steps, done.num_bytes["store"]) == ("node_lost", 0, 0)
        assert done.redone_steps <= 1
        second.steps_on()
        second.supervisor.cancel()
        assert second.ends() is JobState.CANCELLED


def test_where_all_nodes_are_told_to_go_the_state_goes_to_the_store_first(
    cluster: ProcessCluster, text: str, tmp_path: Path
) -> None:
    """Training goes on until they are gone, and on new machines from there."""
    store = CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=100_000)
    spec = tiny_job(text, steps=100_000, min_devices=2, checkpoint=store)
    with supervised(cluster, "all", spec) as running:
        running.reaches(5)
        for node in SHAPES:
            cluster.notice(node, AN_HOUR_S)
        running.eventually(lambda: running.events(CheckpointCommitted))
        (stored,) = running.events(CheckpointCommitted)
        running.eventually(lambda: running.state is JobState.RUNNING)
        running.reaches(stored.step + 3)
        assert all(done.redone_steps == done.lost_steps == 0 for done in running.events(RecoveryDone))
        said = next(entered for entered in running.events(StateChanged) if entered.code == "rescuing")
        assert said.reason.endswith("the newest step is being brought to the object store first.")
        known = len(running.events(RecoveryDone))
        cluster.kill_node(*SHAPES)
        running.becomes(JobState.WAITING)
        cluster.heal()
        done = running.recovers(known)
        assert done.step == stored.step
        running.steps_on()


def test_a_node_that_goes_before_it_could_be_left_is_recovered_from(cluster: ProcessCluster, text: str) -> None:
    spec = tiny_job(text, steps=200, min_devices=3)
    with supervised(cluster, "hasty", spec) as running:
        running.reaches(5)
        victim = min(running.devices() - {"b"})
        cluster.notice(victim, 0.0)
        cluster.kill_node(victim)
        running.succeeds()
        assert_same_training(running, spec)
        assert all(done.lost_steps == 0 and done.redone_steps <= 1 for done in running.events(RecoveryDone))
        assert victim not in running.devices()


def test_a_notice_that_comes_to_nothing_is_forgotten(cluster: ProcessCluster, text: str) -> None:
    """The node is one like any other again, and counts where another one is lost."""
    spec = tiny_job(text, steps=400, min_devices=2)
    cluster.kill_node("b")
    with supervised(cluster, "nothing", spec) as running:
        running.reaches(3)
        cluster.notice("a", AN_HOUR_S)
        running.eventually(lambda: running.events(NodeNoticed) and "a" not in running.devices())
        running.steps_on()
        running.supervisor._doomed._overdue_s = -AN_HOUR_S  # two hours pass
        running.eventually(lambda: running.events(NoticeEnded))
        assert [ended.outcome for ended in running.events(NoticeEnded)] == ["overdue"]
        cluster.kill_node("c")
        running.eventually(lambda: "a" in running.devices() and "c" not in running.devices())
        running.steps_on()
        assert all(done.lost_steps == 0 and done.redone_steps <= 1 for done in running.events(RecoveryDone))
        assert [lost.node for lost in running.events(NodeLost)] == ["c"]
        assert not running.events(NodeStays)
