"""Idempotency-Keys of posts other than jobs: nothing is made twice, and secrets are told once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok

from shoal_service import once

KEY = {"Idempotency-Key": "once"}
TOKEN = {"name": "robot", "role": "viewer"}
HOOK = {"url": "https://hooks.example.invalid", "events": ["job.failed"]}


def num(api: httpx.Client, path: str) -> int:
    return len(ok(api.get(path))["items"])


def test_what_was_made_is_answered_again(api: httpx.Client, connector: Connector, tmp_path: Any) -> None:
    ok(connector.renew())
    hook = ok(api.post("/v1/webhooks", json=HOOK))["id"]
    job = ok(api.post("/v1/jobs", json=job_mapping(checkpoint={"uri": tmp_path.as_uri()})))["id"]
    for index, (path, body, listed) in enumerate(
        (
            ("/v1/projects", {"id": "other"}, "/v1/projects"),
            ("/v1/projects/default/members", {"email": "a@example.org", "role": "viewer"}, "/v1/users"),
            ("/v1/nodes/big-0/preempt", {"notice_s": 600, "cluster_id": "local"}, "/v1/drills"),
            (f"/v1/webhooks/{hook}/ping", None, f"/v1/webhooks/{hook}/deliveries"),
            (f"/v1/jobs/{job}/checkpoint", None, "/v1/jobs"),
        )
    ):
        key = {"Idempotency-Key": f"key-{index}"}
        first, second = (api.post(path, json=body, headers=key) for _ in range(2))
        assert (ok(first), first.status_code) == (ok(second), second.status_code)
        known = num(api, listed)
        reused = api.post(path, json={**(body or {}), "more": 1}, headers=key)
        assert (reused.status_code, reused.json()["code"]) in ((409, "idempotency_key_reused"), (422, "invalid_field"))
        assert num(api, listed) == known
    (wish,) = connector.wishes()["jobs"]
    assert wish["saves"] == 1
    assert num(api, "/v1/drills") == num(api, f"/v1/webhooks/{hook}/deliveries") == 1
    other = api.post("/v1/projects", json={"id": "third"}, headers={"Idempotency-Key": "key-0"}).json()
    assert (other["code"], other["id"]) == ("idempotency_key_reused", "other")


@pytest.mark.parametrize(("path", "body"), [("/v1/tokens", TOKEN), ("/v1/webhooks", HOOK)])
def test_a_secret_is_told_once(api: httpx.Client, path: str, body: dict[str, Any]) -> None:
    made = ok(api.post(path, json=body, headers=KEY))
    again = api.post(path, json=body, headers=KEY)
    assert (again.status_code, again.json()["code"], again.json()["id"]) == (409, "secret_told_before", made["id"])
    assert made["secret"] not in again.text
    assert num(api, path) == 1
    if path == "/v1/webhooks":
        renewed = api.post(f"{path}/{made['id']}/secret", headers={"Idempotency-Key": "renew"})
        assert ok(renewed)["secret"] != made["secret"]
        assert api.post(f"{path}/{made['id']}/secret", headers={"Idempotency-Key": "renew"}).status_code == 409


def test_what_failed_may_be_asked_for_again(api: httpx.Client) -> None:
    """And keys belong to who sends them."""
    ok(api.post("/v1/projects", json={"id": "other"}))
    assert api.post("/v1/projects", json={"id": "other"}, headers=KEY).json()["code"] == "project_exists"
    assert api.delete("/v1/projects/other").status_code == 204
    assert api.post("/v1/projects", json={"id": "other"}, headers=KEY).status_code == 201
    secret = ok(api.post("/v1/tokens", json={"name": "second", "role": "server_admin"}))["secret"]
    mine = {**KEY, "Authorization": f"Bearer {secret}"}
    assert api.post("/v1/projects", json={"id": "third"}, headers=mine).status_code == 201


def test_of_many_at_once_one_is_done(api: httpx.Client) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: api.post("/v1/tokens", json=TOKEN, headers=KEY), range(4)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
    assert num(api, "/v1/tokens") == 1


def test_keys_are_kept_for_a_week(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ok(api.post("/v1/tokens", json=TOKEN, headers=KEY))
    assert api.post("/v1/tokens", json=TOKEN, headers=KEY).status_code == 409
    now_s = time.time()
    monkeypatch.setattr(once.time, "time", lambda: now_s + 8 * 86400)
    assert api.post("/v1/tokens", json=TOKEN, headers=KEY).status_code == 201
