"""Plans beside each other: what each would cost and what binds it; and what the map of a plan says of nodes."""

from __future__ import annotations

import time

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, snapshot, story

from shoal_planner.cluster import snapshot_to_mapping
from shoal_planner.job import parse_job
from shoal_planner.plan import plan_to_mapping
from shoal_planner.search import plan
from shoal_service.compared_plans import compared_plans
from shoal_service.plan_map import plan_map


def test_plans_are_compared_by_seconds_dollars_and_what_binds_them() -> None:
    job, given = parse_job(job_mapping()), snapshot_to_mapping(snapshot())
    result = plan(job, snapshot())
    found = compared_plans(result, job, given, {})
    assert [each.words for each in found] == [words for words, _ in result.candidates]
    first, second = found[0], found[1]
    step_s = result.candidates[0][1]
    per_hour = 2 * 7.3 + 2 * 0.2
    assert first.usd_per_million_tokens == pytest.approx(per_hour / 3600 * step_s / 256 * 1e6)
    assert first.behind == 0.0 <= second.behind
    assert all(each.binds for each in found)
    nodes = [{**node, "price_per_hour": 0.0} if node["id"] == "spot-1" else node for node in given["nodes"]]
    unknown = compared_plans(result, job, {**given, "nodes": nodes}, {})
    assert {each.usd_per_million_tokens for each in unknown} == {None}


def test_the_page_shows_them_when_asked(api: httpx.Client, connector: Connector) -> None:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(connector.renew())
    ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time() - 60).entries[:-1]))
    found = api.get(f"/jobs/{job_id}/compare", headers={"Accept": "text/html"}, timeout=60).text
    assert "What binds it" in found and "$ per million tokens" in found and "best first" in found
    page = api.get(f"/jobs/{job_id}/panels/plan", headers={"Accept": "text/html"}).text
    assert "with the job for" in page and "of it bubbles of pipelines" in page


def test_the_map_tells_who_waits_and_for_how_long_nodes_are_there() -> None:
    job = parse_job(job_mapping())
    result = plan(job, snapshot())
    given = [[0.5 + 0.5 * number for number in range(len(each.stages))] for each in result.plan.pipelines]
    drawn = plan_map(plan_to_mapping(result.plan), snapshot_to_mapping(snapshot()), given, {"big-0": 75.0})
    titles = [box.title for row in drawn.rows for cell in row.cells for box in cell.boxes]
    assert any("with the job for 1 min 15 s" in title for title in titles if "big-0" in title)
    assert not any("with the job" in title for title in titles if "big-0" not in title)
