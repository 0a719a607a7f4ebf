"""Answers are those that the description of the API spells out, to the last field, and it leaves nothing open."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from control_plane import CLUSTER, Connector, job_mapping, ok, story
from described import bodies, closed, free, validator
from jsonschema import Draft202012Validator

from shoal.client import Client
from shoal_planner.job import parse_job
from shoal_planner.job_schema import job_schema

# Under names of the user's own, or for whoever reads what another tool added.
OPEN = {
    "TrainJob.model.arguments",
    "JobChanges.model.arguments",
    "JournalEntry.metrics.*",
    "JournalEvent.metrics.*",
    "Reported.metrics",
    "Plan.explanation",
    "Plan.profile",
    "PlanDocument.explanation",
    "PlanDocument.profile",
    "Problem",
}


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    return closed(ok(http.get("/openapi.json")))


@pytest.fixture(scope="module")
def job_id(http: httpx.Client) -> str:
    """Of a job with a history."""
    job = job_mapping(checkpoint={"copies": 1})
    found = str(ok(http.post("/v1/jobs", json=job))["id"])
    ok(Connector(http=http).renew())
    ok(Connector(http=http).send(found, story(job, started_at_s=1e9).entries))
    return found


def test_nothing_is_left_open(document: dict[str, Any]) -> None:
    found = {at for name, schema in bodies(document) for at in free(document, schema, name)}
    schema_route = {at for at in found if at.startswith("GET /v1/schemas/")}  # JSON Schemas, which may be any
    assert found - schema_route - OPEN == set()


def test_every_schema_is_one(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        "/v1/jobs/{job_id}/events",
        "/v1/jobs/{job_id}/attempts",
        "/v1/jobs/{job_id}/logs",
        "/v1/jobs/{job_id}/metrics",
        "/v1/jobs/{job_id}/plan",
        "/v1/jobs/{job_id}/recoveries",
        "/v1/jobs/{job_id}/bulk-losses",
        "/v1/jobs/{job_id}/checkpoints",
        "/v1/jobs/{job_id}/cost",
        "/v1/nodes",
        "/v1/prices",
        "/v1/drills",
        "/v1/drill-history",
        "/v1/spending",
        "/v1/clusters",
        "/v1/clusters/{cluster_id}",
        "/v1/clusters/{cluster_id}/wishes",
        "/v1/me",
        "/v1/projects",
        "/v1/projects/{project_id}",
        "/v1/projects/{project_id}/members",
        "/v1/projects/{project_id}/storages",
        "/v1/users",
        "/v1/tokens",
        "/v1/audit-events",
        "/v1/webhooks",
        "/v1/health",
    ],
)
def test_what_is_read_is_exactly_as_described(
    http: httpx.Client, document: dict[str, Any], job_id: str, path: str
) -> None:
    asked = path.format(job_id=job_id, cluster_id="local", project_id="default")
    answer = ok(http.get(asked))
    assert [error.message for error in validator(document, "get", path, 200).iter_errors(answer)] == []


def test_what_is_made_is_exactly_as_described(http: httpx.Client, document: dict[str, Any], job_id: str) -> None:
    members, hooks = "/v1/projects/{project_id}/members", "/v1/webhooks/{webhook_id}"
    storage = "/v1/projects/{project_id}/storages/{name}"
    hook = ok(http.post("/v1/webhooks", json={"url": "https://example.com/told", "project": None}))
    at = {"project_id": "default", "name": "store", "webhook_id": hook["id"], "job_id": job_id, "node_id": "big-0"}
    plan = {"job": job_mapping(), "cluster": CLUSTER}
    asked: list[tuple[str, str, int, Any]] = [
        ("post", "/v1/jobs", 201, job_mapping(name="another")),
        ("post", "/v1/jobs/{job_id}/clone", 201, None),
        ("post", "/v1/plans", 200, plan),
        ("post", "/v1/nodes/{node_id}/preempt", 202, {"notice_s": 60}),
        ("post", "/v1/projects", 201, {"id": "alpha"}),
        ("post", members, 201, {"email": "somebody@example.com", "role": "viewer"}),
        ("post", "/v1/tokens", 201, {"name": "ci", "role": "member"}),
        ("put", storage, 201, {"region": "eu-1", "credentials": {"environment": "STORE"}}),
        ("get", storage, 200, None),
        ("get", hooks, 200, None),
        ("post", f"{hooks}/secret", 200, None),
        ("post", f"{hooks}/ping", 202, None),
        ("get", f"{hooks}/deliveries", 200, None),
        ("patch", hooks, 200, {"enabled": False}),
        ("post", "/v1/login-links", 201, None),
    ]
    for method, path, status, body in asked:
        answer = http.request(method, path.format(**at), json=body)
        assert answer.status_code == status, (path, answer.text)
        problems = [error.message for error in validator(document, method, path, status).iter_errors(answer.json())]
        assert problems == [], path


def test_a_dry_run_is_described(http: httpx.Client, document: dict[str, Any], job_id: str) -> None:
    dry = http.post("/v1/jobs", params={"dry_run": "1"}, json=job_mapping())
    clone = http.post(f"/v1/jobs/{job_id}/clone", json={"dry_run": True, "overrides": {"train": {"steps": 70}}})
    for path, answer in (("/v1/jobs", dry), ("/v1/jobs/{job_id}/clone", clone)):
        assert answer.status_code == 200 and ok(answer)["plan"] is not None
        assert [error.message for error in validator(document, "post", path, 200).iter_errors(answer.json())] == []
    assert clone.json()["expected"]["steps"] == 70


def test_what_the_client_sends_is_what_is_described(
    http: httpx.Client, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JobSpec from Python is written as users write one."""
    sent: list[Any] = []
    monkeypatch.setattr(Client, "_call", lambda _self, _method, _path, **given: sent.append(given["json"]) or {})
    with Client(str(http.base_url), "token") as client:
        client.submit(parse_job(job_mapping()))
    job = Draft202012Validator({"$ref": "#/components/schemas/JobDocument", "components": document["components"]})
    for judge in (job, Draft202012Validator(job_schema())):
        assert [error.message for error in judge.iter_errors(json.loads(json.dumps(sent[0])))] == []


@pytest.mark.parametrize(
    "entry, param",
    [
        ({"kind": "plan_adopted", "plan": {"pipelines": []}}, "entries[0].plan.pipelines"),
        ({"kind": "plan_adopted", "snapshot": {"nodes": [{}]}}, "entries[0].snapshot.nodes[0].id"),
        ({"kind": "figures_measured", "profile": {"updates": [{}]}}, "entries[0].profile.updates[0].device"),
        ({"kind": "model_seen", "model": {}}, "entries[0].model.layers"),
    ],
)
def test_an_entry_with_an_unreadable_document_is_refused(
    http: httpx.Client, job_id: str, entry: dict[str, Any], param: str
) -> None:
    """Or pages and answers about the job would stumble over it."""
    adopted = next(each for each in story(job_mapping(), started_at_s=1e9).entries if each.event.kind == "plan_adopted")
    whole: dict[str, dict[str, Any]] = {
        "plan_adopted": {
            "epoch": 9,
            "plan_id": "x",
            "step": 1,
            "reason": "x",
            "plan": adopted.event.plan,  # type: ignore[union-attr]
            "snapshot": adopted.event.snapshot,  # type: ignore[union-attr]
        },
        "figures_measured": {"num_bytes": 0, "duration_s": 0.0},
        "model_seen": {"packages": []},
    }
    body = {"cluster_id": "local", "holder": "connector-1"}
    entries = [{"seq": 10_000, "at_s": 1.0, **whole[entry["kind"]], **entry}]
    refused = http.post(f"/v1/jobs/{job_id}/journal", json={**body, "entries": entries})
    assert (refused.status_code, refused.json()["param"]) == (422, param), refused.text


def test_schemas_of_documents_are_open_to_editors(http: httpx.Client) -> None:
    for name in ("job", "cluster", "market", "plan"):
        answer = httpx.get(f"{http.base_url}/v1/schemas/{name}")
        assert answer.headers["content-type"] == "application/schema+json"
        Draft202012Validator.check_schema(ok(answer))
    refused = httpx.get(f"{http.base_url}/v1/schemas/jobs")
    assert (refused.status_code, refused.json()["code"]) == (404, "schema_not_found")
    assert "must be one of job, cluster, market, plan" in refused.json()["detail"]


@pytest.mark.parametrize(
    "changes, is_one",
    [
        ({"labels": {"team": None}}, True),
        ({"labels": {"team": 1}}, False),
        ({"train": {"lora": {"alpha": 4}}}, True),
        ({"train": {"lora": None, "steps": None}}, True),
        ({"train": {"steps": "7"}}, False),
        ({"nothing": None}, True),
        ({"nothing": 1}, False),
        ({"workers": {"max": 3}}, True),
    ],
)
def test_changes_of_a_job_are_a_merge_patch(document: dict[str, Any], changes: dict[str, Any], is_one: bool) -> None:
    judge = Draft202012Validator({"$ref": "#/components/schemas/JobChanges", "components": document["components"]})
    assert judge.is_valid(changes) is is_one
