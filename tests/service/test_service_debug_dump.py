"""A debug dump has what there is to know of a job, and none of the secrets that were planted on its way."""

from __future__ import annotations

import io
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, control_plane, job_mapping, ok, story

from shoal import Client, cli
from shoal_service.redaction import REDACTED, Redactor

OF_THE_SERVER = "planted/key/of/the/server"
PRINTED = {
    "bearer": "bearer-hunter2hunter2",
    "assigned": "assigned-hunter2",
    "quoted": "quoted hunter2 with spaces",
    "address": "hunter2-in-an-address",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "hub": "hf_hunter2hunter2hunter2hunter2",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyIn0.c2lnbmVkLWJ5LWh1bnRlcjI",
    "signed": "hunter2signature",
    "pem": "MIIEvhunter2",
}
LINES = [
    f"GET / with Authorization: Bearer {PRINTED['bearer']}",
    f"DB_PASSWORD={PRINTED['assigned']} and on it goes",
    f'config = {{"api_key": "{PRINTED["quoted"]}", "steps": 5}}',
    f"connecting to postgresql://me:{PRINTED['address']}@db/shoal",
    f"using {PRINTED['aws']} and {PRINTED['hub']} and {PRINTED['jwt']}",
    f"https://bucket/x?X-Amz-Signature={PRINTED['signed']}&part=1",
    f"-----BEGIN RSA PRIVATE KEY-----\n{PRINTED['pem']}\n-----END RSA PRIVATE KEY-----",
    f"the plain value {OF_THE_SERVER} without any name",
    "tokens: 1,234 in step 7, end_token is </s>",
]


def files_of(dump: bytes) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(dump)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def printed(http: httpx.Client, job_id: str) -> None:
    lines = [(number, time.time(), "info", 1, 0, text) for number, text in enumerate(LINES, 1)]
    batch = {
        "cluster_id": "local",
        "holder": "connector-1",
        "sources": [{"node": "big-0", "life": "a", "lines": lines}],
    }
    ok(http.post(f"/v1/jobs/{job_id}/logs", json=batch))


def test_a_dump_has_everything_but_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"oidc_client_secret": "planted-oidc-hunter2", "oidc_issuer": "https://issuer.example"}
    settings |= {"oidc_client_id": "shoal", "public_url": "https://shoal.example"}
    monkeypatch.setenv("TEAM_WANDB_API_KEY", OF_THE_SERVER)
    with control_plane(tmp_path / "plane", **settings) as plane:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
            labels = {"note": f"https://me:{PRINTED['address']}@git.example/x"}
            job_id = str(ok(http.post("/v1/jobs", json=job_mapping(labels=labels)))["id"])
            connector = Connector(http=http)
            ok(connector.renew(lease_s=300))
            ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time()).entries))
            printed(http, job_id)
            member = ok(http.post("/v1/tokens", json={"name": "m", "role": "member", "project": "default"}))["secret"]
        with Client(plane.url, plane.token) as client:
            dump = client.debug_dump(job_id)
        with Client(plane.url, member) as client:
            of_a_member = files_of(client.debug_dump(job_id))
        monkeypatch.setenv("SHOAL_SERVER", plane.url)
        monkeypatch.setenv("SHOAL_TOKEN", member)
        monkeypatch.chdir(tmp_path)
        assert cli.run(["debug-dump", job_id, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        token = plane.token
    files = files_of(dump)
    for secret in (OF_THE_SERVER, token, member, "planted-oidc-hunter2", *PRINTED.values()):
        assert [name for name, text in {**files, **of_a_member}.items() if secret in text] == [], secret
    job = json.loads(files["job.json"])
    assert (job["id"], job["status"]["state"], job["spec"]["train"]["steps"]) == (job_id, "succeeded", 60)
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    assert {"plan_adopted", "recovery_done", "step_done"} <= {event["kind"] for event in events}
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert len(json.loads(files["attempts.json"])) == 3
    assert json.loads(files["metrics.json"])["num_points"] == 60
    assert len(json.loads(files["cluster.json"])["snapshot"]["nodes"]) == 4
    assert json.loads(files["settings.json"])["log_level"] == "info"
    assert "only for administrators" in of_a_member["settings.json"]
    assert json.loads(files["versions.json"])["packages"]["sqlalchemy"]
    logs = files["logs.txt"]
    assert "rank 0" in logs and logs.count(REDACTED) >= len(PRINTED)
    # What is no secret stays.
    assert '"steps": 5' in logs and "&part=1" in logs and "tokens: 1,234 in step 7, end_token is </s>" in logs
    assert (
        told["file"] == f"{job_id}-debug.zip"
        and files_of((tmp_path / told["file"]).read_bytes()).keys() == files.keys()
    )


@pytest.mark.parametrize(
    "value",
    [
        "tokens: 5",
        "step 7 of 60",
        "file:///data/text",
        "https://hub.example/a:b",
        "end_token",
        "secretary=Ada",
        7,
        None,
    ],
)
def test_what_is_no_secret_is_left_alone(value: Any) -> None:
    assert Redactor([]).value({"x": [value]}) == {"x": [value]}


def test_names_of_secrets_hide_what_they_name() -> None:
    found = Redactor(["hunter2-known"]).value(
        {"env": {"HF_TOKEN": "x", "A": "with hunter2-known in it"}, "end_token": "</s>", "password": 3, "list": ["a"]}
    )
    assert found == {
        "env": {"HF_TOKEN": REDACTED, "A": f"with {REDACTED} in it"},
        "end_token": "</s>",
        "password": 3,
        "list": ["a"],
    }
