"""Every role on every route, from a table: what may be asked by whom, and how all others are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story
from fastapi import FastAPI
from fastapi.routing import APIRoute, _iter_routes_with_context

from shoal_service.gate import is_open
from shoal_service.rules import RULES

# A: holds admin.token. V, M, P: viewer, member and admin of the project that the job belongs to. O: admin of another
# project. C: the connector of the cluster that has the job. F: that of another cluster. S: a scraper of metrics.
EVERYBODY, HUMANS = "AVMPOCF", "AVMPO"
READS, CHANGES = "AVMP", "AMP"

ROUTES: Mapping[str, tuple[str, Any]] = {
    "POST /v1/jobs": ("AMPO", job_mapping()),
    "GET /v1/jobs": (HUMANS, None),
    "GET /v1/jobs/{job_id}": (READS + "C", None),
    "GET /v1/jobs/{job_id}/events": (READS + "C", None),
    "GET /v1/jobs/{job_id}/metrics": (READS, None),
    "GET /v1/jobs/{job_id}/plan": (READS, None),
    "GET /v1/jobs/{job_id}/plan.svg": (READS, None),
    "GET /v1/jobs/{job_id}/recoveries": (READS, None),
    "GET /v1/jobs/{job_id}/bulk-losses": (READS, None),
    "GET /v1/jobs/{job_id}/checkpoints": (READS, None),
    "GET /v1/jobs/{job_id}/cost": (READS, None),
    "POST /v1/jobs/{job_id}/pause": (CHANGES, None),
    "POST /v1/jobs/{job_id}/resume": (CHANGES, None),
    "POST /v1/jobs/{job_id}/cancel": (CHANGES, None),
    "POST /v1/jobs/{job_id}/clone": (CHANGES, None),
    "POST /v1/jobs/{job_id}/checkpoint": (CHANGES, None),
    "POST /v1/jobs/{job_id}/limits": (CHANGES, {"max_devices": 3}),
    "POST /v1/jobs/{job_id}/resize": (CHANGES, {"max_devices": 4}),
    "GET /v1/jobs/{job_id}/attempts": (READS, None),
    "GET /v1/jobs/{job_id}/logs": (READS, None),
    "POST /v1/jobs/{job_id}/logs": ("AC", {}),
    "POST /v1/jobs/{job_id}/journal": ("AC", {"cluster_id": "local", "holder": "connector-1", "entries": []}),
    "GET /v1/jobs/{job_id}/debug-dump": (CHANGES, None),
    "POST /v1/plans": ("AMPO", {"job": {}}),
    "GET /v1/clusters": (HUMANS, None),
    "GET /v1/clusters/{cluster_id}": (HUMANS + "C", None),
    "GET /v1/clusters/{cluster_id}/wishes": ("AC", None),
    "PUT /v1/clusters/{cluster_id}": ("AC", {"holder": "connector-2", "snapshot": {}, "lease_s": 1}),
    "GET /v1/nodes": (HUMANS, None),
    "GET /v1/prices": (HUMANS, None),
    "GET /v1/spending": (HUMANS, None),
    "GET /v1/drills": (HUMANS, None),
    "GET /v1/drill-history": (HUMANS, None),
    "GET /v1/pools": (HUMANS, None),
    "GET /v1/pool-events": (HUMANS, None),
    "POST /v1/nodes/{node_id}/preempt": ("A", {"notice_s": 1}),
    "POST /v1/login-links": (HUMANS, None),
    "GET /v1/me": (EVERYBODY, None),
    "GET /v1/projects": (HUMANS, None),
    "POST /v1/projects": ("A", {"id": "default"}),
    "GET /v1/projects/{project_id}": (READS, None),
    "DELETE /v1/projects/{project_id}": ("A", None),
    "GET /v1/projects/{project_id}/members": (READS, None),
    "POST /v1/projects/{project_id}/members": ("AP", {"email": "new@example.org", "role": "viewer"}),
    "PUT /v1/projects/{project_id}/members/{user_id}": ("AP", {"role": "viewer"}),
    "DELETE /v1/projects/{project_id}/members/{user_id}": ("AP", None),
    "GET /v1/projects/{project_id}/storages": (READS, None),
    "GET /v1/projects/{project_id}/storages/{name}": (READS, None),
    "PUT /v1/projects/{project_id}/storages/{name}": ("A", {"region": "eu-1"}),
    "DELETE /v1/projects/{project_id}/storages/{name}": ("A", None),
    "GET /v1/users": ("A", None),
    "PATCH /v1/users/{user_id}": ("A", {"server_admin": False}),
    "DELETE /v1/users/{user_id}": ("A", None),
    "GET /v1/tokens": (HUMANS, None),
    "POST /v1/tokens": ("AP", {"name": "x", "role": "viewer", "project": "default"}),
    "DELETE /v1/tokens/{token_id}": ("A", None),
    "GET /v1/audit-events": ("APO", None),
    "GET /v1/webhooks": ("APO", None),
    "POST /v1/webhooks": ("AP", {"url": "https://hooks.example.invalid", "project": "default"}),
    "GET /v1/webhooks/{webhook_id}": ("AP", None),
    "PATCH /v1/webhooks/{webhook_id}": ("AP", {"enabled": True}),
    "DELETE /v1/webhooks/{webhook_id}": ("AP", None),
    "POST /v1/webhooks/{webhook_id}/secret": ("AP", None),
    "POST /v1/webhooks/{webhook_id}/ping": ("AP", None),
    "GET /v1/webhooks/{webhook_id}/deliveries": ("AP", None),
    "POST /v1/webhooks/{webhook_id}/deliveries/{delivery_id}/retry": ("AP", None),
    "GET /metrics": (HUMANS + "S", None),
    "GET /": (HUMANS, None),
    "GET /nodes": (HUMANS, None),
    "GET /jobs/{job_id}": (READS, None),
    "POST /jobs/{job_id}/pause": (CHANGES, None),
    "POST /jobs/{job_id}/resume": (CHANGES, None),
    "POST /jobs/{job_id}/cancel": (CHANGES, None),
    "POST /jobs/{job_id}/checkpoint": (CHANGES, None),
    "POST /jobs/{job_id}/limits": (CHANGES, None),
    "GET /tokens": (HUMANS, None),
    "POST /tokens": ("AVMPO", None),
    "POST /tokens/{token_id}/revoke": ("A", None),
    "GET /projects": (HUMANS, None),
    "POST /projects": ("A", None),
    "GET /projects/{project_id}": (READS, None),
    "POST /projects/{project_id}/members": ("AP", None),
    "POST /projects/{project_id}/members/{user_id}": ("AP", None),
    "POST /projects/{project_id}/members/{user_id}/remove": ("AP", None),
    "GET /jobs/{job_id}/panels/{name}": (READS, None),
    "GET /jobs/{job_id}/compare": (READS, None),
    "GET /new": ("AMPO", None),
    "POST /new/preview": ("AMPO", None),
    "POST /new": ("AMPO", None),
    "POST /nodes/{node_id}/preempt": ("A", None),
    "POST /sign-out": (HUMANS, None),
    # These never end: they are asked of last, and only by those who are refused.
    "GET /stream": (HUMANS, None),
    "GET /jobs/{job_id}/stream": (READS, None),
}
# Refused before it is asked which project is meant.
OF_THE_SERVER = (
    "DELETE /v1/projects/{project_id}",
    "PUT /v1/projects/{project_id}/storages/{name}",
    "DELETE /v1/projects/{project_id}/storages/{name}",
)
_REFUSALS = {
    "unauthorized",
    "role",
    "no_rule",
    "wrong_cluster",
    "job_not_found",
    "project_not_found",
    "token_not_found",
    "webhook_not_found",
}


@dataclass(frozen=True, kw_only=True)
class World:
    api: httpx.Client
    askers: Mapping[str, httpx.Client]
    ids: Mapping[str, str]

    def path(self, template: str) -> str:
        return template.format(**self.ids)


def token_of(api: httpx.Client, **what: Any) -> dict[str, Any]:
    made: dict[str, Any] = ok(api.post("/v1/tokens", json={"name": "test", **what}))
    return made


@pytest.fixture
def world(api: httpx.Client) -> Iterator[World]:
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]  # before there are clusters: the first one gets it
    ok(Connector(http=api).renew())
    ok(Connector(http=api, cluster_id="elsewhere", holder="connector-9").renew())
    ok(Connector(http=api).send(job_id, story(job_mapping(), started_at_s=1e9).entries[:6]))
    ok(api.post("/v1/projects", json={"id": "other"}))
    user = ok(api.post("/v1/projects/default/members", json={"email": "Some.One@example.org", "role": "member"}))
    secrets = {
        "A": api.headers["Authorization"].removeprefix("Bearer "),
        "V": token_of(api, role="viewer", project="default")["secret"],
        "M": token_of(api, role="member", project="default")["secret"],
        "P": token_of(api, role="admin", project="default")["secret"],
        "O": token_of(api, role="admin", project="other")["secret"],
        "C": token_of(api, role="connector", cluster_id="local")["secret"],
        "F": token_of(api, role="connector", cluster_id="elsewhere")["secret"],
        "S": token_of(api, role="metrics")["secret"],
    }
    hook = ok(api.post("/v1/webhooks", json={"url": "https://hooks.example.invalid", "events": ["job.failed"]}))["id"]
    ids = {
        "job_id": job_id,
        "node_id": "big-0",
        "name": "head",
        "cluster_id": "local",
        "project_id": "default",
        "user_id": user["user_id"],
        "token_id": token_of(api, role="server_admin")["id"],
        "webhook_id": hook,
        "delivery_id": ok(api.post(f"/v1/webhooks/{hook}/ping"))["id"],
    }
    with ExitStack() as stack:
        askers = {
            who: stack.enter_context(
                httpx.Client(base_url=api.base_url, headers={"Authorization": f"Bearer {secret}"}, timeout=60)
            )
            for who, secret in secrets.items()
        }
        yield World(api=api, askers=askers, ids=ids)


def routes_of(app: FastAPI) -> set[str]:
    found = set()
    for route, context in _iter_routes_with_context(app.router.routes):
        path = route.path if context is None else context.path  # type: ignore[attr-defined]
        if isinstance(route, APIRoute) and not is_open(path):
            found |= {f"{method} {path}" for method in route.methods}
    return found


def test_every_route_has_a_rule_and_a_row_here(app: FastAPI) -> None:
    routes = routes_of(app)
    assert len(routes) > 40
    assert routes == set(RULES), "add the route to shoal_service/rules.py"
    assert routes == set(ROUTES), "say here who may ask"


def test_every_role_on_every_route(world: World) -> None:
    """Those who may are not refused, whatever else is wrong with what they ask; all others are, each in one way."""
    asked = 0
    # What takes something away comes last, streams (which never end) are asked for by those alone who are refused.
    for route in sorted(ROUTES, key=lambda route: (route.startswith("DELETE"), "sign-out" in route)):
        allowed, body = ROUTES[route]
        method, template = route.split(" ")
        for who, asker in world.askers.items():
            if template.endswith("stream") and who in allowed:
                continue
            answer = asker.request(method, world.path(template), json=body)
            code = (
                answer.json()["code"]
                if not answer.is_success and "json" in answer.headers.get("content-type", "")
                else None
            )
            taken_away = method == "DELETE" and who in allowed  # by somebody who asked before
            refused = answer.status_code in (401, 403) or (code in _REFUSALS and not taken_away)
            assert refused == (who not in allowed), (route, who, answer.status_code, answer.text[:300])
            if refused:
                assert answer.status_code == expected_status(who, route), (route, who, answer.text[:300])
            assert answer.status_code < 500, (route, who, answer.text)
            asked += 1
    assert asked > 300


def expected_status(who: str, route: str) -> int:
    """What is in a foreign project does not exist; who may too little there is told so."""
    template = route.partition(" ")[2]
    hidden = ("{job_id}", "{project_id}", "{webhook_id}")
    brought = route in ("POST /v1/jobs/{job_id}/journal", "POST /v1/jobs/{job_id}/logs")
    if who == "O" and not brought and route not in OF_THE_SERVER:
        if template in ("/v1/tokens", "/v1/webhooks") or any(name in template for name in hidden):
            return 404
    if "{token_id}" in template:
        return 404 if who not in "CFS" else 403
    if who == "F" and (brought or route in ("GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/events")):
        return 409
    return 403
