"""The upgrade drill, in the order of the chart and on PostgreSQL: a control plane of the version before the newest
migration serves on while the database gets that one, then it goes and the present one comes, and a job trains on all
the while, on a cluster that is still of the version before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import start_control_plane
from earlier import ROOT, newest_migration, paths, paths_before
from plain_ray import PlainRay
from postgres import RunningPostgres, start_postgres
from running import LIMIT_S, check_curve, job_mapping
from servers import free_ports
from waiting import eventually

from shoal.client import Client

STEPS, BATCH = 500, 16  # enough for two commands to start meanwhile, on a machine where nothing else runs, too


@pytest.fixture
def before(tmp_path: Path) -> str:
    """Where the programs of before the newest migration are found."""
    return paths_before(tmp_path)


@pytest.fixture
def postgres() -> Iterator[RunningPostgres]:
    server = start_postgres()
    yield server
    server.close()


def revision(postgres: RunningPostgres, url: str) -> str:
    return postgres.sql("SELECT version_num FROM alembic_version", url.rpartition("/")[2])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_trains_on_while_its_control_plane_is_upgraded(
    before: str,
    postgres: RunningPostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_ray: Callable[[str], PlainRay],
) -> None:
    data, (port,), url = tmp_path / "plane", free_ports(1), postgres.new_database()
    monkeypatch.setenv("PYTHONPATH", before)
    plane = start_control_plane(data, port, database_url=url)
    cluster = start_ray("old")
    cluster.connect("old", plane.environment())
    with Client(plane.url, plane.token) as client:
        job_id = client.submit(job_mapping(STEPS, BATCH, uri=(tmp_path / "store").as_uri(), every_steps=50, keep=2))[
            "id"
        ]
        eventually(lambda: client.get(job_id)["status"]["step"] >= 10, LIMIT_S)
        had = revision(postgres, url)
        monkeypatch.setenv("PYTHONPATH", paths(ROOT))
        migrate = [str(Path(sys.executable).parent / "shoal"), "migrate", "--database-url", url]
        done = subprocess.run(migrate, env={**os.environ}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert had < revision(postgres, url) == newest_migration(ROOT)[1:5]
        step = client.get(job_id)["status"]["step"]
        eventually(lambda: client.get(job_id)["status"]["step"] >= step + 5, LIMIT_S)  # told by the version before
    assert plane.stop() == 0
    gone_at_s = time.time()
    plane = start_control_plane(data, port, database_url=url)
    back_at_s = time.time()
    try:
        with Client(plane.url, plane.token) as client:
            assert client.get(job_id)["status"]["state"] == "running"
            assert client.wait(job_id, timeout_s=LIMIT_S)["status"]["state"] == "succeeded"
            events: list[dict[str, Any]] = list(client.events(job_id))
    finally:
        plane.stop()
    check_curve(events, STEPS, BATCH)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1)), "the history is complete"
    steps = [event for event in events if event["kind"] == "step_done"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1)), "no step was lost or done again"
    assert not [event for event in events if event["kind"] == "recovery_done"]
    assert any(gone_at_s < event["at_s"] < back_at_s for event in steps), "it trained on meanwhile"
