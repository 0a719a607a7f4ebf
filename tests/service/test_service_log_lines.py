"""What the control plane logs of itself: lines of JSON with ids by which those that belong together are found."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from control_plane import Connector, control_plane, job_mapping, ok, story
from servers import free_ports
from waiting import eventually


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_carry_ids(tmp_path: Path) -> None:
    with control_plane(tmp_path, log_level="debug") as plane:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
            created = http.post("/v1/jobs", json=job_mapping(), headers={"X-Request-Id": "from-the-proxy.1"})
            job_id = str(created.json()["id"])
            assert created.headers.get_list("x-request-id") == ["from-the-proxy.1"]
            ok(Connector(http=http).renew())
            entries = story(job_mapping(), started_at_s=time.time() - 60).entries
            sent = Connector(http=http).send(job_id, entries)
            read = http.get(f"/v1/jobs/{job_id}")
            forged = http.get("/v1/jobs/job_x", headers={"X-Request-Id": 'a" forged="1'})
            refused = httpx.get(f"{plane.url}/v1/jobs")
    ids = [answer.headers["x-request-id"] for answer in (sent, read, forged, refused)]
    assert len({*ids}) == 4 and all(each.startswith("req_") for each in ids)
    lines = lines_of(tmp_path / "log")
    assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
    assert "u001b" not in (tmp_path / "log").read_text(), "signs for a terminal"
    requests = {line["request_id"]: line for line in lines if line["event"] == "request"}
    assert requests["from-the-proxy.1"].items() >= {
        "method": "POST", "route": "/v1/jobs", "status": 201, "caller": "admin", "level": "info"
    }.items()  # fmt: skip
    assert requests[ids[1]].items() >= {"route": "/v1/jobs/{job_id}", "job": job_id, "level": "debug"}.items()
    assert requests[ids[2]].items() >= {"status": 404, "level": "info"}.items()
    assert requests[ids[3]].items() >= {"status": 401, "caller": None}.items()
    changes = [line for line in lines if line["event"] == "job changed its state"]
    assert changes[-1].items() >= {
        "job": job_id, "project": "default", "state": "succeeded", "epoch": 3, "request_id": ids[0]
    }.items()  # fmt: skip
    text = (tmp_path / "log").read_text()
    assert plane.token not in text and "forged=" not in text


def test_a_terminal_gets_lines_for_people(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    port = free_ports(1)[0]
    environment = {**os.environ, "SHOAL_DATA_DIR": str(tmp_path), "SHOAL_PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-m", "shoal_service"], env=environment, stderr=theirs)
    try:
        os.close(theirs)

        def answers() -> bool:
            assert process.poll() is None
            try:
                return httpx.get(f"http://127.0.0.1:{port}/healthz").is_success
            except httpx.TransportError:
                return False

        eventually(answers, 120)
        assert httpx.get(f"http://127.0.0.1:{port}/v1/jobs").status_code == 401
        said = _line_with(ours, "status=")
        assert "401" in said and "request_id" in said and '{"' not in said
    finally:
        process.terminate()
        process.wait(20)
        os.close(ours)


def _line_with(terminal: int, text: str) -> str:
    said = b""
    while True:
        said += os.read(terminal, 4096)
        for line in re.sub(r"\x1b\[[0-9;]*m", "", said.decode(errors="replace")).splitlines():
            if text in line:
                return line
