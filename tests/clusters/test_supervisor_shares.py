"""The real supervisor on a share of a cluster: it moves from node to node without doing anything again."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import Supervised, assert_same_training, supervised, tiny_job

from shoal_recovery.journal import NodeJoined, NodeLost, RecoveryDone
from shoal_recovery.journal_shares import ShareChanged, ShareTaken
from shoal_workers.share import ToldShare

SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1), "d": ("cpu-1t", 1)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path / "nodes", SHAPES)
    yield started
    started.close()


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


def test_a_job_leaves_what_is_not_its_share(cluster: ProcessCluster, text: str) -> None:
    """A supervisor that takes the place of another one in between keeps to the share that the first was told."""
    spec = tiny_job(text, steps=400, min_devices=2)
    with supervised(cluster, "shared", spec) as running:
        running.reaches(5)
        left = max(running.devices())
        kept = tuple(sorted(SHAPES.keys() - {left}))[:2]
        others = tuple(sorted(SHAPES.keys() - {*kept}))
        running.supervisor.share(ToldShare(version=2, nodes=kept, reason="the others are another's"))
        done = running.recovers()
        assert (done.cause, done.nodes_lost) == ("share_changed", ())
        assert left in done.nodes_drained
        assert (done.redone_steps, done.lost_steps, done.num_bytes["store"]) == (0, 0, 0)
        assert f"{left} belongs to other jobs now (the others are another's)" in done.reason
        running.eventually(lambda: running.events(ShareTaken))
        assert running.events(ShareTaken) == [ShareTaken(version=2, nodes=kept)]
        assert running.devices() == {*kept} == {node["id"] for node in running.epoch.snapshot["nodes"]}
        running.eventually(lambda: {node for node, _ in cluster.pids("shared")} == {*kept})
        running.eventually(lambda: not list(cluster.memory_of(left).glob("shared/*")))
        running.vanish()
        step = running.step
        second = Supervised(cluster, "shared", spec, restarted=True)
        try:
            second.reaches(step + 3)
            assert second.events(ShareTaken) == [ShareTaken(version=2, nodes=kept)]
            assert {node for node, _ in cluster.pids("shared")} == {*kept}, "it went where others are"
            second.supervisor.share(ToldShare(version=3, nodes=others, reason="all is another's"))
            done = second.recovers(1)
            assert (done.cause, {*done.nodes_joined}) == ("share_changed", {*others})
            second.eventually(lambda: second.events(ShareTaken)[-1].version == 3)
            assert [changed.version for changed in second.events(ShareChanged)] == [2, 3]
            second.succeeds()
            assert_same_training(second, spec)
            assert not second.events(NodeLost)
            assert {(each.redone_steps, each.lost_steps) for each in second.events(RecoveryDone)} == {(0, 0)}
        finally:
            second.supervisor.cancel()
            second.supervisor.ended.wait(20.0)


def test_a_job_begins_on_its_share_alone(cluster: ProcessCluster, text: str) -> None:
    spec = tiny_job(text, steps=20, min_devices=2)
    share = ToldShare(version=1, nodes=("a", "d"), reason="the cluster is shared")
    with supervised(cluster, "small", spec, share=share) as running:
        running.succeeds()
        assert_same_training(running, spec)
        assert {joined.node for joined in running.events(NodeJoined)} == {"a", "d"}
        assert not {"b", "c"} & {node for node, _ in cluster.pids("small")}
