"""The upgrade drill: a control plane of the version before the newest migration goes, the present one comes with that
migration, and a job trains on all the while, on a cluster that is still of the version before."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_plane import start_control_plane
from plain_ray import PlainRay
from running import LIMIT_S, check_curve, job_mapping
from servers import free_ports
from waiting import eventually

from shoal.client import Client

ROOT = Path(__file__).parents[2]
MIGRATIONS = "service/shoal_service/migrations/versions"
PARTS = ("planner", "service", "workers", "recovery")
STEPS, BATCH = 120, 16


def paths(root: Path) -> str:
    return os.pathsep.join(str(root / part) for part in PARTS)


def newest_migration(root: Path) -> str:
    return max(path.name for path in (root / MIGRATIONS).glob("v*.py"))


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The sources as they were before the newest migration was written, from the history of this checkout."""
    path = f"{MIGRATIONS}/{newest_migration(ROOT)}"
    found = git("log", "--diff-filter=A", "--format=%H", "--", path).split()
    if not found:
        pytest.skip("this checkout has no history: the version before cannot be had")
    packed = subprocess.run(["git", "archive", f"{found[-1]}^", *PARTS], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"the version before cannot be had: {packed.stderr.decode().strip()}")
    old = tmp_path / "before"
    old.mkdir()
    subprocess.run(["tar", "-x", "-C", str(old)], input=packed.stdout, check=True)
    assert newest_migration(old) < newest_migration(ROOT)
    return old


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def revision(data_dir: Path) -> str:
    with sqlite3.connect(data_dir / "shoal.db") as database:
        ((found,),) = database.execute("select version_num from alembic_version").fetchall()
    return str(found)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_trains_on_while_its_control_plane_is_upgraded(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ray: Callable[[str], PlainRay]
) -> None:
    data, (port,) = tmp_path / "plane", free_ports(1)
    monkeypatch.setenv("PYTHONPATH", paths(before))
    plane = start_control_plane(data, port)
    cluster = start_ray("old")
    cluster.connect("old", plane.environment())
    with Client(plane.url, plane.token) as client:
        job_id = client.submit(job_mapping(STEPS, BATCH, uri=(tmp_path / "store").as_uri(), every_steps=50, keep=2))[
            "id"
        ]
        eventually(lambda: client.get(job_id)["status"]["step"] >= 10, LIMIT_S)
    had = revision(data)
    assert plane.stop() == 0
    gone_at_s = time.time()

    monkeypatch.setenv("PYTHONPATH", paths(ROOT))
    migrate = [str(Path(sys.executable).parent / "shoal"), "migrate"]
    done = subprocess.run(
        migrate, env={**os.environ, "SHOAL_DATA_DIR": str(data)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert had < revision(data) == newest_migration(ROOT)[1:5]
    plane = start_control_plane(data, port)
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
