"""deploy/compose: the file is one, its images are pinned, its secrets are made, and its setup does its work."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import httpx
import jsonschema
import pytest
import yaml
from control_plane import ControlPlane, control_plane
from servers import RunningServer

from shoal_planner.job import parse_job

FOLDER = Path(__file__).parents[2] / "deploy/compose"
TEXT = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)


def test_it_is_a_compose_file() -> None:
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas")
    schema = schemas.get_builtin_schema("vendor.compose-spec")
    jsonschema.validators.validator_for(schema)(schema).validate(COMPOSE)


def test_the_handbook_says_which_compose_it_needs() -> None:
    """Compose knows files that stand in its own one since 2.23.1."""
    assert any("content" in each for each in COMPOSE["configs"].values())
    assert "Compose must be 2.23.1 or later" in (FOLDER.parents[1] / "docs/deploying.md").read_text(encoding="utf-8")


def test_every_image_is_pinned_and_ours_are_built_from_the_dockerfile() -> None:
    targets = set()
    for name, service in COMPOSE["services"].items():
        image = service["image"]
        assert re.search(r":[^:]*\d+\.\d+", image) and not image.endswith(":latest"), name
        if "build" in service:
            build = service["build"]
            assert (FOLDER / build["context"] / build["dockerfile"]).resolve().name == "Dockerfile"
            assert image.startswith(f"shoal-{build['target']}:")
            targets.add(build["target"])
    assert targets == {"control-plane", "worker"}


def test_the_note_on_closed_networks_names_every_image_of_others() -> None:
    root = FOLDER.parents[1]
    note = (root / "docs/air-gapped.md").read_text(encoding="utf-8")
    values = yaml.safe_load((root / "helm/shoal/values.yaml").read_text(encoding="utf-8"))
    images = {service["image"] for service in COMPOSE["services"].values() if not service["image"].startswith("shoal-")}
    images |= {values["database"]["embedded"]["image"]}
    images |= {values["rayCluster"]["gcsFaultTolerance"]["embedded"]["image"]}
    assert len(images) == 6 and not [image for image in images if image not in note]


def test_what_is_asked_for_is_there() -> None:
    services = COMPOSE["services"]
    assert {"control-plane", "head", "postgres", "s3", "prometheus", "grafana"} <= services.keys()
    workers = [service for name, service in services.items() if name.startswith("worker-")]
    assert len({(each["environment"]["SHOAL_NODE_DEVICE"], each["cpus"]) for each in workers}) == 2, "equal workers"
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            assert other in services, f"{name} depends on {other}"
        for mounted in service.get("volumes", []):
            source = mounted.split(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mounted
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to others: {port}"


def test_the_services_of_ours_have_what_their_scripts_ask_for() -> None:
    head, small = (COMPOSE["services"][name] for name in ("head", "worker-small"))
    assert head["command"][:2] == ["start-head.sh", "--block"]
    assert head["environment"]["RAY_AUTH_MODE"] == small["environment"]["RAY_AUTH_MODE"] == "token"
    assert small["environment"]["SHOAL_HEAD_ADDRESS"] == "head:6379"
    assert "SHOAL_TOKEN_FILE" not in small["environment"], "workers run code of users"
    for script in ("start-head.sh", "start-worker.sh"):
        assert (FOLDER.parent / script).exists()


def test_every_secret_is_made_once(tmp_path: Path) -> None:
    copy = shutil.copy(FOLDER / "init.sh", tmp_path)
    subprocess.run(["sh", copy], check=True, capture_output=True)
    made = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    assert set(made) == set(re.findall(r"\$\{([A-Z0-9_]+):\?", TEXT))
    assert all(re.fullmatch("[0-9a-f]{48}", secret) for secret in made.values()) and len(set(made.values())) == len(
        made
    )
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    again = subprocess.run(["sh", copy], check=False, capture_output=True, text=True)
    assert again.returncode == 1 and ".env is there already" in again.stderr


def test_setup_makes_the_bucket_and_tokens_that_may_do_one_thing(
    seaweedfs: RunningServer, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    for folder in ("connector", "metrics"):
        (tokens / folder).mkdir(parents=True)
    with control_plane(tmp_path / "data") as plane:
        environment = {**os.environ, **s3_environment, "SHOAL_SERVER": plane.url, "SHOAL_TOKEN": plane.token}
        for _ in range(2):  # again it changes nothing
            subprocess.run([sys.executable, FOLDER / "setup.py", tokens], env=environment, check=True, timeout=60)
        names = [bucket["Name"] for bucket in boto3.session.Session().client("s3").list_buckets()["Buckets"]]
        assert "shoal" in names
        check_tokens(plane, tokens)


def check_tokens(plane: ControlPlane, tokens: Path) -> None:
    def status(path: str, token: str) -> int:
        return httpx.get(f"{plane.url}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=30).status_code

    connector, metrics = ((tokens / name / "token").read_text() for name in ("connector", "metrics"))
    wishes = f"/v1/clusters/{COMPOSE['services']['head']['environment']['SHOAL_CLUSTER_ID']}/wishes"
    assert (status("/metrics", metrics), status("/v1/jobs", metrics)) == (200, 403)
    assert status(wishes, connector) not in (401, 403)
    assert status("/v1/clusters/another/wishes", connector) == 403 and status("/v1/tokens", connector) == 403
    assert stat.S_IMODE((tokens / "connector/token").stat().st_mode) == 0o600
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
        assert len([each for each in http.get("/v1/tokens").json()["items"] if each["role"] == "metrics"]) == 1


def test_its_job_is_taken_by_its_control_plane(
    seaweedfs: RunningServer, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    """With the settings that compose gives it, but for the addresses of database and object store."""
    given = COMPOSE["services"]["control-plane"]["environment"]
    assert given.keys() >= {"SHOAL_DATABASE_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID"}
    settings = {name: value for name, value in given.items() if name.startswith("SHOAL_") and "${" not in value}
    told = {name.removeprefix("SHOAL_").lower(): value for name, value in settings.items()}
    job = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
    parse_job(job)
    (tmp_path / "connector").mkdir()
    (tmp_path / "metrics").mkdir()
    with control_plane(tmp_path / "data", host="0.0.0.0", file_roots="", **told) as plane:
        environment = {**os.environ, **s3_environment, "SHOAL_SERVER": plane.url, "SHOAL_TOKEN": plane.token}
        subprocess.run([sys.executable, FOLDER / "setup.py", tmp_path], env=environment, check=True, timeout=60)
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=60) as http:
            looked = http.post("/v1/jobs", params={"dry_run": "true"}, json=job)
            assert looked.status_code == 200, looked.text
            elsewhere = {**job, "checkpoint": {"uri": "s3://other/runs"}}
            refused = http.post("/v1/jobs", params={"dry_run": "true"}, json=elsewhere)
            assert refused.status_code == 422 and "must lie in s3://shoal" in refused.text
