"""Tokens, projects, sign-in with a token, the record of what was done, and guesses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, enter, job_mapping, ok
from fastapi import FastAPI
from sqlalchemy import update

from shoal_service.database import Database
from shoal_service.errors import TooManyGuesses
from shoal_service.guesses import Guesses
from shoal_service.models_people import TokenRow
from shoal_service.rules import RULES


def make_token(api: httpx.Client, **what: Any) -> dict[str, Any]:
    made: dict[str, Any] = ok(api.post("/v1/tokens", json={"name": "test", "role": "member", **what}))
    return made


async def expire(database_url: str, token_id: str) -> None:
    database = Database(database_url)
    async with database.write() as session:
        await session.execute(update(TokenRow).where(TokenRow.id == token_id).values(expires_at_s=1.0))
    await database.close()


@pytest.fixture
def nobody(api: httpx.Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.base_url, timeout=30) as client:
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_a_token_works_until_it_is_revoked_and_its_secret_is_nowhere(
    api: httpx.Client, nobody: httpx.Client, tmp_path: Path
) -> None:
    made = make_token(api, project="default")
    assert made["id"].startswith("tok_") and made["secret"].startswith("shoal_") and len(made["secret"]) > 43
    headers = bearer(made["secret"])
    me = ok(nobody.get("/v1/me", headers=headers))
    assert (me["id"], me["kind"], [(each["id"], each["role"]) for each in me["projects"]]) == (
        made["id"],
        "token",
        [("default", "member")],
    )
    listed = ok(api.get("/v1/tokens"))["items"]
    assert [each["id"] for each in listed] == [made["id"]] and "secret" not in listed[0]
    assert listed[0]["last_used_at"] is not None and listed[0]["valid"]
    link = ok(nobody.post("/v1/login-links", headers=headers))["url"]
    assert enter(nobody, link).status_code == 303  # as the token, which ends with it
    assert ok(nobody.get("/v1/me"))["id"] == made["id"]
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            assert made["secret"].encode() not in path.read_bytes(), path
    assert ok(api.delete(f"/v1/tokens/{made['id']}"))["valid"] is False
    assert ok(api.delete(f"/v1/tokens/{made['id']}"))["valid"] is False
    refused = nobody.get("/v1/me", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
    assert nobody.get("/v1/me").status_code == 401


def test_a_token_ends(api: httpx.Client, nobody: httpx.Client, database_url: str) -> None:
    made = make_token(api)
    assert made["expires_at"] is not None  # after 90 days
    assert make_token(api, expires_in_s=None)["expires_at"] is None
    assert make_token(api, role="connector", cluster_id="x")["expires_at"] is None
    asyncio.run(expire(database_url, made["id"]))
    assert nobody.get("/v1/me", headers=bearer(made["secret"])).status_code == 401


def test_nobody_gives_away_more_than_they_have(api: httpx.Client, nobody: httpx.Client) -> None:
    ok(api.post("/v1/projects", json={"id": "other"}))
    admin = bearer(make_token(api, role="admin", project="other")["secret"])
    member = bearer(make_token(api, project="other")["secret"])

    def asks(headers: dict[str, str], **body: Any) -> tuple[int, str]:
        answer = nobody.post("/v1/tokens", json={"name": "x", **body}, headers=headers)
        return answer.status_code, answer.json().get("code") or answer.json().get("project")

    assert asks(admin, role="admin") == (201, "other")
    assert asks(admin, role="viewer", project="other") == (201, "other")
    assert asks(admin, role="viewer", project="default") == (404, "project_not_found")
    assert asks(admin, role="viewer", project="nowhere") == (404, "project_not_found")
    assert asks(admin, role="server_admin") == (403, "role")
    assert asks(admin, role="connector", cluster_id="local") == (403, "role")
    assert asks(admin, role="connector") == (422, "invalid_field")
    assert asks(admin, role="viewer", cluster_id="local") == (422, "invalid_field")
    assert asks(member, role="viewer") == (403, "role")
    token_id = make_token(api, project="default")["id"]
    assert nobody.delete(f"/v1/tokens/{token_id}", headers=admin).json()["code"] == "token_not_found"
    assert token_id not in [each["id"] for each in ok(nobody.get("/v1/tokens", headers=admin))["items"]]
    assert ok(nobody.get("/v1/tokens", headers=member))["items"] == []


def test_projects_do_not_see_each_other(api: httpx.Client, nobody: httpx.Client) -> None:
    ok(api.post("/v1/projects", json={"id": "other"}))
    assert api.post("/v1/projects", json={"id": "other"}).json()["code"] == "project_exists"
    for bad in ("Other", "a/b", "", "-a", "x" * 41, "a\r\nb"):
        assert api.post("/v1/projects", json={"id": bad}).status_code == 422, bad
    here, there = (bearer(make_token(api, project=project)["secret"]) for project in ("default", "other"))
    key = {"Idempotency-Key": "the same"}
    mine = ok(nobody.post("/v1/jobs", json=job_mapping(name="mine"), headers=here | key))
    theirs = ok(nobody.post("/v1/jobs", json=job_mapping(name="theirs"), headers=there | key))
    assert (mine["project"], theirs["project"]) == ("default", "other")
    assert ok(nobody.post("/v1/jobs", json=job_mapping(name="mine"), headers=here | key))["id"] == mine["id"]
    assert [job["id"] for job in ok(nobody.get("/v1/jobs", headers=here))["items"]] == [mine["id"]]
    assert ok(nobody.get("/v1/jobs", headers=here, params={"project": "other"}))["items"] == []
    assert len(ok(api.get("/v1/jobs"))["items"]) == 2
    assert len(ok(api.get("/v1/jobs", params={"project": "other"}))["items"]) == 1
    # What is foreign is answered as what nobody has.
    foreign = nobody.get(f"/v1/jobs/{theirs['id']}", headers=here).json()
    missing = nobody.get("/v1/jobs/job_nobody", headers=here).json()
    assert {**foreign, "detail": ""} == {**missing, "detail": ""}
    assert foreign["detail"] == missing["detail"].replace("job_nobody", theirs["id"])
    for project in ("other", "nowhere"):
        refused = nobody.post("/v1/jobs", json=job_mapping(), headers=here, params={"project": project})
        assert (refused.status_code, refused.json()["code"]) == (404, "project_not_found")
    assert theirs["id"] not in nobody.get("/", headers=here).text
    assert api.delete("/v1/projects/other").json()["code"] == "project_in_use"


def test_a_nodes_foreign_jobs_are_not_shown(api: httpx.Client, nobody: httpx.Client) -> None:
    from control_plane import story

    ok(api.post("/v1/projects", json={"id": "other"}))
    connector = Connector(http=api)
    ok(connector.renew())
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    ok(connector.send(job_id, story(job_mapping(), started_at_s=1e9).entries[:6]))
    here, there = (bearer(make_token(api, project=project)["secret"]) for project in ("default", "other"))
    assert any(job_id in node["jobs"] for node in ok(nobody.get("/v1/nodes", headers=here))["items"])
    assert not any(node["jobs"] for node in ok(nobody.get("/v1/nodes", headers=there))["items"])


def test_what_is_done_and_refused_is_recorded(api: httpx.Client, nobody: httpx.Client) -> None:
    viewer = make_token(api, role="viewer", project="default", name="the viewer")
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    assert nobody.post(f"/v1/jobs/{job_id}/cancel", headers=bearer(viewer["secret"])).status_code == 403
    ok(api.post(f"/v1/jobs/{job_id}/cancel"))
    assert nobody.get("/v1/me", headers=bearer("shoal_wrong")).status_code == 401
    events = ok(api.get("/v1/audit-events", params={"limit": 200}))["items"]
    told = [(each["actor_name"], each["action"], each["target"], each["project"], each["outcome"]) for each in events]
    assert told == [
        (None, "enter", None, None, "refused"),
        ("administrator", "job.cancel", job_id, "default", "done"),
        ("the viewer", "job.cancel", job_id, "default", "refused"),
        ("administrator", "job.create", job_id, "default", "done"),
        ("administrator", "token.create", viewer["id"], "default", "done"),
    ]
    assert all(each["address"] == "127.0.0.1" and each["at"].endswith("Z") for each in events)
    assert [each["code"] for each in events[:3]] == ["unauthorized", None, "role"]
    pages, cursor = [], None
    while True:
        page = ok(api.get("/v1/audit-events", params={"limit": 2} | ({"cursor": cursor} if cursor else {})))
        pages.append([each["id"] for each in page["items"]])
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert pages == [[each["id"] for each in events[at : at + 2]] for at in (0, 2, 4)]
    assert nobody.get("/v1/audit-events", headers=bearer(viewer["secret"])).status_code == 403
    assert "shoal_wrong" not in str(events) and viewer["secret"] not in str(events)
    for method in ("DELETE", "PUT", "PATCH"):
        assert api.request(method, "/v1/audit-events").status_code == 405


def test_the_page_signs_in_with_a_token(api: httpx.Client, nobody: httpx.Client) -> None:
    token = make_token(api, project="default", name="someone")
    page = nobody.get("/login", params={"next": "/nodes"})
    csrf = page.text.partition('name="csrf" value="')[2].partition('"')[0]
    assert "HttpOnly" in page.headers["set-cookie"] and "single sign-on" not in page.text
    form = {"csrf": csrf, "token": token["secret"], "next": "/nodes"}
    assert nobody.post("/login", data=form | {"csrf": "wrong"}).status_code == 403
    with httpx.Client(base_url=api.base_url) as other:  # another site's form has no cookie of this browser
        assert other.post("/login", data=form).status_code == 403
    assert nobody.post("/login", data=form | {"token": "shoal_guess"}).status_code == 401
    entered = nobody.post("/login", data=form | {"next": "//evil.example/\r\nSet-Cookie: a=b"})
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert ok(nobody.get("/v1/me"))["name"] == "someone"
    assert nobody.get("/nodes").status_code == 200
    actions = [(each["action"], each["outcome"]) for each in ok(api.get("/v1/audit-events"))["items"]]
    assert actions[:2] == [("sign_in.token", "done"), ("sign_in.token", "refused")]


def test_what_was_refused_is_recorded_with_its_code(api: httpx.Client) -> None:
    members, as_json = "/v1/projects/default/members", {"Content-Type": "application/json"}
    refusals: list[tuple[str, dict[str, Any], str, str]] = [
        (members, {"json": {"email": "nobody", "role": "viewer"}}, "member.add", "invalid_field"),
        (members, {"json": {"role": "king"}}, "member.add", "invalid_field"),
        ("/v1/projects", {"json": {"id": "default"}}, "project.create", "project_exists"),
        ("/v1/jobs", {"content": b"{", "headers": as_json}, "job.create", "malformed_body"),
        ("/new", {"data": {"job": "["}}, "job.create", "malformed_body"),
    ]
    for path, sent, action, code in refusals:
        refused = api.post(path, **sent)
        newest = ok(api.get("/v1/audit-events"))["items"][0]
        found = (newest["action"], newest["status"], newest["code"])
        assert found == (action, refused.status_code, code), path
        assert refused.is_client_error


def test_guesses_are_slowed_down_and_others_are_not(api: httpx.Client, nobody: httpx.Client) -> None:
    known = bearer(make_token(api, project="default")["secret"])
    fresh = bearer(make_token(api, project="default")["secret"])
    ok(nobody.get("/v1/me", headers=known))
    answers = [nobody.get("/v1/me", headers=bearer(f"shoal_{number}")) for number in range(40)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[:20] == [401] * 20 and 429 in statuses
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["code"] == "too_many_guesses" and int(refused.headers["retry-after"]) >= 1
    ok(nobody.get("/v1/me", headers=known))
    ok(api.get("/v1/me"))
    assert nobody.get("/v1/me", headers=bearer("shoal_more")).status_code == 429
    ok(nobody.get("/v1/me", headers=fresh))  # it was never seen, and it is right


def test_guesses_are_counted_by_network_and_forgotten_with_time() -> None:
    now_s = 1000.0
    guesses = Guesses(clock_s=lambda: now_s)
    for number in range(20):
        guesses.check("token", f"2001:db8::{number:x}", "h")
        guesses.wrong("token", f"2001:db8::{number:x}", "h")
    with pytest.raises(TooManyGuesses, match="ask again in 3 s"):
        guesses.check("token", "2001:db8::ffff", "h")
    guesses.check("token", "2001:db8:1::1", "h")
    guesses.check("login", "2001:db8::1", "h")
    now_s += 2.9
    with pytest.raises(TooManyGuesses, match="ask again in 1 s") as soon:
        guesses.check("token", "2001:db8::ffff", "h")
    assert soon.value.extra == {"retry_after_s": 1}
    now_s += 0.2
    guesses.check("token", "2001:db8::ffff", "h")
    guesses.right("mine")
    for _ in range(40):
        guesses.wrong("token", "10.0.0.1", "h")
    guesses.check("token", "10.0.0.1", "mine")
    with pytest.raises(TooManyGuesses):
        guesses.check("token", "10.0.0.1", "h")


class _Named(dict[str, str]):
    """Whatever else a path names, it names `this`: a form is refused before anyone looks for that."""

    def __missing__(self, key: str) -> str:
        return "this"


def test_no_page_takes_a_form_without_its_token(api: httpx.Client, nobody: httpx.Client) -> None:
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    enter(nobody, ok(api.post("/v1/login-links"))["url"])
    posts = [route.removeprefix("POST ") for route in RULES if route.startswith("POST /") and "/v1/" not in route]
    assert len(posts) >= 4
    for path in posts:
        for form in ({}, {"csrf": ""}, {"csrf": "wrong"}):
            refused = nobody.post(path.format_map(_Named(job_id=job_id, project_id="default")), data=form or {"x": "y"})
            assert (refused.status_code, refused.json()["code"]) == (403, "csrf"), path
    assert ok(nobody.get("/v1/me"))["server_admin"] and ok(api.get(f"/v1/jobs/{job_id}"))["wish"] == "run"


@pytest.mark.parametrize(
    "path", ["/v1/jobs/..%2f..%2fme", "/v1/jobs/job_1%00", "/v1/jobs/%0d%0aSet-Cookie:a=b", "/v1//jobs"]
)
def test_odd_paths_lead_nowhere(api: httpx.Client, path: str) -> None:
    answer = api.get(path)
    assert answer.status_code == 404 and "set-cookie" not in answer.headers


def test_files_beside_the_pages_own_are_not_served(app: FastAPI, api: httpx.Client) -> None:
    for path in ("/static/../auth.py", "/static/..%2fauth.py", "/static/%2e%2e/auth.py", "/static//etc/passwd"):
        assert api.get(path).status_code == 404, path
