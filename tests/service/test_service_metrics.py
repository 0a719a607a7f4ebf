"""/metrics: what Prometheus reads of jobs, of the service and of its database, and that reading it stays cheap."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import STALLED_S, Connector, ControlPlane, control_plane, job_mapping, ok, story
from fastapi import FastAPI
from figures import figures_of, long_story
from programs import program
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import delete, event, update

from shoal_recovery.journal import Entry, JobState, entry_to_mapping
from shoal_service.database import Database
from shoal_service.goodput import goodput
from shoal_service.job_figures import counted_as, labels_of
from shoal_service.job_metrics import time_parts
from shoal_service.models import JobRow
from shoal_service.models_watching import JobTotalsRow
from shoal_service.spending import spending
from shoal_service.step_sums import EpochSteps
from shoal_service.timeline import Event

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(http: httpx.Client, token: str | None = None) -> Samples:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = http.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples_of(answer.text)


def one(found: Samples, name: str, /, **labels: str) -> float:
    values = [value for (each, has), value in found.items() if each == name and has >= labels.items()]
    assert len(values) == 1, (name, labels, values)
    return values[0]


def test_figures_agree_with_what_pages_add_up() -> None:
    told = long_story()
    events = [
        Event(seq=entry.seq, at_s=entry.at_s, kind=entry.event.kind, payload=entry_to_mapping(entry))
        for entry in told.entries
    ]
    for until in range(1, len(events) + 1):
        end_at_s = events[until - 1].at_s + 11.0
        found = figures_of(told.entries[:until], 1e9 - 2)
        spent = spending(events[:until], end_at_s=end_at_s, ended=False, tokens=0)
        assert sum(found.usd_until(end_at_s).values()) == pytest.approx(spent.usd or 0.0, abs=1e-9)
        assert sum(found.usd_per_hour.values()) == pytest.approx(spent.usd_per_hour or 0.0)
        assert sum(found.nodes.values()) == sum(charge.num_nodes_now for charge in spent.charges)
        steps = [
            EpochSteps(
                epoch=1,
                rolled_back=False,
                num_steps=1,
                seconds=found.productive_s + found.stalled_s,
                tokens=0,
                stalled_s=found.stalled_s,
            ),
            EpochSteps(epoch=1, rolled_back=True, num_steps=1, seconds=found.redone_s, tokens=0),
        ]
        whole = goodput(events[:until], steps, created_at_s=1e9 - 2, end_at_s=end_at_s, evaluation_s=found.evaluation_s)
        parts, recovery = time_parts(found, end_at_s), ("detect", "decide", "restore", "rebuild", "rest")
        assert parts["recovery"] == pytest.approx(sum(whole.parts[name] for name in recovery))
        for name in parts.keys() - {"recovery"}:
            assert parts[name] == pytest.approx(whole.parts[name], abs=1e-6), (name, until)
    assert {labels_of(name, 4): count for name, count in found.losses.items()} == {
        ("sudden", "spot", "T4", "b"): 1,
        ("notice", "spot", "T4", "b"): 1,
        ("sudden", "on_demand", "A100-80G", "a"): 1,
    }
    assert found.redone_s > 0


def test_recoveries_that_are_not_done_are_counted_by_what_became_of_them() -> None:
    told = story(job_mapping(), started_at_s=1e9)
    told.entries.pop()
    told.state("recovering", "node_lost", "a node was lost")
    told.state("recovering", "node_joined", "one came meanwhile")
    told.state("waiting", "no_plan_fits", "too few devices")
    told.state("recovering", "node_joined", "one came")
    told.state("failed", "rank_failed", "out of memory")
    found = figures_of(told.entries, 1e9 - 2).recoveries
    assert {labels_of(name, 2): count for name, count in found.items()} == {
        ("node_lost", ""): 1,
        ("node_joined", ""): 1,
        ("node_joined", "waiting"): 1,
        ("node_joined", "failed"): 1,
    }


def test_names_of_what_is_counted_and_those_of_versions_before() -> None:
    assert labels_of(counted_as("sudden", "spot", "T4", 'a "zone", oddly named'), 4)[3] == 'a "zone", oddly named'
    assert labels_of("sudden", 4) == ("sudden", "", "", "")
    assert counted_as("node_lost") == "node_lost"


def begin(api: httpx.Client, entries: list[Entry] | None = None, **changes: Any) -> str:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping(**changes)))["id"])
    ok(Connector(http=api).renew())
    told = story(job_mapping(), started_at_s=time.time() - 60).entries
    ok(Connector(http=api).send(job_id, entries or told))
    return job_id


def test_a_job_in_figures(api: httpx.Client) -> None:
    entries = story(job_mapping(), started_at_s=time.time() - 60).entries
    job_id = begin(api, entries[:-1])
    ok(api.post("/v1/jobs", params={"dry_run": "true"}, json=job_mapping()))
    found = scrape(api)
    assert (
        one(
            found,
            "shoal_job_info",
            job_id=job_id,
            project="default",
            name="tiny",
            model="llama-561.7K",
            state="running",
        )
        == 1
    )
    assert one(found, "shoal_job_step", job_id=job_id) == 60
    assert one(found, "shoal_job_steps_planned", job_id=job_id) == 60
    # 61 were done, of 8 sequences of 32 tokens: one of them twice.
    assert one(found, "shoal_job_tokens_total", job_id=job_id) == 61 * 256
    assert one(found, "shoal_job_redone_steps_total", job_id=job_id) == 1
    assert one(found, "shoal_job_lost_steps_total", job_id=job_id) == 0
    assert one(found, "shoal_job_elapsed_seconds", job_id=job_id, kind="redone") == pytest.approx(0.4)
    assert one(found, "shoal_job_time_seconds_total", job_id=job_id, kind="redone") == pytest.approx(0.4 - STALLED_S)
    assert one(found, "shoal_job_elapsed_seconds", job_id=job_id, kind="checkpoint") == pytest.approx(60 * STALLED_S)
    assert one(found, "shoal_step_duration_seconds_count", job_id=job_id) == 61
    assert one(found, "shoal_step_duration_seconds_bucket", job_id=job_id, le="0.5") == 41
    assert one(found, "shoal_recoveries_total", job_id=job_id, cause="node_lost", outcome="done") == 1
    assert one(found, "shoal_recoveries_total", job_id=job_id, cause="node_joined") == 1
    assert one(found, "shoal_recovery_duration_seconds_sum", job_id=job_id, phase="restore") == pytest.approx(0.262)
    assert one(found, "shoal_recovery_duration_seconds_count", job_id=job_id, phase="total") == 2
    assert one(found, "shoal_recovery_bytes_total", job_id=job_id, source="peer", tier="peer") == 25_800_000
    assert one(found, "shoal_recovery_bytes_total", job_id=job_id, source="local", tier="node") == 16_400_000
    assert one(found, "shoal_recovery_bytes_total", job_id=job_id, source="object_store", tier="store") == 0
    place = {"signal": "sudden", "market": "spot", "device": "T4", "zone": "b"}
    assert one(found, "shoal_node_preemptions_total", job_id=job_id, **place) == 1
    assert one(found, "shoal_job_checkpoint_step", job_id=job_id) == 39
    assert 0 < one(found, "shoal_checkpoint_age_seconds", job_id=job_id) < 120
    assert one(found, "shoal_checkpoint_duration_seconds_count", job_id=job_id) >= 1
    assert one(found, "shoal_instance_price_dollars_per_hour", zone="b", market="spot") == pytest.approx(0.2)
    assert one(found, "shoal_planner_duration_seconds_count") == 1
    assert one(found, "shoal_job_nodes", job_id=job_id, market="spot") == 2
    assert one(found, "shoal_job_cost_dollars_per_hour", job_id=job_id, market="on_demand") == pytest.approx(14.6)
    assert one(found, "shoal_job_cost_dollars_total", job_id=job_id, market="on_demand") > 0
    assert 0 < one(found, "shoal_job_goodput_ratio", job_id=job_id) <= 1
    # By the plan's prediction, and how long a step really takes.
    plan = ok(api.get(f"/v1/jobs/{job_id}/plan"))["plan"]["predicted"]
    step_s = ok(api.get(f"/v1/jobs/{job_id}"))["status"]["step_s"]
    assert one(found, "shoal_job_mfu_ratio", job_id=job_id) == pytest.approx(plan["mfu"] * plan["step_s"] / step_s)
    costs = ok(api.get(f"/v1/jobs/{job_id}/cost"))["usd"]
    names = ("spot", "on_demand")
    told = sum(one(found, "shoal_job_cost_dollars_total", job_id=job_id, market=name) for name in names)
    assert told == pytest.approx(costs, rel=0.2)


def test_figures_of_jobs_that_are_older_than_figures(api: httpx.Client, app: FastAPI) -> None:
    entries = story(job_mapping(), started_at_s=time.time() - 60).entries[:-1]
    job_id = begin(api, entries)
    before = scrape(api)
    execute(app, delete(JobTotalsRow))
    assert ("shoal_job_tokens_total", job_id) not in {
        (name, dict(labels).get("job_id")) for name, labels in scrape(api)
    }
    ok(Connector(http=api).send(job_id, story(job_mapping(), started_at_s=time.time() - 60).entries))
    after = scrape(api)
    of_steps = "shoal_step_duration_seconds"
    for (name, labels), value in before.items():
        if dict(labels).get("job_id") == job_id and name.endswith("_total") and not name.startswith(of_steps):
            if "cost" not in name:  # how long what was rolled back had been held up is not known any more
                held_up_s = STALLED_S if name == "shoal_job_time_seconds_total" else 0.0
                assert after[name, labels] == pytest.approx(value, abs=held_up_s + 1e-9), name


def execute(app: FastAPI, statement: Any) -> None:
    """With a connection of its own: those of the server belong to its loop."""

    async def run() -> None:
        database = Database(app.state.services.settings.resolved_database_url)
        async with database.write() as session:
            await session.execute(statement)
        await database.close()

    asyncio.run(run())


def test_only_what_concerns_the_one_who_asks(api: httpx.Client) -> None:
    mine = begin(api)
    ok(api.post("/v1/projects", json={"id": "other"}))

    def token(**what: Any) -> str:
        return str(ok(api.post("/v1/tokens", json={"name": "test", **what}))["secret"])

    viewer, foreign = token(role="viewer", project="default"), token(role="viewer", project="other")
    scraper = token(role="metrics")
    assert one(scrape(api, viewer), "shoal_job_step", job_id=mine) == 60
    assert not [name for name, _ in scrape(api, viewer) if name.startswith(("shoal_http", "process", "shoal_cluster"))]
    assert not [labels for _, labels in scrape(api, foreign) if dict(labels).get("job_id")]
    assert scrape(api, scraper).keys() >= {("shoal_database_up", frozenset())}
    assert one(scrape(api, scraper), "shoal_job_step", job_id=mine) == 60
    headers = {"Authorization": f"Bearer {scraper}"}
    for path in ("/v1/jobs", f"/v1/jobs/{mine}", "/v1/me", "/"):
        assert api.get(path, headers=headers).status_code == 403, path
    refused = api.post("/v1/tokens", json={"name": "x", "role": "metrics", "project": "default"})
    assert (refused.status_code, refused.json()["param"]) == (422, "project")
    stranger = httpx.get(f"{api.base_url}/metrics")
    assert (stranger.status_code, stranger.json()["code"]) == (401, "unauthorized")


def test_what_the_process_counts(api: httpx.Client) -> None:
    job_id = begin(api)
    ok(api.get(f"/v1/jobs/{job_id}"))
    assert api.get("/v1/jobs/job_unknown").status_code == 404
    assert api.get("/no/such/page").status_code == 404
    assert api.request("BREW", "/v1/jobs").status_code == 405
    found = scrape(api)
    route = "/v1/jobs/{job_id}"
    assert one(found, "shoal_http_requests_total", method="GET", route=route, status="200") == 1
    assert one(found, "shoal_http_requests_total", method="GET", route=route, status="404") == 1
    assert one(found, "shoal_http_requests_total", route="none", status="404") == 1
    assert one(found, "shoal_http_requests_total", method="other") == 1
    assert one(found, "shoal_http_request_duration_seconds_count", method="GET", route=route) == 2
    assert one(found, "shoal_journal_entries_total", kind="recovery_done") == 2
    assert one(found, "shoal_journal_entries_total", kind="step_done") == 61
    assert one(found, "shoal_journal_delay_seconds_count") == 1
    assert one(found, "shoal_database_up") == 1
    assert one(found, "shoal_jobs", project="default", state="succeeded") == 1
    assert one(found, "shoal_cluster_connected", cluster="local") == 1
    assert one(found, "shoal_cluster_nodes", cluster="local", device="T4", market="spot") == 2
    with api.stream("GET", "/stream") as stream:
        assert stream.status_code == 200
        assert one(scrape(api), "shoal_event_streams", route="/stream") == 1
    # Sent again, and known: nothing is counted twice.
    ok(Connector(http=api).send(job_id, story(job_mapping(), started_at_s=time.time() - 60).entries))
    assert one(scrape(api), "shoal_journal_entries_total", kind="step_done") == 61


def test_the_queue(api: httpx.Client) -> None:
    assert one(scrape(api), "shoal_queue_oldest_job_seconds") == 0
    ok(api.post("/v1/jobs", json=job_mapping()))
    found = scrape(api)
    assert one(found, "shoal_jobs", state="queued") == 1
    others = {dict(labels)["state"]: value for (name, labels), value in found.items() if name == "shoal_jobs"}
    assert others == {state.value: int(state is JobState.QUEUED) for state in JobState}, (
        "a first failure must be a rise"
    )
    assert 0 < one(found, "shoal_queue_oldest_job_seconds") < 60
    assert not [labels for _, labels in found if dict(labels).get("job_id")], "it has not begun"


@pytest.mark.parametrize("settings", [{"metrics_jobs": 3}], indirect=True)
def test_ended_jobs_leave_and_a_scrape_never_reads_journals(api: httpx.Client, app: FastAPI) -> None:
    asked: list[str] = []
    engine = app.state.services.database.engine.sync_engine

    def ask(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "comparisons" not in statement:  # as these go on beside requests
            asked.append(statement)

    event.listen(engine, "before_cursor_execute", ask)
    old = [begin(api) for _ in range(2)]
    execute(app, update(JobRow).values(since_at_s=time.time() - 700))
    asked.clear()
    first = scrape(api)
    assert not {dict(labels).get("job_id") for _, labels in first} & {*old}, "ended more than ten minutes ago"
    assert one(first, "shoal_jobs", state="succeeded") == 2
    running = [begin(api, story(job_mapping(), started_at_s=time.time() - 60).entries[:-1]) for _ in range(4)]
    asked.clear()
    found = scrape(api)
    assert len([statement for statement in asked if "job_totals" in statement]) == 1, "one for all jobs"
    assert not [statement for statement in asked if "journal" in statement or "step_points" in statement]
    shown = {dict(labels)["job_id"] for name, labels in found if name == "shoal_job_info"}
    assert shown == {*running[1:]}, "the newest of them"
    assert one(found, "shoal_jobs_left_out") == 1


@pytest.fixture
def promtool() -> str:
    return program("promtool")


def test_promtool_finds_nothing_to_complain_of(promtool: str, plane: ControlPlane, http: httpx.Client) -> None:
    begin(http)
    begin(http, story(job_mapping(), started_at_s=time.time() - 60).entries[:-1])
    text = http.get("/metrics").text
    assert "process_resident_memory_bytes" in text and "shoal_job_goodput_ratio" in text
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_while_the_database_is_away(postgres: Any, migrated: str, tmp_path: Any) -> None:
    """What the process counts is told all the same, to whom it knows without asking the database."""
    url = postgres.new_database(migrated)
    with control_plane(tmp_path / "data", database_url=url, database_timeout_s="1") as plane:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
            secret = ok(http.post("/v1/tokens", json={"name": "test", "role": "metrics"}))["secret"]
            with postgres.frozen():
                found = scrape(http)
                assert one(found, "shoal_database_up") == 0
                assert one(found, "shoal_database_failures_total") >= 1
                refused = http.get("/metrics", headers={"Authorization": f"Bearer {secret}"})
                assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
            assert one(scrape(http, secret), "shoal_database_up") == 1


ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
DASHBOARD = ROOT / "deploy/grafana/dashboards/shoal.json"


def test_the_handbook_the_alerts_and_the_dashboard_name_what_there_is(plane: ControlPlane, http: httpx.Client) -> None:
    begin(http, story(job_mapping(), started_at_s=time.time() - 60).entries[:-1])
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    told = (ROOT / "docs/watching.md").read_text(encoding="utf-8")
    common = {name for name in names if name.startswith("process_") or name.endswith("_created")}
    assert {name for name in names - common if f"`{name}`" not in told} == set()
    parts = ("_bucket", "_count", "_sum", "_info", "")
    for path in (ALERTS, DASHBOARD):
        used = set(re.findall(r"\bshoal_[a-z_]+", path.read_text(encoding="utf-8")))
        assert used and all(any(each.removesuffix(part) in names for part in parts) for each in used), path
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    assert len(queries) > 15


def test_promtool_takes_the_alerts(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
