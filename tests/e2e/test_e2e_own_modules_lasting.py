"""A model that is a user's own code, on real raylets, through all that a job of Shoal's own models goes through: its
code comes as an archive, it rests while its folder is edited, and it goes on elsewhere when its cluster is gone."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_plane import control_plane
from own_jobs import own_job, plain_losses, write_code
from plain_ray import PlainRay
from running import LIMIT_S, Running
from servers import RunningServer, new_place
from waiting import eventually

from shoal.client import Client
from shoal.demo_report import counting_steps
from shoal_recovery.store import open_store

STEPS = 30


def check_losses(events: list[dict[str, Any]], code: Path, job: dict[str, Any]) -> None:
    counted = counting_steps(events)
    assert [event["step"] for event in counted] == list(range(1, job["train"]["steps"] + 1))
    assert [event["loss"] for event in counted] == pytest.approx(plain_losses(code, job), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("top", ["", "mine/"], ids=["bare", "in a folder"])
def test_an_archive_in_a_store_is_code(running: Running, tmp_path: Path, top: str) -> None:
    """Packed as it lies, or as tools for archives pack a folder."""
    code, place = write_code(tmp_path), new_place()
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        for path in sorted(code.glob("*.py")):
            archive.write(path, f"{top}{path.name}")
    open_store(place).put("code.zip", (tmp_path / "code.zip").read_bytes())
    job = own_job(f"{place}/code.zip", steps=12)
    job_id = running.submit(job)
    check_losses(running.finish(job_id), code, job)


@pytest.mark.long
def test_it_rests_and_goes_on_with_the_code_that_it_began_with(running: Running, tmp_path: Path) -> None:
    code = write_code(tmp_path)
    job = {**own_job(code, steps=STEPS), "checkpoint": {"uri": new_place(), "every_steps": 1000}}
    job_id = running.submit(job)
    running.until_step(job_id, 8)
    running.client.pause(job_id)
    eventually(lambda: running.client.get(job_id)["status"]["state"] == "paused", LIMIT_S)
    step = running.step(job_id)
    eventually(lambda: not running.processes("ray::RankActor") and not running.processes("ray::SupervisorActor"), 60)
    (code / "model.py").write_text("raise RuntimeError('edited')\n")
    running.client.resume(job_id)
    recovery = running.until_event(job_id, "recovery_done")
    assert (recovery["cause"], recovery["step"], recovery["redone_steps"]) == ("resumed", step, 0)
    check_losses(running.finish(job_id), write_code(tmp_path), job)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_it_goes_on_elsewhere_when_the_head_of_its_cluster_has_died(
    seaweedfs: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ray: Callable[[str], PlainRay]
) -> None:
    """What the first cluster was sent is gone with it: the second one is sent the same folder."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "code").mkdir()
    code = write_code(tmp_path / "code")
    job = {**own_job(code, steps=STEPS), "checkpoint": {"uri": new_place(), "every_steps": 4, "keep": 3}}
    with control_plane(tmp_path / "plane") as plane, Client(plane.url, plane.token) as client:
        first = start_ray("first")
        first.connect("first", plane.environment())
        job_id = client.submit(job)["id"]
        eventually(lambda: of_kind(client, job_id, "checkpoint_committed"), LIMIT_S)
        first.kill_head()
        second = start_ray("second")
        second.connect("second", plane.environment())
        assert client.wait(job_id, timeout_s=LIMIT_S)["status"]["state"] == "succeeded"
        assert [event["cluster"] for event in of_kind(client, job_id, "cluster_entered")] == ["first", "second"]
        (recovery,) = of_kind(client, job_id, "recovery_done")
        assert recovery["cause"] == "resumed" and recovery["num_bytes"]["store"] > 0
        check_losses(list(client.events(job_id)), code, job)


def of_kind(client: Client, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in client.events(job_id) if event["kind"] == kind]
