"""The real supervisor over processes that keep a job's state on a CUDA device, and are killed.

All nodes share one device, as far as it goes: their ranks exchange through their hosts.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from process_cluster import ProcessCluster
from supervised import Supervised, assert_same_training, supervised, tiny_job

from shoal_planner.job import JobSpec
from shoal_recovery.journal import JobState, NodeJoined, RecoveryDone

SHAPES = {name: ("H100-80G", 1) for name in "abcd"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path_factory.mktemp("nodes"), SHAPES)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def whole(cluster: ProcessCluster) -> Iterator[None]:
    """Whoever was told to go away is gone at the end, and another machine stands in its place."""
    yield
    cluster.kill_node(*SHAPES)
    cluster.heal()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


def test_killed_processes_and_a_node_that_comes_back(cluster: ProcessCluster, text: str) -> None:
    """Nothing is read from a store, and the losses stay those of one process on a CPU."""
    spec = tiny_job(text, steps=200, min_devices=3)
    with supervised(cluster, "killed", spec) as running:
        running.reaches(5)
        victim = min(running.devices())
        known = len(running.events(RecoveryDone))
        cluster.kill_rank("killed", victim)
        _lost_nothing(running.recovers(known))
        running.steps_on()
        victim = max(running.devices())
        known = len(running.events(RecoveryDone))
        cluster.kill_node(victim)
        done = running.recovers(known)
        assert done.nodes_lost == (victim,)
        _lost_nothing(done)
        running.steps_on()
        cluster.bring_back(victim)
        running.eventually(lambda: [joined.node for joined in running.events(NodeJoined)].count(victim) == 2)
        running.succeeds()
        assert_same_training(running, spec)


@pytest.mark.parametrize("sharding", ["auto", "none"])
def test_what_is_in_bf16_learns_on_after_a_loss(
    cluster: ProcessCluster, text: str, sharding: Literal["auto", "none"]
) -> None:
    spec = _bf16(tiny_job(text, steps=60, min_devices=3), sharding)
    with supervised(cluster, sharding, spec) as running:
        running.reaches(5)
        known = len(running.events(RecoveryDone))
        cluster.kill_node(min(running.devices()))
        _lost_nothing(running.recovers(known))
        running.succeeds()
        _learns(running)


def test_a_node_that_is_called_back_leaves_without_a_step_done_again(cluster: ProcessCluster, text: str) -> None:
    spec = tiny_job(text, steps=100, min_devices=3)
    with supervised(cluster, "drains", spec) as running:
        running.reaches(5)
        leaving = min(running.devices())
        known = len(running.events(RecoveryDone))
        cluster.notice(leaving, lead_s=60.0)
        done = running.recovers(known)
        assert (done.redone_steps, done.nodes_drained) == (0, (leaving,))
        running.eventually(lambda: leaving not in running.devices() and running.state is JobState.RUNNING)
        cluster.kill_node(leaving)
        running.succeeds()
        assert_same_training(running, spec)


def _bf16(spec: JobSpec, sharding: Literal["auto", "none"]) -> JobSpec:
    train = dataclasses.replace(spec.train, precision="bf16", sharding=sharding)
    return dataclasses.replace(spec, train=train)


def _lost_nothing(done: RecoveryDone) -> None:
    assert done.lost_steps == 0
    assert done.redone_steps <= 1
    assert done.num_bytes["store"] == 0


def _learns(running: Supervised) -> None:
    losses = running.losses()
    assert sorted(losses) == list(range(1, running.spec.train.steps + 1))
    assert losses[running.spec.train.steps] < losses[1]
