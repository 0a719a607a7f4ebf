"""The head of a Ray cluster that keeps nothing outside of it dies, alone: its nodes cannot go on for long. Their job
goes on by itself on a cluster of another name, from the object store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_plane import control_plane
from plain_ray import PlainRay
from running import LIMIT_S, check_curve, job_mapping, lives
from servers import RunningServer, new_place
from waiting import eventually

from shoal.client import Client

STEPS, BATCH = 40, 16
SILENT_S = 60.0  # a cluster's lease, and whoever waits for its end


@pytest.mark.long
def test_a_job_goes_on_elsewhere_when_the_head_of_its_cluster_has_died(
    seaweedfs: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ray: Callable[[str], PlainRay]
) -> None:
    """The ranks of the first cluster step on for a while, and store nothing of it."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    with control_plane(tmp_path / "plane") as plane, Client(plane.url, plane.token) as client:
        first = start_ray("first")
        first.connect("first", plane.environment())
        job_id = client.submit(job_mapping(STEPS, BATCH, uri=new_place(), every_steps=4, keep=3))["id"]
        eventually(lambda: _events(client, job_id, "checkpoint_committed"), LIMIT_S)
        ranks = first.of_title("ray::RankActor")
        assert ranks
        assert "the cluster ends with it" in _cluster_of(client, job_id)["if_head_dies"]

        first.kill_head()
        said = eventually(lambda: _cluster_of(client, job_id)["problem"], SILENT_S)
        stored = _events(client, job_id, "checkpoint_committed")[-1]["step"]
        assert f"goes on on the next one that connects and has a plan for it, from step {stored} or a newer one" in said
        second = start_ray("second")
        second.connect("second", plane.environment())
        assert client.wait(job_id, timeout_s=LIMIT_S)["status"]["state"] == "succeeded"

        events = _events(client, job_id)
        check_curve(events, STEPS, BATCH)
        assert [e["cluster"] for e in events if e["kind"] == "cluster_entered"] == ["first", "second"]
        (recovery,) = (event for event in events if event["kind"] == "recovery_done")
        assert (recovery["cause"], recovery["step"]) == ("resumed", stored)
        assert recovery["num_bytes"]["store"] > 0
        eventually(lambda: not any(lives(rank) for rank in ranks), 2 * SILENT_S)


def _events(client: Client, job_id: str, kind: str | None = None) -> list[dict[str, Any]]:
    return [event for event in client.events(job_id) if kind is None or event["kind"] == kind]


def _cluster_of(client: Client, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(job_id)["cluster"]
    return found
