"""Jobs that rest: what users may ask for, and what clusters are wished to do then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
from control_plane import Connector, job_mapping, ok

from shoal_recovery.journal import Entry, StateChanged, StepDone, entry_from_mapping, entry_to_mapping
from shoal_workers.control_plane import ControlPlane


def state(seq: int, name: str) -> Entry:
    return Entry(seq=seq, at_s=1000.0 + seq, event=StateChanged(state=name, code="code", reason="because"))


def step(seq: int, number: int) -> Entry:
    event = StepDone(
        epoch=1, step=number, loss=2.0, grad_norm=1.0, lr=3e-4, tokens=256, duration_s=0.5, samples=((0, 8),)
    )
    return Entry(seq=seq, at_s=1000.0 + seq, event=event)


def stored(tmp_path: Path) -> dict[str, Any]:
    return job_mapping(checkpoint={"uri": (tmp_path / "store").as_uri()})


UNEQUAL = StepDone(
    epoch=1, step=2, loss=math.nan, grad_norm=1.0, lr=3e-4, tokens=256, duration_s=0.5, samples=((8, 16),)
)


def test_pausing_and_resuming(api: httpx.Client, connector: Connector, tmp_path: Path) -> None:
    ok(connector.renew())
    job_id = str(ok(api.post("/v1/jobs", json=stored(tmp_path)))["id"])
    ok(connector.send(job_id, [state(1, "starting"), state(2, "running"), step(3, 1)]))

    def said(answer: httpx.Response) -> tuple[str, str, str | None]:
        job = ok(answer)
        return job["wish"], job["status"]["state"], job["cluster_id"]

    version = connector.wishes()["version"]
    assert said(api.post(f"/v1/jobs/{job_id}/pause")) == ("paused", "running", "local")
    assert [job["wish"] for job in connector.wishes()["jobs"]] == ["paused"]
    assert connector.wishes()["version"] != version
    assert api.post(f"/v1/jobs/{job_id}/pause").json()["detail"] == f"{job_id} is being paused already"
    # Called off before it came about, and wished again.
    assert said(api.post(f"/v1/jobs/{job_id}/resume")) == ("run", "running", "local")
    refused = api.post(f"/v1/jobs/{job_id}/resume")
    assert (refused.status_code, refused.json()["code"]) == (409, "not_paused")
    ok(api.post(f"/v1/jobs/{job_id}/pause"))
    ok(connector.send(job_id, [state(4, "draining"), state(5, "paused")]))
    assert connector.wishes()["jobs"] == []
    assert all(node["jobs"] == [] for node in ok(api.get("/v1/nodes"))["items"])
    assert api.post(f"/v1/jobs/{job_id}/pause").json()["detail"] == f"{job_id} is paused already"
    # On another cluster, where the one that it had is gone.
    ok(connector.renew(lease_s=1e-6))
    other = Connector(http=api, cluster_id="other", holder="h")
    ok(other.renew())
    assert said(api.post(f"/v1/jobs/{job_id}/resume")) == ("run", "queued", "other")
    (wished,) = other.wishes()["jobs"]
    assert (wished["id"], wished["wish"], wished["last_seq"]) == (job_id, "run", 5)
    assert connector.send(job_id, [state(6, "running")]).json()["code"] == "wrong_cluster"
    ok(other.send(job_id, [state(6, "starting"), state(7, "recovering"), state(8, "running"), step(9, 2)]))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["step"] == 2
    ok(other.send(job_id, [state(10, "succeeded")]))
    for action in ("pause", "resume"):
        assert api.post(f"/v1/jobs/{job_id}/{action}").json()["code"] == "job_ended"


def test_a_job_that_rests_before_it_began_or_for_want_of_a_cluster(
    api: httpx.Client, connector: Connector, tmp_path: Path
) -> None:
    without_store = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    assert api.post(f"/v1/jobs/{without_store}/pause").json()["code"] == "no_store"
    ok(api.post(f"/v1/jobs/{without_store}/cancel"))
    assert api.post(f"/v1/jobs/{without_store}/pause").json()["code"] == "job_ended"
    job_id = str(ok(api.post("/v1/jobs", json=stored(tmp_path)))["id"])
    assert ok(api.post(f"/v1/jobs/{job_id}/pause"))["status"]["state"] == "paused"
    ok(connector.renew())
    assert connector.wishes()["jobs"] == [], "it was given to a cluster while it rests"
    ok(connector.renew(lease_s=1e-6))
    resumed = ok(api.post(f"/v1/jobs/{job_id}/resume"))
    assert (resumed["cluster_id"], resumed["status"]["state"], resumed["status"]["code"]) == (None, "queued", "resumed")
    ok(connector.renew())
    assert [job["id"] for job in connector.wishes()["jobs"]] == [job_id]
    # The supervisor rests although the pause was called off meanwhile: it goes on.
    ok(api.post(f"/v1/jobs/{job_id}/pause"))
    ok(api.post(f"/v1/jobs/{job_id}/resume"))
    ok(connector.send(job_id, [state(1, "starting"), state(2, "paused")]))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["state"] == "queued"
    assert [job["wish"] for job in connector.wishes()["jobs"]] == ["run"]
    ok(api.post(f"/v1/jobs/{job_id}/pause"))
    cancelled = ok(api.post(f"/v1/jobs/{job_id}/cancel"))
    assert (cancelled["status"]["state"], cancelled["status"]["reason"]) == (
        "cancelled",
        "cancelled while it was paused",
    )


def test_a_connector_reads_back_what_was_sent(api: httpx.Client, connector: Connector) -> None:
    """Whoever goes on with a job has its history from here."""
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(connector.renew())
    sent = [state(1, "starting"), state(2, "running"), step(3, 1), Entry(seq=4, at_s=1004.5, event=UNEQUAL)]
    token = api.headers["Authorization"].removeprefix("Bearer ")
    plane = ControlPlane(str(api.base_url), token, "local", "connector-1")
    assert plane.append(job_id, [entry_to_mapping(entry) for entry in sent]) == 4
    found = [entry_from_mapping(entry) for entry in plane.history(job_id)]
    assert found[:3] == sent[:3]
    last = found[3].event
    assert isinstance(last, StepDone)
    assert math.isnan(last.loss)
    assert plane.wants(job_id) and plane.wants("job_unknown")
    ok(connector.send(job_id, [state(5, "succeeded")]))
    assert not plane.wants(job_id)
    plane._http.close()
