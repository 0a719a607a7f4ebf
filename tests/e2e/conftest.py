"""One local Shoal for all end-to-end tests: a real control plane, real raylets that pose as unequal nodes, a real S3
server. A test that kills a node starts it again before it ends."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_ray import PlainRay
from running import Running
from servers import RunningServer

from shoal.local_shoal import LocalOptions, LocalShoal

CLUSTER = {
    "nodes": [
        {"name": "big", "device": "cpu-2t", "host_memory_gib": 2},
        {"name": "small", "device": "cpu-1t", "count": 3, "host_memory_gib": 2, "spot": True},
    ],
    "devices": {"cpu-2t": {"memory_gib": 0.1}, "cpu-1t": {"memory_gib": 0.008}},
}


@pytest.fixture(scope="session")
def local_shoal(seaweedfs: RunningServer) -> Iterator[LocalShoal]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="shoal-e2e-") as folder:
        for name, value in seaweedfs.environment().items():
            patch.setenv(name, value)
        options = LocalOptions(cluster=CLUSTER, data_dir=Path(folder), port=0)
        with LocalShoal(options) as shoal:
            yield shoal


@pytest.fixture
def running(local_shoal: LocalShoal) -> Iterator[Running]:
    """The local Shoal with all its nodes; whatever the test started or killed is ended and replaced afterwards."""
    ground = Running(local_shoal, [f"small-{index}" for index in range(3)] + ["big-0"])
    yield ground
    ground.restore()


@pytest.fixture
def start_ray(tmp_path: Path) -> Iterator[Callable[[str], PlainRay]]:
    """A cluster of two nodes, with folders of its own: no other one has its disks."""
    with tempfile.TemporaryDirectory(prefix="ray-") as short:
        started: list[PlainRay] = []

        def start(name: str) -> PlainRay:
            folder = tmp_path / name
            folder.mkdir()
            started.append(PlainRay(folder, Path(short) / name))
            for node in ("x", "y"):
                started[-1].add(f"{name}-{node}")
            return started[-1]

        try:
            yield start
        finally:
            for cluster in started:
                cluster.stop()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(420))
