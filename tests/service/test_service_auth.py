"""Who is let in: the token, sign-in links, sessions, forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, enter, job_mapping, ok, story
from fastapi.routing import APIRoute

from shoal_service import (
    api_clusters,
    api_history,
    api_jobs,
    api_plans,
    pages,
    pages_fleet,
    pages_job,
    pages_submit,
    streams,
)
from shoal_service.auth import admin_token
from shoal_service.gate import is_open


@pytest.fixture
def stranger(api: httpx.Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.base_url, timeout=30) as client:
        yield client


def test_strangers_are_told_to_sign_in(stranger: httpx.Client) -> None:
    refused = stranger.get("/v1/jobs")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["code"] == "unauthorized"
    assert stranger.get("/v1/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert stranger.get("/v1/jobs", headers={"Authorization": "Basic eDp5"}).status_code == 401
    assert stranger.get("/v1/jobs", headers={"Cookie": "shoal_session=guess"}).status_code == 401
    page = stranger.get("/", headers={"Accept": "text/html"})
    assert page.status_code == 401 and "shoal sign-in" in page.text


def test_every_route_but_a_few_asks(stranger: httpx.Client) -> None:
    asked = 0
    modules = (api_clusters, api_history, api_jobs, api_plans, pages, pages_fleet, pages_job, pages_submit, streams)
    for route in [route for module in modules for route in module.router.routes]:
        if not isinstance(route, APIRoute) or is_open(route.path):
            continue
        for method in route.methods:
            assert stranger.request(method, route.path).status_code == 401, (method, route.path)
            asked += 1
    assert asked > 20
    for path in ("/healthz", "/v1/health", "/static/shoal.css", "/openapi.json"):
        assert stranger.get(path).status_code == 200


def test_a_sign_in_link_works_once(api: httpx.Client, stranger: httpx.Client) -> None:
    link = ok(api.post("/v1/login-links"))["url"]
    shown = stranger.get(link)
    assert shown.status_code == 200 and "<button autofocus>Sign in" in shown.text and 'name="token"' not in shown.text
    entered = enter(stranger, link)
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert stranger.get("/").status_code == 200
    link_to_job = ok(api.post("/v1/login-links"))["url"] + "&next=/jobs/job_1"
    assert stranger.get(link_to_job.replace("/jobs/", "//evil.example/")).status_code == 422
    assert enter(stranger, link_to_job).headers["location"] == "/jobs/job_1"
    with httpx.Client(base_url=api.base_url) as other:
        assert enter(other, link).status_code == 401
        assert enter(other, "/login?code=guess").status_code == 401
        assert other.get("/v1/jobs").status_code == 401


def test_to_look_at_a_sign_in_link_does_not_use_it_up(api: httpx.Client, stranger: httpx.Client) -> None:
    """As programs do that messages go through, with cookies and without."""
    link = ok(api.post("/v1/login-links"))["url"]
    for _ in range(3):
        with httpx.Client(base_url=api.base_url) as program:
            for looked in (program.get(link), program.head(link), program.get(link)):
                assert looked.status_code in (200, 405)
            assert "shoal_session" not in program.cookies
            code = link.partition("code=")[2]
            assert httpx.post(f"{api.base_url}/login", data={"code": code}).status_code == 403, "not from that page"
    assert enter(stranger, link).status_code == 303
    assert stranger.get("/v1/jobs").status_code == 200


def test_forms_and_calls_of_a_page_need_its_token(api: httpx.Client, stranger: httpx.Client) -> None:
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    enter(stranger, ok(api.post("/v1/login-links"))["url"])
    page = stranger.get(f"/jobs/{job_id}").text
    token = re.findall(r'name="csrf" value="([0-9a-f]+)"', page)[0]
    assert stranger.get("/v1/jobs").status_code == 200
    assert stranger.post(f"/v1/jobs/{job_id}/cancel").json()["code"] == "csrf"
    assert stranger.post(f"/jobs/{job_id}/cancel", data={"csrf": "wrong"}).status_code == 403
    assert stranger.post(f"/jobs/{job_id}/cancel", data={}).status_code == 403
    assert ok(api.get(f"/v1/jobs/{job_id}"))["wish"] == "run"
    done = stranger.post(f"/jobs/{job_id}/cancel", data={"csrf": token})
    assert (done.status_code, done.headers["location"]) == (303, f"/jobs/{job_id}")
    assert ok(api.get(f"/v1/jobs/{job_id}"))["wish"] == "cancelled"
    assert stranger.post(f"/v1/jobs/{job_id}/cancel", headers={"X-CSRF-Token": token}).status_code == 200
    assert stranger.post("/sign-out", data={"csrf": token}).status_code == 303
    assert stranger.get("/v1/jobs").status_code == 401


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "admin.token").write_text("")
    with pytest.raises(ValueError, match="holds no token"):
        admin_token(tmp_path)


def test_pages_are_complete_without_scripts(
    api: httpx.Client, connector: Connector, eventually: Callable[..., Any]
) -> None:
    job_id = ok(api.post("/v1/jobs", json=job_mapping(name="<b>bold</b>")))["id"]
    assert "No cluster has connected yet" in api.get("/nodes").text
    ok(connector.renew())
    ok(connector.send(job_id, story(job_mapping(), started_at_s=1e9).entries))
    page = api.get(f"/jobs/{job_id}")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    text = page.text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text and "<b>bold</b>" not in text
    for words in (
        "succeeded",
        "All 60 steps are done",
        "layers 0-6",
        "big-0:0,1",
        "2 samples of each micro-batch",
        "spot-1 was lost: its connection closed",
        "131 ms",
        "pipeline 0, stage 0: embedding",
        "What changed from epoch 2",
        "steps that count",
        "peer <b>12.9 MB, 1 GB/s</b>",
        "agent of spot-0: 000001-2, step 20",
        "not used: what came is not what was sealed. Instead: agent of big-0",
        "0123456789ab to ba9876543210",
        "epoch 2",
    ):
        assert words in text, words
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    older = api.get(f"/jobs/{job_id}", params={"epoch": 2}).text
    assert "not the current plan" in older and "spot-1:0 (T4" not in older and "Gone: <span" in older
    assert "big-0" in api.get("/nodes").text
    assert job_id in api.get("/").text
    missing = api.get("/jobs/job_x", headers={"Accept": "text/html"})
    assert missing.status_code == 404 and "there is no such job" in missing.text
