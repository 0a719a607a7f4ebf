"""Nodes that are labelled as GPUs and show none: a job does without them, unless their CPUs may take the place."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import SETTINGS, ProcessCluster
from supervised import supervised, tiny_job

from shoal_recovery.journal import JobState, RecoveryDone, StateChanged

SHOWN = "to compute, but its node shows 0 CUDA devices: its torch is one for CPUs"


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "gpu": ("A100-80G", 2)})
    yield started
    started.close()


def test_a_job_leaves_them_out_and_says_why(mixed: ProcessCluster, text: str) -> None:
    with supervised(mixed, "mixed", tiny_job(text, steps=5)) as running:
        running.succeeds()
        assert running.devices() == {"a"}
        (began,) = [event for event in running.events(StateChanged) if event.state == "running"]
        assert f"Left out: gpu (gpu:0 is {SHOWN}" in began.reason
        assert not running.events(RecoveryDone)


def test_a_job_that_has_nothing_else_waits_and_says_why(mixed: ProcessCluster, text: str) -> None:
    mixed.kill_node("a")
    with supervised(mixed, "alone", tiny_job(text, steps=5)) as running:
        running.eventually(lambda: running.state is JobState.WAITING)
        assert f"No node can be used (gpu: gpu:0 is {SHOWN}" in running.reason
        mixed.bring_back("a")
        running.succeeds()


def test_their_cpus_compute_where_the_operator_wants_that(tmp_path: Path, text: str) -> None:
    simulating = SETTINGS.model_copy(update={"simulate_devices": True})
    cluster = ProcessCluster(tmp_path, {"gpu": ("A100-80G", 1)}, settings=simulating)
    try:
        with supervised(cluster, "simulated", tiny_job(text, steps=5), settings=simulating) as running:
            running.succeeds()
            assert running.devices() == {"gpu"}
    finally:
        cluster.close()
