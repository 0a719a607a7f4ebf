"""The control plane as a process: streams that resume, a kill that loses nothing, an end that leaves nobody hanging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, start_control_plane, story
from httpx_sse import connect_sse
from servers import free_ports

from shoal import Client
from shoal_recovery.journal import entry_to_mapping


def begin(http: httpx.Client, **changes: Any) -> tuple[str, Connector]:
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping(**changes)))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    return job_id, connector


def test_arguments_start_no_server(tmp_path: Path) -> None:
    environment = {**os.environ, "SHOAL_DATA_DIR": str(tmp_path / "data"), "SHOAL_PORT": str(free_ports(1)[0])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal_service", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    told, refused = run("--help"), run("serve")
    assert told.returncode == 0 and "takes no arguments: SHOAL_ variables" in " ".join(told.stdout.split())
    assert refused.returncode == 2 and "unrecognized arguments: serve" in refused.stderr
    assert not (tmp_path / "data").exists()


class Watched(httpx.HTTPTransport):
    """Counts the requests that were sent, and the answers that have begun."""

    num_sent = num_answered = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "trace": self._note}
        return super().handle_request(request)

    def _note(self, event: str, _: Any) -> None:
        self.num_sent += event == "http11.receive_response_headers.started"
        self.num_answered += event == "http11.receive_response_headers.complete"


def read_stream(http: httpx.Client, job_id: str, count: int | None, last_id: int | None = None) -> list[Any]:
    """(id, event, data) of `count` events, or of all until the server ends the stream."""
    headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
    found: list[Any] = []
    with connect_sse(http, "GET", f"/v1/jobs/{job_id}/events", params={"watch": "1"}, headers=headers) as source:
        for event in source.iter_sse():
            found.append((event.id, event.event, json.loads(event.data)))
            if len(found) == count:
                break
    return found


def test_a_stream_of_events_resumes_and_ends(http: httpx.Client) -> None:
    job_id, connector = begin(http)
    told = story(job_mapping(), started_at_s=time.time()).entries
    ok(connector.send(job_id, told[:10]))
    first = read_stream(http, job_id, 10)
    assert [int(each[0]) for each in first] == list(range(1, 11))
    assert first[0][1] == "state_changed" and first[0][2]["state"] == "starting"

    rest: list[Any] = []
    reader = threading.Thread(target=lambda: rest.extend(read_stream(http, job_id, None, last_id=10)))
    reader.start()
    for start in range(10, len(told), 7):
        ok(connector.send(job_id, told[start : start + 7]))
    reader.join(timeout=20)
    assert not reader.is_alive()
    assert [int(each[0]) for each in rest[:-1]] == list(range(11, len(told) + 1))
    assert rest[-1][1] == "end" and rest[-1][2]["state"] == "succeeded"
    assert read_stream(http, job_id, None, last_id=len(told))[0][1] == "end"
    refused = http.get(f"/v1/jobs/{job_id}/events", params={"watch": "1"}, headers={"Last-Event-ID": "x"})
    assert (refused.status_code, refused.json()["param"]) == (422, "Last-Event-ID")


def test_a_killed_control_plane_comes_back_with_the_whole_history(
    tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    data_dir = tmp_path / "data"
    plane = start_control_plane(data_dir)
    token = plane.token
    assert (data_dir / "admin.token").stat().st_mode & 0o777 == 0o600
    told = story(job_mapping(), started_at_s=time.time()).entries
    port = int(plane.url.rpartition(":")[2])
    client = Client(plane.url, plane.token)
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
        job_id, connector = begin(http)
        seen: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: seen.extend(client.events(job_id, follow=True)))
        reader.start()
        ok(connector.send(job_id, told[:40]))
        eventually(lambda: len(seen) >= 40)
        plane.kill()
    plane = start_control_plane(data_dir, port)
    try:
        assert plane.token == token
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
            connector = Connector(http=http)
            ok(connector.renew(lease_s=300))
            assert connector.wishes()["jobs"][0]["last_seq"] == 40
            # The connector does not know what arrived, and sends some of it again.
            ok(connector.send(job_id, told[30:]))
        reader.join(timeout=30)
        assert not reader.is_alive()
        assert [event["seq"] for event in seen] == list(range(1, len(told) + 1))
        sent = json.loads(json.dumps([entry_to_mapping(entry) for entry in told]))
        kept = [{key: item for key, item in event.items() if key != "at"} for event in client.events(job_id)]
        assert kept == sent
        assert client.get(job_id)["status"]["state"] == "succeeded"
    finally:
        client.close()
        assert plane.stop() == 0


def test_stopping_ends_streams_and_long_polls_at_once(tmp_path: Path, eventually: Callable[..., Any]) -> None:
    with control_plane(tmp_path / "data") as plane:
        answers: list[Any] = []
        watched = Watched()
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=60, transport=watched) as http:
            job_id, connector = begin(http)
            version = connector.wishes()["version"]
            ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time()).entries[:3]))
            threads = [
                threading.Thread(target=lambda: answers.append(connector.wishes(after=version, wait_s=50))),
                threading.Thread(target=lambda: answers.append(read_stream(http, job_id, None))),
            ]
            sent = watched.num_sent
            threads[0].start()
            eventually(lambda: watched.num_sent == sent + 1)
            threads[1].start()  # once it is answered, the server has read what was sent before
            eventually(lambda: watched.num_answered == sent + 1)
            started_s = time.monotonic()
            assert plane.stop() == 0
            for thread in threads:
                thread.join(timeout=10)
            assert time.monotonic() - started_s < 8
            assert len(answers) == 2


def test_the_python_client(plane: ControlPlane, http: httpx.Client) -> None:
    with Client(plane.url, plane.token) as client:
        job = client.submit(job_mapping(name="from python"), idempotency_key="once")
        assert client.submit(job_mapping(name="from python"), idempotency_key="once")["id"] == job["id"]
        connector = Connector(http=http)
        ok(connector.renew(lease_s=300))
        told = story(job_mapping(), started_at_s=time.time())
        waited: list[Any] = []
        waiting = threading.Thread(target=lambda: waited.append(client.wait(job["id"], timeout_s=30)))
        waiting.start()
        ok(connector.send(job["id"], told.entries))
        waiting.join(timeout=30)
        assert waited[0]["status"]["state"] == "succeeded"
        assert [event["seq"] for event in client.events(job["id"], after=100)] == []
        assert len(list(client.events(job["id"]))) == len(told.entries)
        assert client.plan(job["id"])["plan_id"] == told.plan_id
        assert client.metrics(job["id"])["num_points"] == 60
        assert client.recoveries(job["id"])["total"] == 2
        assert {node["id"] for node in client.nodes()} == {"big-0", "big-1", "spot-0", "spot-1"}
        assert job["id"] in [each["id"] for each in client.list(limit=500)]
