"""What the API says of itself holds: schemathesis asks the running server, signed in, for whatever its description
allows and does not allow, and no answer is one that the description lacks, or an error of the server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from control_plane import Connector, control_plane, job_mapping, ok, story
from described import closed
from postgres import RunningPostgres

HOOKS = Path(__file__).parent.parent / "many_addresses.py"
CONFIG = f"""
hooks = "{HOOKS}"
[checks.positive_data_acceptance]
# A JOB and a CLUSTER are checked beyond what a schema can say.
expected-statuses = ["2xx", "400", "401", "403", "404", "409", "410", "412", "422"]
[checks.negative_data_rejection]
# What is said of a query is checked before whether the thing it is about is there, or after.
expected-statuses = ["400", "401", "403", "404", "405", "406", "408", "409", "410", "412", "413", "415", "422"]
"""


def campaign(folder: Path, database_url: str, seed: int, examples: int, *more: str) -> int:
    """The number of cases, none of which failed."""
    (folder / "schemathesis.toml").write_text(CONFIG)
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
        command += ["-H", f"Authorization: Bearer {plane.token}", "--no-color", *more]
        command += ["--suppress-health-check", "all", "--request-timeout", "120"]
        command += ["--max-response-time", "120"]  # on whatever machine: how fast answers are, others judge
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONWARNINGS": ""}
        )
        assert plane.process.poll() is None
        log = (folder / "data" / "log").read_text()
    (folder / "said").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert "request_failed" not in log, log[-5000:]
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted is not None, done.stdout[-3000:]
    return int(counted[1])


@pytest.mark.timeout(600)
def test_answers_are_those_that_are_described(tmp_path: Path) -> None:
    """A few of each route, at random; what lies at the borders of every field is in the campaign."""
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    assert campaign(tmp_path, url, 1, 1, "--phases", "fuzzing") >= 100


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_five_thousand_answers_are_those_that_are_described(
    tmp_path: Path, postgres: RunningPostgres, migrated: str
) -> None:
    """Every field at its borders and beyond them, then at random, then one request after the other. On PostgreSQL,
    which takes fewer values than SQLite."""
    assert campaign(tmp_path, postgres.new_database(migrated), 2, 40) >= 5000
