"""A job that allows steps to be done again has every so-many-th brought to safety, and loses no more than that."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job

from shoal_planner.job import CheckpointSpec
from shoal_recovery.journal import CheckpointCommitted, NodeLost
from shoal_workers.solo import run_solo

SHAPES = {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1)}
EVERY = 7


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


def test_a_loss_costs_no_more_steps_than_were_allowed(cluster: ProcessCluster, text: str, tmp_path: Path) -> None:
    """Of two nodes that die one after the other; in between steps are stored that are no multiples."""
    checkpoint = CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=5, protect_every=EVERY, copies=1)
    spec = tiny_job(text, steps=100_000, min_devices=2, checkpoint=checkpoint)
    with supervised(cluster, "seldom", spec) as running:
        running.reaches(3 * EVERY)
        for known in range(2):
            victim = min(running.devices())
            cluster.kill_node(victim)
            done = running.recovers(known)
            assert running.events(NodeLost)[-1].node == victim
            assert (done.cause, done.lost_steps, done.num_bytes["store"]) == ("node_lost", 0, 0)
            assert done.step % EVERY == 0 or done.step % 5 == 0 or done.redone_steps == 0
            assert done.redone_steps <= EVERY
            running.steps_on(2 * EVERY)
            cluster.heal()
        assert {event.step % 5 for event in running.events(CheckpointCommitted)} == {0}
        losses = running.losses()
        assert sorted(losses) == list(range(1, running.step + 1))
        reference = run_solo(spec, min(running.step, 60)).losses
        for step, loss in enumerate(reference, start=1):
            assert abs(losses[step] - loss) < 1e-4 * loss, step


def test_a_drained_job_goes_on_from_the_step_at_which_it_stopped(cluster: ProcessCluster, text: str) -> None:
    spec = tiny_job(text, steps=100_000, checkpoint=CheckpointSpec(protect_every=10_000))
    large = dataclasses.replace(spec.model, layers=6, hidden=128, heads=4, ffn=352)
    spec = dataclasses.replace(spec, model=large, train=dataclasses.replace(spec.train, seq_len=64, global_batch=8))
    cluster.kill_node("b", "c")
    with supervised(cluster, "drained", spec) as running:
        running.reaches(3)
        cluster.heal()
        done = running.recovers()
        assert (done.cause, done.redone_steps, done.lost_steps) == ("node_joined", 0, 0)
        running.steps_on()
