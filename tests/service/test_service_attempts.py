"""The attempts of a job as REST tells of them, by a journal like a supervisor's."""

from __future__ import annotations

import time

import httpx
from control_plane import Connector, job_mapping, ok, story


def test_attempts_say_what_became_of_each(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    job = job_mapping()
    job_id = ok(api.post("/v1/jobs", json=job))["id"]
    path = f"/v1/jobs/{job_id}/attempts"
    assert ok(api.get(path)) == {"items": [], "next_cursor": None}
    told = story(job, started_at_s=time.time() - 300).entries
    in_the_middle = next(entry.seq for entry in told if entry.event.kind == "checkpoint_committed")
    ok(connector.send(job_id, told[:in_the_middle]))
    newest, first = ok(api.get(path))["items"]
    assert (newest["attempt"], newest["cause"], newest["outcome"], newest["ended_at"]) == (
        2,
        "node_lost",
        "running",
        None,
    )
    assert (first["attempt"], first["cause"], first["outcome"]) == (1, "submitted", "node_lost")
    assert first["ended_at"] == newest["began_at"]
    ok(connector.send(job_id, told))
    third, second, first = ok(api.get(path))["items"]
    assert [each["attempt"] for each in (third, second, first)] == [3, 2, 1]
    assert [each["steps_done"] for each in (third, second, first)] == [21, 20, 20]
    assert first["steps_rolled_back"] == 1 and second["redone_steps"] == 1
    assert (second["from_step"], second["last_step"]) == (19, 39)
    assert first["nodes"] == ["big-0", "big-1", "spot-0", "spot-1"] and "spot-1" not in second["nodes"]
    assert (third["outcome"], second["outcome"]) == ("succeeded", "node_joined")
    assert third["ended_at"] is not None
    page = ok(api.get(path, params={"limit": 2}))
    assert [each["attempt"] for each in page["items"]] == [3, 2]
    page = ok(api.get(path, params={"limit": 2, "cursor": page["next_cursor"]}))
    assert ([each["attempt"] for each in page["items"]], page["next_cursor"]) == ([1], None)
    assert api.get(path, params={"cursor": "job_1"}).status_code == 422
    assert api.get("/v1/jobs/job_none/attempts").status_code == 404
