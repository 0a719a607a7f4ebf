"""A job that its device has no room for, unless the host keeps its optimizer state: planned so, and trained so."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job

from shoal_planner.cluster import DeviceOverride
from shoal_planner.errors import NoPlanFits
from shoal_planner.plan import parse_plan
from shoal_planner.search import plan
from shoal_workers.solo import run_solo

STEPS = 12
SMALL = DeviceOverride(name="cpu-1t", memory_bytes=900 * 1024)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1)}, overrides=(SMALL,))
    yield started
    started.close()


def test_a_job_too_large_for_its_device_is_trained_with_state_on_the_host(cluster: ProcessCluster) -> None:
    spec = tiny_job(Path(argparse.__file__).as_uri(), steps=STEPS)
    with pytest.raises(NoPlanFits):
        plan(dataclasses.replace(spec, train=dataclasses.replace(spec.train, sharding="none")), cluster.snapshot())
    with supervised(cluster, "hosted", spec) as running:
        running.succeeds()
        (stage,) = parse_plan(running.epoch.plan).pipelines[0].stages
        assert stage.offloaded() == spec.model.layers
        assert running.epoch.plan["predicted"]["host_bytes"]["a:0"] > 0
        losses = running.losses()
    assert list(losses.values()) == pytest.approx(run_solo(spec, STEPS).losses, rel=1e-5)
