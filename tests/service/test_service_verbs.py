"""Verbs on jobs over REST and the command line: dry runs, clones, filters, tags of what was seen; prices and drills."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, ControlPlane, job_mapping, ok
from kept_ground import words
from lora_ground import save_llama

from shoal.cli import run
from shoal.cli_verbs import overrides_of, show_dry_run
from shoal.client import Client
from shoal.errors import NotFound
from shoal_service.jobs import rfc3339


def submit(api: httpx.Client, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = ok(api.post("/v1/jobs", json=job_mapping(**changes)))
    return found


def listed(api: httpx.Client, **params: Any) -> list[str]:
    return [job["name"] for job in ok(api.get("/v1/jobs", params=params))["items"]]


def test_a_dry_run_says_plan_and_price_and_creates_nothing(api: httpx.Client, connector: Connector) -> None:
    alone = ok(api.post("/v1/jobs", params={"dry_run": "1"}, json=job_mapping()))
    assert (alone["cluster_id"], alone["plan"], alone["expected"]) == (None, None, None)
    assert "no cluster is connected" in alone["reason"]
    ok(connector.renew())
    found = ok(api.post("/v1/jobs", params={"dry_run": "1"}, json=job_mapping()))
    assert found["cluster_id"] == "local" and found["plan"]["pipelines"]
    expected = found["expected"]
    assert expected["usd_per_hour"] == pytest.approx(2 * 7.3 + 2 * 0.2)
    assert expected["step_s"] == found["plan"]["predicted"]["step_s"]
    assert expected["hours"] == pytest.approx(60 * expected["step_s"] / 3600)
    assert expected["usd"] == pytest.approx(expected["usd_per_hour"] * expected["hours"])
    assert expected["usd_per_million_tokens"] == pytest.approx(expected["usd"] / (60 * 8 * 32) * 1e6)
    assert listed(api) == []
    refused = api.post("/v1/jobs", params={"dry_run": "1"}, json=job_mapping(data={"uri": "file:///nowhere"}))
    assert (refused.status_code, refused.json()["param"]) == (422, "data.uri")


def test_a_dry_run_is_made_in_the_project_that_the_job_is_for(api: httpx.Client, connector: Connector) -> None:
    ok(api.post("/v1/projects", json={"id": "vision"}))
    token = api.headers["Authorization"].removeprefix("Bearer ")
    with Client(str(api.base_url), token) as client:
        assert client.dry_run(job_mapping(), project="vision")["dry_run"] is True
        with pytest.raises(NotFound, match="nowhere"):
            client.dry_run(job_mapping(), project="nowhere")


def test_a_dry_run_says_which_limits_do_not_suffice(
    api: httpx.Client, connector: Connector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ok(connector.renew())

    def rehearsed(**limits: Any) -> Any:
        job = job_mapping(checkpoint={"uri": (tmp_path / "store").as_uri()}, limits=limits, train={"steps": 10**7})
        return job, ok(api.post("/v1/jobs", params={"dry_run": "1"}, json=job))

    assert rehearsed(budget_usd=1e9, deadline="2999-01-31T18:00:00Z", max_duration="36000d")[1]["warnings"] == []
    deadline = rfc3339(time.time() + 60)
    job, found = rehearsed(budget_usd=2, deadline=deadline, max_duration="90s")
    budget, until, lasts = found["warnings"]
    usd, hours = found["expected"]["usd"], found["expected"]["hours"]
    assert (budget["code"], budget["param"]) == ("budget_short", "limits.budget_usd")
    assert budget["reason"].startswith(
        f"all steps cost about {usd:.2f} USD, {usd - 2:.2f} USD more than limits.budget_usd = 2.00: it would rest after"
    )
    assert f"{int(10**7 * 2 / usd)} of 10000000 steps" in budget["reason"]
    assert until["code"] == "deadline_too_soon" and f"after limits.deadline = {deadline}" in until["reason"]
    assert lasts["code"] == "max_duration_too_short" and "longer than limits.max_duration = 90s" in lasts["reason"]
    assert hours > 1
    show_dry_run(found)
    assert "budget_short" in capsys.readouterr().out
    preview = api.post("/new/preview", data={"job": json.dumps(job)}, headers={"Accept": "text/html"}).text
    assert "more than limits.budget_usd = 2.00" in preview and "deadline too soon" in preview


def test_a_dry_run_says_what_of_an_imported_folder_is_not_done(
    api: httpx.Client, connector: Connector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(tmp_path / "base", attention_dropout=0.1)
    base = (tmp_path / "base").as_uri()
    job = job_mapping() | {"model": {"hf": base}}
    (alone,) = ok(api.post("/v1/jobs", params={"dry_run": "1"}, json=job))["warnings"]
    assert alone == {
        "code": "dropout_left_out",
        "param": "train.init_from",
        "reason": f"{base} says attention_dropout = 0.1: Shoal trains without dropout",
    }
    words(tmp_path / "base" / "tokenizer.json")
    job["data"] |= {"tokenizer": "bytes"}
    ok(connector.renew())
    found = ok(api.post("/v1/jobs", params={"dry_run": "1"}, json=job))
    assert found["plan"] is not None
    assert [each["code"] for each in found["warnings"]] == ["dropout_left_out", "tokenizer_left_out"]
    show_dry_run(found)
    assert f"{base} has a tokenizer, and text is read as bytes" in capsys.readouterr().out
    preview = api.post("/new/preview", data={"job": json.dumps(job)}, headers={"Accept": "text/html"}).text
    assert "dropout left out" in preview and "tokenizer left out" in preview


def test_a_clone_is_a_new_job_with_other_values(api: httpx.Client) -> None:
    first = submit(api, labels={"team": "search"})
    path = f"/v1/jobs/{first['id']}/clone"
    overrides = {"name": "longer", "train": {"steps": 70}, "labels": {"team": None, "try": "2"}}
    made = api.post(path, json={"overrides": overrides}, headers={"Idempotency-Key": "once"})
    again = api.post(path, json={"overrides": overrides}, headers={"Idempotency-Key": "once"})
    assert (made.status_code, made.headers["location"]) == (201, f"/v1/jobs/{made.json()['id']}")
    assert made.json()["id"] == again.json()["id"] != first["id"]
    spec = made.json()["spec"]
    assert (spec["name"], spec["train"]["steps"], spec["labels"]) == ("longer", 70, {"try": "2"})
    assert spec["train"]["seq_len"] == first["spec"]["train"]["seq_len"]
    assert ok(api.post(path))["spec"] == first["spec"]
    refused = api.post(path, json={"overrides": {"train": {"stepps": 1}}})
    assert (refused.status_code, refused.json()["param"]) == (422, "train.stepps")
    planned = ok(api.post(path, json={"dry_run": True, "overrides": {"train": {"steps": 5}}}))
    assert planned["dry_run"] and len(listed(api)) == 3


@pytest.mark.parametrize("content_type", ["text/plain", "application/yaml", "multipart/form-data; boundary=x"])
def test_what_is_no_json_is_refused_for_its_type(api: httpx.Client, content_type: str) -> None:
    path = f"/v1/jobs/{submit(api)['id']}"
    for route in (f"{path}/clone", f"{path}/limits", "/v1/plans"):
        refused = api.post(route, content=b"overrides: {}", headers={"Content-Type": content_type})
        said = refused.json()
        assert (refused.status_code, said["code"], said["param"]) == (415, "unsupported_media_type", "Content-Type")
        assert said["detail"] == f"Content-Type = {content_type!r}: send application/json"
    described = ok(api.get("/openapi.json"))["paths"]["/v1/jobs/{job_id}/clone"]["post"]["responses"]
    assert "415" in described


def test_jobs_are_listed_by_state_name_label_and_time(api: httpx.Client) -> None:
    one = submit(api, name="50% off", labels={"team": "search", "stage": "a/b"})
    submit(api, name="Another", labels={"team": "ads"})
    third = submit(api, name="without")
    ok(api.post(f"/v1/jobs/{third['id']}/cancel"))
    assert listed(api, state="cancelled") == ["without"]
    assert listed(api, state=["queued", "cancelled"]) == ["without", "Another", "50% off"]
    assert listed(api, name="ANO") == ["Another"]
    assert listed(api, name="0%") == ["50% off"] and listed(api, name="0_") == []
    assert listed(api, label="team") == ["Another", "50% off"]
    assert listed(api, label=["team=search", "stage=a/b"]) == ["50% off"]
    assert listed(api, label="team=nobody") == []
    assert listed(api, created_since=third["created_at"]) == ["without"]
    assert len(listed(api, created_since="0001-01-01T00:00:00+10:00")) == 3
    assert listed(api, created_until=one["created_at"], limit=1) in (["50% off"], [])
    for wrong in ("0.5", "1767225600", "2026-01-31", "2026-01-31T12:00:00"):
        assert api.get("/v1/jobs", params={"created_since": wrong}).json()["param"] == "created_since"
    bad = api.post("/v1/jobs", json=job_mapping(labels={"-": "x"}))
    assert (bad.status_code, bad.json()["param"]) == (422, "labels")
    for param, value in (("label", 'a"b=c'), ("name", "\x00")):
        bad = api.get("/v1/jobs", params={param: value})
        assert (bad.status_code, bad.json()["param"]) == (422, param)


def test_what_has_changed_since_it_was_seen_is_left_alone(api: httpx.Client) -> None:
    job_id = submit(api)["id"]
    seen = api.get(f"/v1/jobs/{job_id}").headers["etag"]
    assert api.get(f"/v1/jobs/{job_id}").headers["etag"] == seen
    cancelled = api.post(f"/v1/jobs/{job_id}/cancel", headers={"If-Match": seen})
    assert cancelled.is_success and cancelled.headers["etag"] != seen
    refused = api.post(f"/v1/jobs/{job_id}/cancel", headers={"If-Match": seen})
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    assert refused.json()["etag"] == cancelled.headers["etag"]
    assert api.post(f"/v1/jobs/{job_id}/cancel", headers={"If-Match": "*"}).is_success


def test_a_checkpoint_that_is_asked_for_becomes_a_wish(api: httpx.Client, connector: Connector, tmp_path: Any) -> None:
    ok(connector.renew())
    place = {"uri": (tmp_path / "store").as_uri()}
    job_id, without = submit(api, checkpoint=place)["id"], submit(api)["id"]
    before = connector.wishes()
    assert [wish["saves"] for wish in before["jobs"]] == [0, 0]
    assert api.post(f"/v1/jobs/{job_id}/checkpoint").status_code == 202
    assert api.post(f"/v1/jobs/{job_id}/checkpoint").status_code == 202
    after = connector.wishes()
    assert {wish["id"]: wish["saves"] for wish in after["jobs"]} == {job_id: 2, without: 0}
    assert after["version"] != before["version"]
    refused = api.post(f"/v1/jobs/{without}/checkpoint")
    assert (refused.status_code, refused.json()["code"]) == (409, "no_store")
    ok(api.post(f"/v1/jobs/{job_id}/cancel"))
    assert api.post(f"/v1/jobs/{job_id}/checkpoint").json()["code"] in ("job_cancelling", "job_ended")


def test_prices_and_drills_are_listed(api: httpx.Client, connector: Connector) -> None:
    assert ok(api.get("/v1/prices")) == ok(api.get("/v1/drills")) == {"items": [], "next_cursor": None}
    ok(connector.renew())
    found = {item["device"]: item for item in ok(api.get("/v1/prices"))["items"]}
    assert (found["A100-80G"]["num_nodes"], found["A100-80G"]["price_per_device_hour"]) == (2, 3.65)
    assert (found["T4"]["spot"], found["T4"]["zone"], found["T4"]["price_per_hour"]) == (True, "b", 0.2)
    drill = ok(api.post("/v1/nodes/spot-0/preempt", json={"notice_s": 300}))
    assert ok(api.get("/v1/drills"))["items"] == [drill]
    later = ok(api.post("/v1/nodes/big-0/preempt", json={"notice_s": 1}))
    first = ok(api.get("/v1/drill-history", params={"limit": 1}))
    (newest,) = first["items"]
    assert (newest["id"], newest["created_by"], newest["notice_s"]) == (later["id"], "admin", pytest.approx(1))
    rest = ok(api.get("/v1/drill-history", params={"limit": 1, "cursor": first["next_cursor"]}))
    assert [each["id"] for each in rest["items"]] == [drill["id"]] and rest["next_cursor"] is None
    assert api.get("/v1/drill-history", params={"cursor": "x"}).json()["param"] == "cursor"
    assert "Notice until" in api.get("/nodes", headers={"Accept": "text/html"}).text


def test_the_command_line_has_them(
    plane: ControlPlane,
    http: httpx.Client,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in plane.environment().items():
        monkeypatch.setenv(name, value)
    ok(Connector(http=http).renew())
    job = tmp_path / "job.json"
    job.write_text(json.dumps(job_mapping(labels={"by": "hand"})))
    assert run(["submit", str(job), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "$ in all" in said and "nothing was created" in said
    assert "attention within a    sequence" in said
    apart = job_mapping()
    job.write_text(json.dumps(apart | {"data": {**apart["data"], "attention": "document"}}))
    assert run(["submit", str(job), "--dry-run"]) == 0
    assert "attention within a    document" in capsys.readouterr().out
    job.write_text(json.dumps(job_mapping(labels={"by": "hand"})))
    assert run(["submit", str(job)]) == 0
    job_id = capsys.readouterr().out.strip()
    assert run(["clone", job_id, "--set", "train.steps=61", "--set", "name=twin", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["train"]["steps"] == 61
    assert run(["list", "--label", "by=hand", "--name", "twi", "--since", "1h", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["items"]] == ["twin"]
    for command in (
        ["attempts", job_id],
        ["logs", job_id, "--since", "10m"],
        ["prices"],
        ["spending"],
        ["drills"],
        ["drills", "--all"],
    ):
        assert run(command) == 0
    assert "A100-80G" in capsys.readouterr().out
    assert run(["logs", job_id, "--since", "soon"]) == 2
    assert run(["clone", job_id, "--set", "steps"]) == 2


def test_settings_of_a_clone_are_nested_values() -> None:
    assert overrides_of(["train.steps=200", "train.lr=1e-3", "name=a b", "limits=null", "data.uri='stdlib:'"]) == {
        "train": {"steps": 200, "lr": 1e-3},
        "name": "a b",
        "limits": None,
        "data": {"uri": "stdlib:"},
    }
