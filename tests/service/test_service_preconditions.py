"""ETags and If-Match of all that can change beside jobs: who saw something older changes nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from control_plane import ok

from shoal.client import Client
from shoal.errors import RequestRefused

STORAGE = "/v1/projects/default/storages/minio"
HOOK = {"url": "https://hooks.example.invalid", "events": ["job.failed"]}


def refused(answer: httpx.Response, etag: str | None) -> None:
    found = answer.json()
    assert (answer.status_code, found["code"], found["param"]) == (412, "precondition_failed", "If-Match")
    assert found["etag"] == etag


@pytest.fixture
def member(api: httpx.Client) -> dict[str, Any]:
    body = {"email": "some.one@example.org", "role": "member"}
    return ok(api.post("/v1/projects/default/members", json=body))  # type: ignore[no-any-return]


def test_changes_hold_only_for_what_was_seen(api: httpx.Client, member: dict[str, Any]) -> None:
    hook = f"/v1/webhooks/{ok(api.post('/v1/webhooks', json=HOOK))['id']}"
    ok(api.put(STORAGE, json={"endpoint": "https://minio.example:9000"}))
    role, user = f"/v1/projects/default/members/{member['user_id']}", f"/v1/users/{member['user_id']}"
    (listed,) = ok(api.get("/v1/projects/default/members"))["items"]
    (person,) = ok(api.get("/v1/users"))["items"]
    for method, path, before, changes in (
        ("PATCH", hook, api.get(hook).headers["ETag"], ({"enabled": False}, {"enabled": True})),
        ("PUT", STORAGE, api.get(STORAGE).headers["ETag"], ({"region": "eu-1"}, {"region": "eu-2"})),
        ("PUT", role, listed["etag"], ({"role": "viewer"}, {"role": "admin"})),
        ("PATCH", user, person["etag"], ({"server_admin": True}, {"server_admin": False})),
    ):
        changed = api.request(method, path, json=changes[0], headers={"If-Match": before})
        after = changed.headers["ETag"]
        assert ok(changed)["etag"] == after != before
        refused(api.request(method, path, json=changes[1], headers={"If-Match": before}), after)
        refused(api.delete(path, headers={"If-Match": before}), after)
        again = ok(api.request(method, path, json=changes[1], headers={"If-Match": f"{before}, {after}"}))
        assert again["etag"] != after
        assert api.delete(path, headers={"If-Match": "*"}).status_code == 204
    for path in (STORAGE, role):  # nothing is made by who wants to change
        body = {"role": "viewer"} if path == role else {}
        user_is_gone = path == role
        answer = api.put(path, json=body, headers={"If-Match": "*"})  # the user went with the last DELETE
        assert answer.status_code == 404 if user_is_gone else refused(answer, None) is None


def test_what_a_webhook_was_told_changes_no_etag(api: httpx.Client) -> None:
    made = ok(api.post("/v1/webhooks", json=HOOK))
    ok(api.post(f"/v1/webhooks/{made['id']}/ping"))
    assert ok(api.get(f"/v1/webhooks/{made['id']}"))["etag"] == made["etag"]
    assert ok(api.post(f"/v1/webhooks/{made['id']}/secret"))["etag"] != made["etag"]


def test_openapi_tells_of_it(api: httpx.Client) -> None:
    paths = ok(api.get("/openapi.json"))["paths"]
    named = (
        ("/v1/webhooks/{webhook_id}", ("patch", "delete")),
        ("/v1/projects/{project_id}/storages/{name}", ("put", "delete")),
        ("/v1/projects/{project_id}/members/{user_id}", ("put", "delete")),
        ("/v1/users/{user_id}", ("patch", "delete")),
    )
    for path, methods in named:
        for operation in (paths[path][method] for method in methods):
            assert "412" in operation["responses"]
            assert "204" in operation["responses"] or "ETag" in operation["responses"]["200"]["headers"]
            assert "if-match" in {each["name"].lower() for each in operation["parameters"]}


def test_client_passes_etags_on(api: httpx.Client, member: dict[str, Any]) -> None:
    token = api.headers["Authorization"].removeprefix("Bearer ")
    with Client(str(api.base_url), token) as client:
        made = client.storages("default").set("minio", region="eu-1")
        with pytest.raises(RequestRefused, match="storage minio: it has changed since"):
            client.storages("default").set("minio", region="eu-2", if_match='"other"')
        client.storages("default").delete("minio", if_match=made["etag"])
        with pytest.raises(RequestRefused, match="has the role member in project default now"):
            client.people.remove_member("default", member["user_id"], if_match='"other"')
        changed = client.people.set_role("default", member["user_id"], "viewer", if_match=member["etag"])
        assert changed["role"] == "viewer"
