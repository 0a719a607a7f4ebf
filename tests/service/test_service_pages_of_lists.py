"""Lists about clusters come in pages, and no answer about a cluster of a thousand nodes is too large."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok

from shoal import client_people, client_storages, client_webhooks
from shoal.client import Client
from shoal_planner.cluster import parse_cluster
from shoal_service.answers import MAX_ANSWER_BYTES

NODES = [
    {"name": f"n{index:04}-{'x' * 30}", "device": "T4", "devices": 1, "zone": f"zone-{index % 7}", "spot": True}
    for index in range(1000)
]


def pages(api: httpx.Client, path: str, **params: Any) -> list[Any]:
    """All items, one page after the other, each of which may be answered."""
    found: list[Any] = []
    cursor = None
    while True:
        answer = api.get(path, params={**params, **({"cursor": cursor} if cursor else {})})
        assert len(answer.content) <= MAX_ANSWER_BYTES
        page = ok(answer)
        assert len(page["items"]) <= params.get("limit", 500)
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def test_a_large_cluster_is_answered_in_pages(api: httpx.Client) -> None:
    large = Connector(http=api, cluster_id="large", holder="h", cluster=parse_cluster({"nodes": NODES}))
    ok(large.renew())
    ok(Connector(http=api).renew())
    answer = api.get("/v1/clusters/large")
    assert len(answer.content) <= MAX_ANSWER_BYTES
    found = ok(answer)
    assert found["num_nodes"] == 1000 and "nodes" not in found["snapshot"] and "profile" in found
    listed = pages(api, "/v1/nodes", cluster_id="large", limit=500)
    assert len({node["id"] for node in listed}) == 1000 and {node["cluster_id"] for node in listed} == {"large"}
    with Client(str(api.base_url), api.headers["Authorization"].removeprefix("Bearer ")) as client:
        assert len(client.nodes("local")) == 4 and len(client.clusters()) == 2


def test_lists_have_cursors(api: httpx.Client) -> None:
    ok(Connector(http=api).renew())
    ok(Connector(http=api, cluster_id="other", holder="h").renew())
    for node in ("big-0", "big-1", "spot-0"):
        ok(api.post(f"/v1/nodes/{node}/preempt", json={"notice_s": 600, "cluster_id": "local"}))
    for path, count in (("/v1/clusters", 2), ("/v1/prices", 4), ("/v1/drills", 3)):
        whole = pages(api, path)
        assert len(whole) == count
        assert pages(api, path, limit=1) == whole
        refused = api.get(path, params={"cursor": "WzEsWzJdXQ"})
        assert (refused.status_code, refused.json()["param"]) == (422, "cursor")
        mixed = api.get(path, params={"cursor": "WzFd"})  # a key of another list
        assert (mixed.status_code, mixed.json()["param"]) == (422, "cursor")


@pytest.mark.parametrize("max_points", [451, 10_000])
def test_more_points_than_an_answer_holds_are_refused(api: httpx.Client, max_points: int) -> None:
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    refused = api.get(f"/v1/jobs/{job_id}/metrics", params={"max_points": max_points})
    assert (refused.status_code, refused.json()["param"]) == (422, "max_points")
    assert f"max_points = '{max_points}'" in refused.json()["detail"] and "450" in refused.json()["detail"]


def test_lists_of_people_and_their_things_have_cursors(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["alpha", "beta", "gamma"]
    for name in names:
        ok(api.post("/v1/projects", json={"id": name}))
        member = {"email": f"{name}@example.com", "role": "viewer"}
        ok(api.post("/v1/projects/alpha/members", json=member))
        ok(api.put(f"/v1/projects/alpha/storages/{name}", json={"region": "eu-1"}))
        ok(api.post("/v1/webhooks", json={"url": f"https://{name}.example.com/told", "project": "alpha"}))
    lists = {
        "/v1/projects": ("id", ["alpha", "beta", "default", "gamma"]),
        "/v1/projects/alpha/members": ("email", [f"{name}@example.com" for name in names]),
        "/v1/projects/alpha/storages": ("name", names),
        "/v1/webhooks": ("url", [f"https://{name}.example.com/told" for name in names]),
    }
    for path, (field, expected) in lists.items():
        whole = pages(api, path, limit=50)
        assert [each[field] for each in whole] == expected
        assert pages(api, path, limit=1) == whole == pages(api, path, limit=2)
        refused = api.get(path, params={"cursor": "../"})
        assert (refused.status_code, refused.json()["param"]) == (422, "cursor")
    for module in (client_people, client_storages, client_webhooks):
        monkeypatch.setattr(module, "_PAGE", 2)
    with Client(str(api.base_url), api.headers["Authorization"].removeprefix("Bearer ")) as client:
        assert [each["id"] for each in client.people.projects()] == lists["/v1/projects"][1]
        assert len(client.people.members("alpha")) == len(client.storages("alpha").list()) == 3
        assert [each["url"] for each in client.webhooks.all()] == lists["/v1/webhooks"][1]
