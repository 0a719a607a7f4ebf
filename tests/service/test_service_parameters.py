"""Parameters of queries: what a route does not have is refused by name, and pages say what is wrong as pages."""

from __future__ import annotations

import re

import httpx
import pytest
from control_plane import job_mapping, ok

PAGE = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_a_parameter_that_a_route_does_not_have_is_refused_by_every_route_of_the_api(api: httpx.Client) -> None:
    described = ok(api.get("/openapi.json"))["paths"]
    asked = 0
    for path, operations in ((path, each) for path, each in described.items() if path.startswith("/v1/")):
        for method, operation in operations.items():
            known = sorted(each["name"] for each in operation.get("parameters", ()) if each["in"] == "query")
            place = re.sub(r"\{(\w+)\}", "x", path).replace("/v1/clusters/x", "/v1/clusters/local")
            if "{job_id}" in path:
                place = place.replace("/v1/jobs/x", f"/v1/jobs/{job_of(api)}")
            if "{project_id}" in path:
                place = place.replace("/v1/projects/x", "/v1/projects/default")
            answer = api.request(method.upper(), place, params={"verbos": "1"})
            said = answer.json()
            assert (answer.status_code, said["code"], said["param"]) == (422, "unknown_parameter", "verbos"), path
            listed = f"It has: {', '.join(known)}" if known else "this route, which has none"
            assert said["detail"].startswith("verbos: is no parameter of this route") and listed in said["detail"], path
            asked += 1
    assert asked > 60


_JOBS: dict[str, str] = {}


def job_of(api: httpx.Client) -> str:
    """One for each server."""
    server = str(api.base_url)
    if server not in _JOBS:
        _JOBS[server] = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    return _JOBS[server]


def test_one_that_is_spelt_wrong_is_told_how_it_is_spelt(api: httpx.Client) -> None:
    refused = api.get("/v1/jobs", params={"limt": "5"})
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    detail = refused.json()["detail"]
    assert "limt: is no parameter of this route; limit is. It has: " in detail and "cursor" in detail
    assert len(api.get("/v1/jobs", params={"x" * 5000: "1"}).json()["detail"]) < 1000


def test_the_character_nul_is_refused_by_the_name_of_where_it_stands(api: httpx.Client) -> None:
    for place, param in (
        ("/v1/jobs?project=%00", "project"),
        ("/v1/audit-events?action=a%00", "action"),
        ("/v1/pool-events?job_id=%00", "job_id"),
        ("/v1/clusters/%00", "cluster_id"),
        ("/v1/jobs?label=a&label=b%00", "label"),
    ):
        refused = api.get(place)
        assert (refused.status_code, refused.json()["param"]) == (422, param), place
        assert refused.json()["detail"].startswith(f"{param} = ") and "NUL" in refused.json()["detail"], place
    assert api.post("/v1/nodes/a%00b/preempt", json={}).json()["param"] == "node_id"
    newest = ok(api.get("/v1/audit-events", params={"action": "node.preempt"}))["items"][0]
    assert (newest["target"], newest["status"], newest["code"]) == ("a?b", 422, "invalid_field")


def test_who_may_not_ask_learns_nothing_of_parameters(api: httpx.Client) -> None:
    answer = httpx.get(f"{api.base_url}/v1/jobs", params={"limt": "5"})
    assert answer.status_code == 401


@pytest.mark.parametrize("query", ["window=2h", "epoch=x", "step=-1", "complete=perhaps"])
def test_a_page_says_what_is_wrong_with_its_address_as_a_page(api: httpx.Client, query: str) -> None:
    path = f"/jobs/{job_of(api)}?{query}"
    page = api.get(path, headers=PAGE)
    assert (page.status_code, page.headers["content-type"]) == (422, "text/html; charset=utf-8")
    assert query.partition("=")[0].capitalize() in page.text and "<html" in page.text
    assert page.headers["content-security-policy"]
    program = api.get(path)
    assert (program.status_code, program.headers["content-type"]) == (422, "application/problem+json")


def test_what_others_append_to_the_address_of_a_page_does_no_harm(api: httpx.Client) -> None:
    assert api.get("/?utm_source=chat", headers=PAGE).status_code == 200


def test_a_kind_of_entry_that_there_is_not_is_refused(api: httpx.Client) -> None:
    path = f"/v1/jobs/{job_of(api)}/events"
    assert ok(api.get(path, params={"kind": ["step_done", "node_lost"]}))["items"] == []
    refused = api.get(path, params={"kind": ["step_done", "nodelost"]})
    assert (refused.status_code, refused.json()["param"]) == (422, "kind")
    assert "'nodelost': must be one of" in refused.json()["detail"] and "node_lost" in refused.json()["detail"]
