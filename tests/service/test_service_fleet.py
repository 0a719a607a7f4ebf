"""Interruptions by pool are those of all jobs of the window, however many there are."""

from __future__ import annotations

import re
import time

import httpx
from control_plane import Connector, job_mapping, ok, story

from shoal_service.fleet import Record, pools

JOBS = 23
KEY = ("1 x T4", "spot", "")


def test_what_was_before_the_window_does_not_count() -> None:
    record = Record(interrupted=((KEY, 10.0), (KEY, 90.0)), held=((KEY, 0.0, 20.0), (KEY, 40.0, 3640.0)))
    (found,) = pools([], [record], 50.0)
    assert (found.interruptions, found.node_hours) == (1, 3590 / 3600)


def test_more_than_twenty_jobs_are_counted(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time() - 60).entries
    for _ in range(JOBS):
        job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
        ok(connector.send(job_id, told))
    page = api.get("/nodes", headers={"Accept": "text/html"}).text
    assert f"of all {JOBS} jobs that changed in that time" in page
    counted = re.findall(r"<td class=\"num whole\" data-name=\"Interruptions\">(\d+) <small>in", page)
    assert counted.count(str(JOBS)) == 1, "each lost one spot node"
