"""What a loss of many nodes would cost, over REST and on the page of a job."""

from __future__ import annotations

import time

import httpx
from control_plane import Connector, job_mapping, ok, story

from shoal.cli_show import _bulk_losses
from shoal_planner.job import parse_job
from shoal_planner.parameters import parameters


def test_it_is_told_while_a_job_has_nodes(api: httpx.Client, connector: Connector) -> None:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    nothing = {"epoch": None, "state_bytes": 0, "stored_step": None, "items": []}
    assert ok(api.get(f"/v1/jobs/{job_id}/bulk-losses")) == nothing
    assert "Nothing: the job has no nodes now." in api.get(f"/jobs/{job_id}", headers={"Accept": "text/html"}).text
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time()).entries
    ok(connector.send(job_id, told[:10]))
    found = ok(api.get(f"/v1/jobs/{job_id}/bulk-losses"))
    state_bytes = 12 * sum(parameter.numel for parameter in parameters(parse_job(job_mapping()).model))
    assert (found["epoch"], found["state_bytes"], found["stored_step"]) == (1, state_bytes, None)
    by_name = {(loss["domain"], loss["name"]): loss for loss in found["items"]}
    assert set(by_name) == {
        *(("node", node) for node in ("big-0", "big-1", "spot-0", "spot-1")),
        *(("pool", "A100-80G in a, on demand"), ("pool", "T4 in b"), ("zone", "a"), ("zone", "b")),
    }
    assert by_name["zone", "b"]["nodes"] == ["spot-0", "spot-1"]
    assert all(loss["store_bytes"] == 0 for loss in found["items"]), "each copy stands in another zone"
    page = api.get(f"/jobs/{job_id}", headers={"Accept": "text/html"}).text
    assert "A100-80G in a, on demand" in page
    ((_, lines),) = _bulk_losses(found)
    assert "zone a (2 of the nodes): nothing" in lines and "nothing stands there yet" in lines
    ok(connector.send(job_id, told))
    assert ok(api.get(f"/v1/jobs/{job_id}/bulk-losses")) == {**nothing, "stored_step": 39}
    assert api.get("/v1/jobs/job_x/bulk-losses").status_code == 404
