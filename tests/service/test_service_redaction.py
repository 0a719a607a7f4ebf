"""Secrets are in no file of the control plane and in no answer, whatever was done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import ControlPlane, enter, job_mapping, ok

from shoal import Client
from shoal_service.redaction import Redactor

HIDDEN = "hunter2-which-nobody-may-read"


def job_with(**code: Any) -> dict[str, Any]:
    model = {"entrypoint": "mine:build", "arguments": {}}
    return {**job_mapping(), "model": model, "code": {"working_dir": "file:///tmp", **code}}


def answers_of(http: httpx.Client, job_id: str) -> str:
    paths = [
        "/v1/jobs",
        f"/v1/jobs/{job_id}",
        f"/v1/jobs/{job_id}/events",
        "/v1/tokens",
        "/v1/audit-events",
        "/",
        "/nodes",
    ]
    paths += [f"/jobs/{job_id}", "/v1/me", "/v1/projects", "/v1/users", "/openapi.json", "/login", "/v1/clusters"]
    return "\n".join(http.get(path).text for path in paths)


def refusals() -> list[tuple[str, str, dict[str, Any]]]:
    """Requests with a secret where none belongs: method, path, body."""
    signed, known = f"https://x.example/?X-Amz-Signature={HIDDEN}", f"https://me:{HIDDEN}@x.example/"
    wrong: list[dict[str, Any]] = [
        {"code": {"env": {"API_KEY": HIDDEN}}},
        {"code": {"env": {"ANY": HIDDEN}}},
        {"api_key": HIDDEN},
        {"track": {"mlflow": known}},
        {"track": {"mlflow": {"tracking_uri": known}}},
        {"data": {"uri": signed}},
        {"checkpoint": {"uri": signed}},
        {"checkpoint": {"uri": f"s3://AKIAX:{HIDDEN}@bucket/x"}},
        {"train": {"init_from": known}},
    ]
    jobs = [("POST", "/v1/jobs", {**job_mapping(), **each}) for each in wrong]
    storage = "/v1/projects/default/storages/m"
    return [
        *jobs,
        ("POST", "/v1/webhooks", {"url": known, "project": "default"}),
        ("POST", "/v1/webhooks", {"url": f"http://x.example/?token={HIDDEN}", "project": "default"}),
        ("POST", "/v1/webhooks", {"url": "https://x.example/", "project": "default", "client_secret": HIDDEN}),
        ("PUT", storage, {"endpoint": known}),
        ("PUT", storage, {"endpoint": "https://minio.example", "credentials": {"environment": HIDDEN}}),
        ("PUT", storage, {"endpoint": "https://minio.example", "credentials": {"secret_access_key": HIDDEN}}),
        ("POST", "/v1/plans", {"job": {**job_mapping(), "api_key": HIDDEN}, "cluster": {"nodes": []}}),
        ("PUT", "/v1/clusters/x", {"holder": "a", "snapshot": {"api_key": HIDDEN}, "profile": {}, "lease_s": 1}),
    ]


@pytest.mark.parametrize(("method", "path", "body"), refusals())
def test_a_refusal_does_not_repeat_what_is_secret(
    api: httpx.Client, method: str, path: str, body: dict[str, Any]
) -> None:
    refused = api.request(method, path, json=body)
    assert refused.status_code == 422, refused.text
    assert HIDDEN not in refused.text


def test_no_secret_is_kept_logged_or_answered(plane: ControlPlane, http: httpx.Client) -> None:
    secrets = [HIDDEN, plane.token]
    said = []
    for code in (
        {"env": {"WANDB_API_KEY": HIDDEN}},
        {"env": {"DB_PASSWORD": HIDDEN}},
        {"env": {"HF_TOKEN": HIDDEN}, "secrets": {"OTHER": "OTHER"}},
        {"secrets": {"WANDB_API_KEY": HIDDEN}},
        {"secrets": {"WANDB_API_KEY": f"${{{HIDDEN}}}"}},
    ):
        refused = http.post("/v1/jobs", json=job_with(**code))
        assert refused.status_code == 422, refused.text
        assert refused.json()["param"].startswith(("code.env.", "code.secrets."))
        said.append(refused.text)
    script = {"path": "/srv/train.py", "env": {"API_KEY": HIDDEN}}
    job = {"kind": "ray_train", "name": "x", "script": script, "workers": {"max": 1}, "checkpoint": {"uri": "s3://b/c"}}
    refused = http.post("/v1/jobs", json=job)
    assert (refused.status_code, refused.json()["param"]) == (422, "script.env.API_KEY")
    said.append(refused.text)
    mlflow = {"track": {"mlflow": {"tracking_uri": f"https://me:{HIDDEN}@mlflow.example"}}}
    said.append(http.post("/v1/jobs", json=job_mapping(**mlflow)).text)

    job_id = ok(http.post("/v1/jobs", json=job_with(secrets={"WANDB_API_KEY": "TEAM_WANDB_KEY"})))["id"]
    assert ok(http.get(f"/v1/jobs/{job_id}"))["spec"]["code"]["secrets"] == {"WANDB_API_KEY": "TEAM_WANDB_KEY"}
    with Client(plane.url, plane.token) as client:
        made = client.people.create_token("for a test", role="member", project="default")
        link = client.login_link()["url"]
    secrets += [made["secret"], link.partition("code=")[2]]
    with httpx.Client(base_url=plane.url) as browser:
        said.append(enter(browser, link).text)
        secrets.append(browser.cookies["shoal_session"])
        assert browser.get("/v1/me").is_success
        csrf = browser.get("/login").text.partition('name="csrf" value="')[2].partition('"')[0]
        said.append(browser.post("/login", data={"csrf": csrf, "token": f"{HIDDEN}-guess"}).text)
        said.append(httpx.get(f"{plane.url}/v1/jobs", headers={"Authorization": f"Bearer {HIDDEN}"}).text)
        said.append(httpx.get(f"{plane.url}/v1/jobs", headers={"Authorization": f"Basic {HIDDEN}"}).text)
    said.append(answers_of(http, job_id))
    kept = {path: path.read_bytes() for path in plane.data_dir.rglob("*") if path.is_file()}
    assert any(path.name == "shoal.db" for path in kept) and any(path.name == "log" for path in kept)
    for secret in secrets:
        assert not any(secret in text for text in said), secret
        found = [path for path, content in kept.items() if secret.encode() in content]
        assert found == ([plane.data_dir / "admin.token"] if secret == plane.token else []), (secret, found)
    assert Path(plane.data_dir / "admin.token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("piece", ["0", "a_", "://", "a:", "@", "api_key", "bearer ", "?code", "-", "eyJ."])
def test_a_line_of_whatever_length_is_redacted(piece: str) -> None:
    """Jobs print what they like: looking at each character from each other one would take hours."""
    text = piece * (300_000 // len(piece))
    found = Redactor(()).text(f"{text}\nas MY_API_KEY=hunter2secret\n{text}")
    assert "hunter2secret" not in found and "MY_API_KEY=[redacted]" in found
