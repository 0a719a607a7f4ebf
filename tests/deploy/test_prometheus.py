"""A Prometheus with the configuration and the rules of deploy/ scrapes a control plane: jobs keep their names in it,
alerts name them, and dashboards find them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from control_plane import Connector, control_plane, job_mapping, ok, story
from programs import program
from servers import free_ports
from waiting import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/shoal.json").read_text(encoding="utf-8"))


def configuration(folder: Path, target: str, token: str) -> Path:
    """That of deploy/, with this target and this token, and more often."""
    shutil.copy(DEPLOY / "prometheus/alerts.yaml", folder)
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (scraped,) = config["scrape_configs"]
    scraped["static_configs"] = [{"targets": [target]}]
    scraped["authorization"]["credentials_file"] = str(folder / "token")
    (folder / "token").write_text(token)
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, list[str]]]:
    """Prometheus, and the jobs that it should know: two that have been still for minutes."""
    prometheus = program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with control_plane(folder / "plane", no_progress_s="1") as plane:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
            connector = Connector(http=http)
            ok(connector.renew())
            jobs = [str(ok(http.post("/v1/jobs", json=job_mapping()))["id"]) for _ in range(2)]
            for job_id in jobs:
                told = story(job_mapping(), started_at_s=time.time() - 300).entries[:-1]
                ok(connector.send(job_id, told))
            ok(connector.renew(300))
            token = str(ok(http.post("/v1/tokens", json={"name": "prometheus", "role": "metrics"}))["secret"])
        (port,) = free_ports(1)
        config = configuration(folder, plane.url.removeprefix("http://"), token)
        options = [
            "--config.file",
            config,
            "--storage.tsdb.path",
            folder / "data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([prometheus, *options], stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as asked:
                yield asked, jobs
        finally:
            process.terminate()
            process.wait()


def found(asked: httpx.Client, query: str) -> list[dict[str, str]]:
    """The labels of all that the query finds now; nothing while it does not answer yet."""
    try:
        answer = asked.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, (query, answer.text)
    return [each["metric"] for each in answer.json()["data"]["result"]]


def test_jobs_are_called_by_their_ids(scraped: tuple[httpx.Client, list[str]]) -> None:
    asked, jobs = scraped
    eventually(lambda: len(found(asked, "shoal_job_info")) == 2, 120)
    told = found(asked, "shoal_job_info")
    assert {each["job_id"] for each in told} == {*jobs} and {each["job"] for each in told} == {"shoal"}
    names = asked.get("/api/v1/labels").json()["data"]
    assert not [name for name in names if name.startswith("exported_")], "a label that Prometheus sets itself"
    assert {each["state"] for each in found(asked, 'shoal_jobs{project="default"} == 0')} >= {"failed", "queued"}


def test_an_alert_names_the_job(scraped: tuple[httpx.Client, list[str]]) -> None:
    asked, jobs = scraped
    firing = 'ALERTS{alertname="ShoalJobStuck",alertstate="firing"}'
    eventually(lambda: len(found(asked, firing)) == 2, 120)
    assert {each["job_id"] for each in found(asked, firing)} == {*jobs}
    alerts = asked.get("/api/v1/alerts").json()["data"]["alerts"]
    said = {each["annotations"]["summary"] for each in alerts if each["labels"]["alertname"] == "ShoalJobStuck"}
    assert said == {f"{job} makes no progress; 'shoal status {job}' says what it waits for." for job in jobs}
    assert not found(asked, 'ALERTS{alertname="ShoalDown",alertstate="firing"}')


def test_dashboards_tell_the_jobs_apart(scraped: tuple[httpx.Client, list[str]]) -> None:
    asked, jobs = scraped
    eventually(lambda: len(found(asked, "shoal_job_step")) == 2, 120)
    (choice,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == "job")
    label = choice["query"]["query"].rpartition(", ")[2].removesuffix(")")
    answer = asked.get(f"/api/v1/label/{label}/values", params={"match[]": "shoal_job_info"})
    assert answer.json()["data"] == sorted(jobs)
    seen = 0
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            told = found(asked, target["expr"].replace("$project", ".*").replace("$job", ".*"))
            if told and "{{job_id}}" in target["legendFormat"]:
                assert {each["job_id"] for each in told} == {*jobs}, panel["title"]
                seen += 1
    assert seen >= 8, "most panels of jobs show something"
