"""The real supervisor, where native code of a rank crashes, and where what survivors keep is not as it was written: the
job goes on from other copies, says so, and trains as if nothing had been."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job

from shoal_planner.job import CheckpointSpec
from shoal_recovery.journal import CheckpointCommitted, JobState, NodeJoined, NodeLost
from shoal_workers.solo import run_solo

SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1), "d": ("cpu-1t", 1)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path_factory.mktemp("nodes"), SHAPES)
    yield started
    started.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


@pytest.mark.parametrize("by", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_crash_in_native_code_is_a_loss_like_others_and_named(
    cluster: ProcessCluster, text: str, by: signal.Signals
) -> None:
    """Counted against nobody: the job goes on, and its node is taken in again."""
    spec, name = tiny_job(text, steps=5000, min_devices=3), f"dies-of-{by.name.lower()}"
    with supervised(cluster, name, spec) as running:
        running.reaches(3)
        victim = min(running.devices() - {"a"})
        cluster.kill_rank(name, victim, by=by)
        done = running.recovers()
        (lost,) = running.events(NodeLost)
        said = "" if by is signal.SIGKILL else f": {by.name}"  # of which nobody can say anything
        assert lost.evidence == f"the connection to rank process {victim}:0 closed{said}"
        assert (lost.node, lost.ranks_alone) == (victim, True)
        assert (done.cause, done.nodes_lost, done.lost_steps) == ("node_lost", (victim,), 0)
        assert done.redone_steps <= 1 and done.num_bytes["store"] == 0
        running.eventually(lambda: [joined.node for joined in running.events(NodeJoined)].count(victim) == 2)
        running.steps_on()
        losses, reference = running.losses(), run_solo(spec, running.step).losses
        assert all(abs(losses[step] - reference[step - 1]) < 1e-4 * reference[step - 1] for step in losses)


def _spoil(cluster: ProcessCluster, job: str, name: str) -> None:
    """A bit in every part of whatever this node keeps; one of its files is cut short."""
    slots = sorted(path for path in (cluster.memory_of(name) / job).glob("*.slot*") if path.stat().st_size > 1)
    for path in slots:
        content = bytearray(path.read_bytes())
        content[:: max(1, len(content) // 500)] = bytes(len(content[:: max(1, len(content) // 500)]))
        path.write_bytes(content)
    os.truncate(slots[0], slots[0].stat().st_size // 2)


def test_spoilt_copies_are_left_out_and_told(cluster: ProcessCluster, text: str) -> None:
    """All state is with nodes that went away; what one of them brings back is worth nothing."""
    spec = tiny_job(text, steps=200, min_devices=3)
    cluster.kill_node("b")
    with supervised(cluster, "spoilt", spec) as running:
        running.reaches(5)
        cluster.kill_node("a", "c", "d", wipe=False)
        running.becomes(JobState.WAITING)
        _spoil(cluster, "spoilt", "c")
        cluster.heal()
        done = running.recovers()
        assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
        told = [failed for failed in done.failed_sources if failed.step == done.step]
        assert told and {failed.source for failed in told} == {"agent of c"}
        assert {name for failed in told for name in failed.instead} <= {"agent of a", "agent of d"}
        assert done.source_s["peer"] > 0 or done.source_s["node"] > 0
        assert done.plan_before and done.plan_after == running.epoch.plan_id
        running.steps_on()
        losses, reference = running.losses(), run_solo(spec, running.step).losses
        assert all(abs(losses[step] - reference[step - 1]) < 1e-4 * reference[step - 1] for step in losses)


@pytest.mark.long
def test_where_all_copies_are_spoilt_the_checkpoint_before_is_taken(
    cluster: ProcessCluster, text: str, tmp_path: Path
) -> None:
    checkpoint = CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=4, keep=5)
    spec = tiny_job(text, steps=200, min_devices=3, checkpoint=checkpoint)
    with supervised(cluster, "older", spec) as running:
        running.eventually(lambda: len(running.events(CheckpointCommitted)) >= 2)
        cluster.kill_node(*SHAPES, wipe=False)
        running.becomes(JobState.WAITING)
        committed = sorted(done.step for done in running.events(CheckpointCommitted))
        for name in SHAPES:
            if any((cluster.memory_of(name) / "older").glob("*.slot*")):
                _spoil(cluster, "older", name)
        newest = max((tmp_path / "store" / "older" / "manifests").iterdir())
        newest.write_bytes(newest.read_bytes().replace(b'"master"', b'"mastes"', 1))
        cluster.heal()
        done = running.recovers()
        assert done.step == committed[-2] or done.step in committed[:-1]
        assert done.num_bytes["store"] > 0
        assert any(failed.source == "object store" for failed in done.failed_sources)
        running.steps_on()
        losses, reference = running.losses(), run_solo(spec, running.step).losses
        assert all(abs(losses[step] - reference[step - 1]) < 1e-4 * reference[step - 1] for step in losses)
