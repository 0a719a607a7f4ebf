"""What every answer says of itself: nobody keeps it or takes it for something else. And what is sent to verbs that take
nothing is refused, not read over."""

from __future__ import annotations

import httpx
import pytest
from control_plane import Connector, ControlPlane, job_mapping, ok, story


@pytest.fixture(scope="module")
def job_id(http: httpx.Client) -> str:
    ok(Connector(http=http).renew(300))
    created = str(ok(http.post("/v1/jobs", json=job_mapping()))["id"])
    ok(Connector(http=http).send(created, story(job_mapping(), started_at_s=1e9).entries[:8]))
    return created


def test_no_answer_is_kept_or_guessed_at(http: httpx.Client, job_id: str) -> None:
    about = ("", "/events", "/logs", "/metrics", "/plan", "/plan.svg", "/cost", "/checkpoints", "/debug-dump")
    paths = ["/v1/jobs", "/v1/me", "/v1/tokens", "/v1/nope", "/metrics", "/healthz", "/nodes", "/login", "/nope"]
    for path in (*paths, *(f"/v1/jobs/{job_id}{part}" for part in about)):
        answer = http.get(path)
        said = (answer.headers.get("cache-control"), answer.headers.get("x-content-type-options"))
        assert said == ("no-store", "nosniff"), (path, said)
    made = http.post("/v1/tokens", json={"name": "kept by nobody", "role": "viewer", "project": "default"})
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    stranger = httpx.get(f"{http.base_url}/v1/jobs")
    assert (stranger.status_code, stranger.headers["cache-control"]) == (401, "no-store")
    with http.stream("GET", f"/v1/jobs/{job_id}/events", params={"watch": 1}) as stream:
        assert "no-store" in stream.headers["cache-control"]


def test_what_is_the_same_for_everybody_may_be_kept(http: httpx.Client) -> None:
    for path in ("/static/shoal.css", "/v1/schemas/job", "/openapi.json"):
        answer = http.get(path)
        assert answer.status_code == 200 and "no-store" not in answer.headers.get("cache-control", ""), path
        assert answer.headers["x-content-type-options"] == "nosniff", path


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel", "checkpoint"])
@pytest.mark.parametrize("body", ['{"when": "tomorrow"}', "{", "[]", "now", '"x"'])
def test_what_a_verb_cannot_take_is_refused(http: httpx.Client, job_id: str, verb: str, body: str) -> None:
    before = ok(http.get(f"/v1/jobs/{job_id}"))
    refused = http.post(f"/v1/jobs/{job_id}/{verb}", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["code"], refused.json()["param"]) == (422, "invalid_field", "body")
    assert ok(http.get(f"/v1/jobs/{job_id}"))["wish"] == before["wish"]


def test_nothing_may_be_said_in_some_ways(plane: ControlPlane, http: httpx.Client, job_id: str) -> None:
    for body in ("", " {} ", "null"):
        sent = http.post("/v1/login-links", content=body, headers={"Content-Type": "application/json"})
        assert sent.status_code == 201, sent.text
    assert http.post("/v1/login-links", content="{}x").status_code == 422
    stranger = httpx.post(f"{plane.url}/v1/jobs/{job_id}/cancel", content="x")
    assert stranger.status_code == 401, "who may not ask is told nothing else"
