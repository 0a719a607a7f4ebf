"""A campaign against the API by what it says of itself: schemathesis asks a real server, signed in, for whatever its
description allows and does not allow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
from control_plane import Connector, control_plane, job_mapping, ok, story
from described import closed

HOOKS = Path(__file__).with_name("many_addresses.py")
# What a request must look like the description says; what is asked of it beyond that, and why, stands here.
BEYOND_SCHEMAS = {
    "POST /v1/jobs": "fields of a JOB have to fit each other, and what it names has to be there",
    "POST /v1/jobs/{job_id}/clone": "it is a JOB",
    "POST /v1/plans": "a JOB, a CLUSTER, and a plan that fits",
    "POST /v1/jobs/{job_id}/limits": "they have to fit the job",
    "POST /v1/jobs/{job_id}/resize": "at least as many as at most",
    "POST /v1/jobs/{job_id}/journal": "entries follow each other; 1.0 is no whole number here",
    "POST /v1/jobs/{job_id}/logs": "1.0 is no whole number here",
    "PUT /v1/clusters/{cluster_id}": "nodes, links and figures have to fit each other",
    "GET /v1/jobs": "names and labels are printable",
    "GET /v1/jobs/{job_id}/logs": "some filters exclude each other",
    "GET /v1/jobs/{job_id}/metrics": "from a step to a later one",
    "GET /v1/nodes": "a cursor holds JSON",
    "GET /v1/clusters": "a cursor holds JSON",
    "GET /v1/pools": "a cursor holds JSON",
    "GET /v1/prices": "a cursor holds JSON",
    "GET /v1/drills": "a cursor holds JSON",
    "POST /v1/projects/{project_id}/members": "a user or an address, one of the two",
    "POST /v1/tokens": "a project or a cluster goes with some roles alone",
    "POST /v1/webhooks": "an address that can be told something",
    "PATCH /v1/webhooks/{webhook_id}": "an address that can be told something",
    "PUT /v1/projects/{project_id}/storages/{name}": "an endpoint is an address",
}
# Whoever asks is known, and what is asked is well formed; what it is about may be unknown, gone or otherwise by now.
SENSIBLE = ("2xx", "404", "409", "410", "412")
CONFIG = f"""
hooks = "{HOOKS}"
[checks.negative_data_rejection]
# What is said of a query is checked before whether the thing it is about is there, or after.
expected-statuses = ["400", "401", "403", "404", "405", "406", "408", "409", "410", "412", "413", "415", "422"]
"""


def configured(*more: str) -> str:
    """With these statuses of positive requests besides."""
    said = [f"{CONFIG}[checks.positive_data_acceptance]\nexpected-statuses = {json.dumps([*SENSIBLE, *more])}"]
    for name in BEYOND_SCHEMAS:
        said.append(f'[[operations]]\ninclude-name = "{name}"\n[operations.checks.positive_data_acceptance]')
        said.append(f"expected-statuses = {json.dumps([*SENSIBLE, *more, '422'])}")
    return "\n".join(said)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """`cases` that were tried. `is_clean`: the judge found nothing in any answer; what it `said` otherwise. `errors`:
    requests that failed within the server, by its own log."""

    cases: int
    is_clean: bool
    errors: int
    said: str


def campaign(folder: Path, database_url: str, seed: int, examples: int, *more: str, role: str = "") -> Asked:
    """As the administrator, or as a token with this role asks. Raises AssertionError for a server that ended, or a
    judge that tried nothing."""
    (folder / "schemathesis.toml").write_text(configured("403") if role else configured())
    (folder / "places").mkdir()
    settings = {"plan_time_limit_s": "0.5", "max_wait_s": "0.2", "store_check_s": "2", "database_url": database_url}
    # Some jobs are as good as any: what they name is written to.
    settings |= {"file_roots": str(folder / "places"), "behind_proxy": "true"}
    with control_plane(folder / "data", **settings) as plane:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=60) as http:
            job_id = str(ok(http.post("/v1/jobs", json=job_mapping()))["id"])
            connector = Connector(http=http)
            ok(connector.renew())
            ok(connector.send(job_id, story(job_mapping(), started_at_s=1e9).entries))
            token = plane.token
            if role:
                wanted = {"name": role, "role": role, "project": "default"}
                token = str(ok(http.post("/v1/tokens", json=wanted))["secret"])
            (folder / "openapi.json").write_text(json.dumps(closed(ok(http.get("/openapi.json")))))
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(folder / "schemathesis.toml"), "run"]
        command += [
            "openapi.json",
            "--url",
            plane.url,
            "--checks",
            "all",
            "--max-examples",
            str(examples),
            "--seed",
            str(seed),
        ]
        command += ["-H", f"Authorization: Bearer {token}", "--no-color", *more]
        command += ["--suppress-health-check", "all", "--request-timeout", "120"]
        command += ["--max-response-time", "120"]  # on whatever machine: how fast answers are, others judge
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONWARNINGS": ""}
        )
        assert plane.process.poll() is None
        log = (folder / "data" / "log").read_text()
    (folder / "said").write_text(done.stdout + done.stderr)
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted is not None, done.stdout[-3000:] + done.stderr[-3000:]
    return Asked(
        cases=int(counted[1]),
        is_clean=done.returncode == 0,
        errors=log.count("request_failed"),
        said=done.stdout[-20_000:] + done.stderr[-2000:],
    )


def judged(asked: Asked) -> int:
    """How many cases. Raises AssertionError where one of them was not answered as it should be."""
    assert asked.is_clean, asked.said
    assert asked.errors == 0, asked.said
    return asked.cases
