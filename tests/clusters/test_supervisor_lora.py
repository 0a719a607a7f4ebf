"""A job that trains adapters loses ranks and nodes: their state goes where it is needed, and what they are beside is
read again where it is lacking, from nowhere but where it was."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_ground import lora_job, save_llama
from process_cluster import ProcessCluster
from supervised import Supervised, assert_same_training, supervised

from shoal_planner.job import JobSpec
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import parse_plan
from shoal_recovery.first_weights import fingerprint
from shoal_recovery.journal import CheckpointCommitted, JobState, RecoveryDone
from shoal_recovery.shard_map import shard_map
from shoal_workers.rows import keys_from_rows

STEPS = 40
MOMENTS = 3  # with the masters


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path / "nodes", {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1)})
    yield started
    started.close()


def spec_of(tmp_path: Path, **rest: Any) -> JobSpec:
    """A base in `base`, whose fingerprint the job has."""
    save_llama(tmp_path / "base")
    document = {
        "data": {"uri": Path(argparse.__file__).as_uri()},
        "train": {"global_batch": 4, "seq_len": 16, "steps": STEPS, "warmup_steps": 5},
        "limits": {"min_devices": 2},
    } | rest
    looked_at = fingerprint((tmp_path / "base").as_uri(), None)
    return lora_job(tmp_path / "base", {"rank": 4, "base": looked_at}, document)


def assert_snapshots_are_of_adapters(running: Supervised, tmp_path: Path, spec: JobSpec) -> None:
    """All that vouching ranks of the newest plan snapshot, and the files that have it, to the byte."""
    states = shard_map(parse_plan(running.epoch.plan), spec.model).ranks
    expected = {f"{state.rank}": sum(key.numel for key in state.vouched_keys) for state in states}
    assert sum(expected.values()) == MOMENTS * num_parameters(spec.model)
    found = 0
    for layout in tmp_path.glob(f"nodes/*/memory/{running.job}/*.layout"):
        numel = sum(key.numel for key in keys_from_rows(json.loads(layout.read_text())))
        assert numel in expected.values(), layout
        slots = list(layout.parent.glob(f"{layout.stem}.slot?"))
        assert all(path.stat().st_size == 4 * numel for path in slots), slots
        found += len(slots)
    assert found >= 2 * len(states)


def test_lost_ranks_and_nodes_leave_losses_as_they_were(cluster: ProcessCluster, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    with supervised(cluster, "adapted", spec) as running:
        running.reaches(5)
        assert_snapshots_are_of_adapters(running, tmp_path, spec)
        cluster.kill_rank("adapted", sorted(running.devices())[0])
        done = running.recovers()
        assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
        assert done.redone_steps <= 1
        running.reaches(done.step + 5)
        known = len(running.events(RecoveryDone))
        cluster.kill_node(sorted(running.devices())[-1])
        done = running.recovers(known)
        assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
        running.succeeds()
        assert_same_training(running, spec)


def test_a_job_goes_on_from_its_store_and_its_base(cluster: ProcessCluster, tmp_path: Path) -> None:
    """All nodes are lost at once, with all that they had."""
    place = tmp_path / "store"
    spec = spec_of(tmp_path, checkpoint={"uri": place.as_uri(), "every_steps": 5, "keep": 10})
    with supervised(cluster, "adapted", spec) as running:
        running.eventually(lambda: running.events(CheckpointCommitted))
        cluster.kill_node("a", "b", "c")
        running.eventually(lambda: running.state is JobState.WAITING)
        cluster.heal()
        running.succeeds()
        assert_same_training(running, spec)
        newest = max(committed.step for committed in running.events(CheckpointCommitted))
    stored = [path for path in (place / "adapted" / "shards" / f"{newest:09d}").iterdir() if path.is_file()]
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in stored)
    num_bytes = sum(path.stat().st_size for path in stored) - headers
    assert num_bytes == 4 * MOMENTS * num_parameters(spec.model)


def test_a_base_that_changed_ends_the_job_before_it_is_used(cluster: ProcessCluster, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    with supervised(cluster, "adapted", spec) as running:
        running.reaches(5)
        shutil.rmtree(tmp_path / "base")
        save_llama(tmp_path / "base", seed=9)
        cluster.kill_node(sorted(running.devices())[0])
        assert running.ends() is JobState.FAILED
        assert running.code == "base_changed"
        assert "base: has changed since the job began: its fingerprint is sha256:" in running.reason
