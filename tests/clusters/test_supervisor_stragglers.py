"""The real supervisor and a node that really becomes slow: it gets less to do, and gets it back; nothing is lost."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from slowing import slowed
from supervised import Supervised, supervised, tiny_job

from shoal_planner.job import ModelSpec
from shoal_planner.plan import parse_plan
from shoal_recovery.journal import JobState, NodeLost, NodeRecovered, NodeSlowed, RecoveryDone
from shoal_recovery.stragglers import PaceRules
from shoal_workers.solo import run_solo

SHAPES = {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)}
SOON = PaceRules(least_s=0.5, calm_s=0.5)


def samples(running: Supervised, node: str) -> int:
    """Of each step, what the newest plan gives a node whose stages hold all layers."""
    return sum(
        pipeline.micro_batches * replica.samples
        for pipeline in parse_plan(running.epoch.plan).pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        if replica.node == node
    )


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_straggler_gets_less_to_do_until_it_is_none(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(Path(argparse.__file__).read_bytes())
    spec = tiny_job(text.as_uri(), steps=100_000, min_devices=2)
    spec = dataclasses.replace(
        spec,
        model=ModelSpec(layers=2, hidden=192, heads=4, ffn=384, vocab=256),
        train=dataclasses.replace(spec.train, global_batch=8, seq_len=128),
    )
    cluster = ProcessCluster(tmp_path, SHAPES)
    try:
        with supervised(cluster, "slow", spec) as running:
            running.supervisor._stragglers.paces.rules = SOON
            running.reaches(11)
            before = samples(running, "b")
            assert before in (3, 4, 5)
            with slowed([cluster.pids("slow")["b", 0]], 5.0):
                done = running.recovers()
                assert (done.cause, done.redone_steps, done.lost_steps) == ("straggler", 0, 0)
                slow = running.events(NodeSlowed)
                assert {found.node for found in slow} == {"b"} and slow[0].slowdown >= 1.5
                assert samples(running, "b") < before
                assert running.epoch.snapshot["nodes"][1]["speed"] < 0.7
                running.steps_on()
            running.eventually(lambda: running.events(NodeRecovered))
            assert [found.node for found in running.events(NodeRecovered)] == ["b"]
            running.eventually(lambda: samples(running, "b") == before)
            running.steps_on()
            assert "b counts as no straggler any more" in running.events(RecoveryDone)[-1].reason
            assert not running.events(NodeLost)
            running.supervisor.cancel()
            assert running.ends() is JobState.CANCELLED
            losses = running.losses()
            reference = run_solo(spec, done.step + 3).losses
            assert all(abs(losses[step] / loss - 1) < 1e-4 for step, loss in enumerate(reference, start=1))
            assert {done.cause for done in running.events(RecoveryDone)} == {"straggler"}
    finally:
        cluster.close()
