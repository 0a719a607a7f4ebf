"""Jobs that are cancelled while their cluster is gone: nobody is left to end them, and they end all the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story

from shoal_workers.control_plane import ControlPlane, JobElsewhere


@pytest.mark.parametrize("settings", [{"cluster_lost_s": 0.5}], indirect=True)
def test_what_was_cancelled_on_a_lost_cluster_is_over(
    api: httpx.Client, connector: Connector, eventually: Callable[..., Any]
) -> None:
    """At once where it has not begun; no other cluster need come for that."""
    ok(connector.renew())
    queued, begun = (ok(api.post("/v1/jobs", json=job_mapping(name=name)))["id"] for name in ("queued", "begun"))
    told = story(job_mapping(), started_at_s=time.time()).entries
    ok(connector.send(begun, told[:10]))
    ok(connector.renew(lease_s=1e-6))
    ended = ok(api.post(f"/v1/jobs/{queued}/cancel"))
    assert (ended["status"]["state"], ended["status"]["code"]) == ("cancelled", "cancelled_by_user")
    assert "cancelled while cluster local, not heard of since " in ended["status"]["reason"]

    ok(api.post(f"/v1/jobs/{begun}/cancel"))
    over = eventually(lambda: _if_state(api, begun, "cancelled"), 30)
    assert over["status"]["reason"].endswith("what still runs of it there ends should that cluster come back")
    assert (over["cluster_id"], over["cluster"]) == (None, None)
    assert ok(api.get("/v1/jobs", params={"state": "cancelling"}))["items"] == []

    # The cluster comes back, and learns whose the job is not: from its couriers, with news or without, or from others.
    ok(connector.renew())
    assert connector.wishes()["jobs"] == []
    token = api.headers["Authorization"].removeprefix("Bearer ")
    plane = ControlPlane(str(api.base_url), token, "local", connector.holder)
    assert not plane.wants(begun) and not plane.wants(queued)
    for entries in ([], [{"seq": 11, "at_s": 1.0, "kind": "node_lost", "node": "a", "evidence": "b", "detect_s": 1}]):
        with pytest.raises(JobElsewhere):
            plane.append(begun, entries)
    plane._http.close()
    assert ok(api.get(f"/v1/jobs/{begun}"))["status"]["state"] == "cancelled"


@pytest.mark.parametrize("settings", [{"cluster_lost_s": 3600}], indirect=True)
def test_until_it_counts_as_lost_a_cluster_may_end_its_job_itself(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time()).entries[:10]))
    ok(connector.renew(lease_s=1e-6))
    assert ok(api.post(f"/v1/jobs/{job_id}/cancel"))["status"]["state"] == "cancelling"
    problem = ok(api.get(f"/v1/jobs/{job_id}"))["cluster"]["problem"]
    assert problem.endswith("; the job is cancelled once it is heard of again, or counts as lost")
    ok(connector.renew())
    assert [(job["id"], job["wish"]) for job in connector.wishes()["jobs"]] == [(job_id, "cancelled")]


def _if_state(api: httpx.Client, job_id: str, state: str) -> Any:
    found = ok(api.get(f"/v1/jobs/{job_id}"))
    return found if found["status"]["state"] == state else None
