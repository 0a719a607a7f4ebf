"""docs/operating.md, "Restore": what a backup lacks of a job that it knows comes again from the job's cluster."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import httpx
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, story


def backed_up(database: Path, to: Path) -> None:
    """As `sqlite3 FILE ".backup TO"`, while the server runs."""
    source, target = sqlite3.connect(database), sqlite3.connect(to)
    source.backup(target)
    source.close()
    target.close()


def client(plane: ControlPlane, token: str | None = None) -> httpx.Client:
    headers = plane.headers if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=plane.url, headers=headers, timeout=60)


def test_a_restored_control_plane_catches_up(tmp_path: Path) -> None:
    entries = story(job_mapping(), started_at_s=1e9).entries
    half = len(entries) // 2
    old, new = tmp_path / "old", tmp_path / "new"
    new.mkdir()
    with control_plane(old) as plane, client(plane) as http:
        wanted = {"name": "connector", "role": "connector", "cluster_id": "local"}
        token = ok(http.post("/v1/tokens", json=wanted))["secret"]
        job = ok(http.post("/v1/jobs", json=job_mapping()))["id"]
        with client(plane, token) as of_cluster:
            connector = Connector(http=of_cluster)
            ok(connector.renew())
            ok(connector.send(job, entries[:half]))
            backed_up(old / "shoal.db", new / "shoal.db")
            ok(connector.send(job, entries[half:]))
        later = ok(http.post("/v1/jobs", json=job_mapping(name="later")))["id"]
        ended = ok(http.get(f"/v1/jobs/{job}"))["status"]
    assert ended["state"] == "succeeded"

    shutil.copy(old / "admin.token", new)
    with control_plane(new) as plane, client(plane) as http, client(plane, token) as of_cluster:
        assert ok(http.get(f"/v1/jobs/{job}"))["status"]["step"] < ended["step"]
        connector = Connector(http=of_cluster)  # the same one: it has trained on
        ok(connector.renew())
        refused = connector.send(job, entries[-1:])
        assert (refused.status_code, refused.json()["expected_seq"]) == (409, half + 1)
        ok(connector.send(job, entries[half:]))
        again = ok(http.get(f"/v1/jobs/{job}"))["status"]
        assert (again["state"], again["step"]) == (ended["state"], ended["step"])
        assert http.get(f"/v1/jobs/{later}").status_code == 404, "it is not known any more"
