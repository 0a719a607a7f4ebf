"""Heartbeats of nodes: told by connectors, kept with clusters, shown by REST, pages and the command line."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, snapshot, story

from shoal.cli_nodes import show_nodes
from shoal_planner.cluster import snapshot_to_mapping
from shoal_service import signs
from shoal_service.panels_nodes import nodes_panel
from shoal_service.timeline import Event


def renew(connector: Connector, told: list[dict[str, Any]] | None) -> httpx.Response:
    body = {
        "holder": connector.holder,
        "snapshot": snapshot_to_mapping(connector.cluster),
        "lease_s": 60,
        **({} if told is None else {"signs": told}),
    }
    return connector.http.put(f"/v1/clusters/{connector.cluster_id}", json=body)


def test_what_is_kept_of_signs_of_life() -> None:
    assert signs.taken(None, {}, 100.0) is None
    kept = signs.taken(None, {"a": (0.5, "processes"), "b": (0.0, "ray")}, 100.0)
    assert kept == {"a": [99.5, "processes"], "b": [100.0, "ray"]}
    later = signs.taken(kept, {"a": (0.1, "processes")}, 120.0)
    assert later == {"a": [119.9, "processes"], "b": [100.0, "ray"]}, "that nobody tells of it is news, too"
    assert signs.taken(later, {"a": (0.1, "processes")}, 3720.0) == {"a": [3719.9, "processes"]}
    last = signs.sign(later, "b")
    assert last is not None and (last.age_s(103.0), last.is_silent(103.0), last.is_silent(111.0)) == (3.0, False, True)
    assert signs.sign(None, "a") is None and signs.sign(later, "c") is None


def test_nodes_tell_when_they_were_last_heard(
    api: httpx.Client, connector: Connector, capsys: pytest.CaptureFixture[str]
) -> None:
    ok(renew(connector, None))
    found = {node["id"]: node for node in ok(api.get("/v1/nodes"))["items"]}
    assert {(node["heard_at"], node["heard_by"]) for node in found.values()} == {(None, None)}
    before_s = time.time()
    ok(
        renew(
            connector,
            [
                {"node": "big-0", "age_s": 0.05, "by": "processes"},
                {"node": "spot-1", "age_s": 40.0, "by": "processes"},
                {"node": "spot-0", "age_s": 0.0, "by": "ray"},
            ],
        )
    )
    items = ok(api.get("/v1/nodes"))["items"]
    heard = {node["id"]: (signs.sign_of(node), node["heard_by"]) for node in items}
    assert heard["big-1"] == (None, None)
    assert [heard[name][1] for name in ("big-0", "spot-1", "spot-0")] == ["processes", "processes", "ray"]
    for name, age_s in (("big-0", 0.05), ("spot-1", 40.0)):
        last = heard[name][0]
        assert last is not None and before_s - age_s - 0.01 <= last.at_s <= time.time() - age_s + 0.01
    page = api.get("/nodes").text
    assert "Last sign of life" in page and '<span class="chip state-waiting">silent</span> 40' in page
    show_nodes(items)
    lines = capsys.readouterr().out.splitlines()
    assert "HEARD" in lines[0] and any("spot-1" in line and "40." in line for line in lines)
    assert any("spot-0" in line and "(Ray)" in line for line in lines)


@pytest.mark.parametrize(
    ("sign", "param"),
    [
        ({"node": "big-0", "age_s": -1.0, "by": "ray"}, "signs[0].age_s"),
        ({"node": "big-0", "age_s": 1.0, "by": "rumour"}, "signs[0].by"),
        ({"node": "", "age_s": 1.0, "by": "ray"}, "signs[0].node"),
    ],
)
def test_signs_that_are_none_are_refused(
    api: httpx.Client, connector: Connector, sign: dict[str, Any], param: str
) -> None:
    refused = renew(connector, [sign])
    assert (refused.status_code, refused.json()["param"]) == (422, param)


def test_the_panel_of_nodes_names_who_is_silent_for_the_longest_time() -> None:
    told = story(job_mapping(), started_at_s=1000.0)
    events = [
        Event(seq=entry.seq, at_s=entry.at_s, kind=entry.event.kind, payload=_payload(entry.event))
        for entry in told.entries
    ]
    kept = {"spot-0": [1030.0, "processes"], "spot-1": [1001.0, "processes"], "big-0": [1031.0, "ray"]}
    shown = nodes_panel(events, told.now_s, heard=kept)
    assert {node.id: node.sign.at_s if node.sign else None for node in shown.nodes} == {
        "big-0": 1031.0,
        "big-1": None,
        "spot-0": 1030.0,
        "spot-1": 1001.0,
    }
    assert {group.name: group.longest.at_s if group.longest else None for group in shown.groups} == {
        "1 x T4": 1001.0,
        "2 x A100-80G": 1031.0,
    }
    assert snapshot().node("spot-1").spot


def _payload(event: Any) -> dict[str, Any]:
    return dataclasses.asdict(event)
