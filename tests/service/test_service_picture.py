"""The plan of a job as a picture, over REST and linked from its page."""

from __future__ import annotations

import copy
import dataclasses
import time
import xml.etree.ElementTree as ElementTree

import httpx
import pytest
from control_plane import ALL_NODES, Connector, job_mapping, ok, snapshot, story

from shoal_planner.answers import plan_of_answer
from shoal_planner.errors import InvalidField
from shoal_planner.job import parse_job
from shoal_planner.plan import plan_to_mapping
from shoal_planner.score import score
from shoal_recovery.journal import PlanAdopted


def test_a_plan_comes_as_a_picture(api: httpx.Client, connector: Connector) -> None:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    missing = api.get(f"/v1/jobs/{job_id}/plan.svg")
    assert (missing.status_code, missing.json()["code"]) == (404, "no_plan_yet")
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time())
    ok(connector.send(job_id, told.entries))
    answer = api.get(f"/v1/jobs/{job_id}/plan.svg")
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/svg+xml"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["content-disposition"] == f'inline; filename="plan-{told.plan_id}.svg"'
    assert ElementTree.fromstring(answer.text).tag == "{http://www.w3.org/2000/svg}svg"
    assert told.plan_id in answer.text and "big-1:1" in answer.text
    older = api.get(f"/v1/jobs/{job_id}/plan.svg", params={"epoch": 2})
    assert older.status_code == 200 and told.plan_id not in older.text
    assert api.get(f"/v1/jobs/{job_id}/plan.svg", params={"epoch": 9}).json()["param"] == "epoch"
    page = api.get(f"/jobs/{job_id}", headers={"Accept": "text/html"}).text
    assert f'href="/v1/jobs/{job_id}/plan.svg?epoch=3"' in page


def test_a_plan_that_cannot_be_drawn_is_refused_in_words(api: httpx.Client, connector: Connector) -> None:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(connector.renew())
    entries = story(job_mapping(), started_at_s=time.time()).entries
    at = next(index for index, entry in enumerate(entries) if isinstance(entry.event, PlanAdopted))
    event = entries[at].event
    assert isinstance(event, PlanAdopted)
    strange = copy.deepcopy(event.snapshot)
    strange["nodes"][0]["device"] = "QPU-1"
    entries[at] = dataclasses.replace(entries[at], event=dataclasses.replace(event, snapshot=strange))
    ok(connector.send(job_id, entries))
    refused = api.get(f"/v1/jobs/{job_id}/plan.svg", params={"epoch": 1})
    assert (refused.status_code, refused.json()["code"]) == (409, "plan_not_drawable")
    assert "'QPU-1'" in refused.json()["detail"]


def test_an_answer_is_read_back_with_its_own_prediction() -> None:
    scored = score(ALL_NODES, parse_job(job_mapping()), snapshot())
    answer = plan_to_mapping(scored)
    found = plan_of_answer(answer)
    assert found.prediction == scored.prediction and found.plan_id == scored.plan_id
    assert plan_of_answer({"pipelines": answer["pipelines"]}).prediction is None
    assert plan_of_answer({**answer, "predicted": {"step_s": 1}}).prediction is None
    with pytest.raises(InvalidField, match=r"predicted\.step_s = 'x'"):
        plan_of_answer({**answer, "predicted": {"step_s": "x", "memory_bytes": {}}})
