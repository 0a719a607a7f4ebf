"""Streams of server-sent events: no more of them than the operator says, of each and in all; those that have ended, in
whatever way, make room."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from control_plane import job_mapping, ok
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from shoal_service.open_streams import OpenStreams

FEW = pytest.mark.parametrize("settings", [{"max_streams": 3, "max_streams_each": 2}], indirect=True)
PATHS = ("/stream", "/jobs/{}/stream", "/v1/jobs/{}/events?watch=1", "/v1/jobs/{}/logs?watch=1")


@pytest.fixture
def job(api: httpx.Client) -> str:
    return str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])


def make_token(api: httpx.Client, name: str) -> dict[str, str]:
    made = ok(api.post("/v1/tokens", json={"name": name, "role": "viewer", "project": "default"}))
    return {"Authorization": f"Bearer {made['secret']}"}


@contextlib.contextmanager
def streaming(api: httpx.Client, path: str, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
    """Counted from when its head has come."""
    with httpx.Client(base_url=api.base_url, headers=headers or api.headers, timeout=30) as client:
        with client.stream("GET", path) as answer:
            assert answer.status_code == 200
            yield answer


def counted(app: FastAPI) -> int:
    return len(app.state.services.streams)


@FEW
@pytest.mark.parametrize("path", PATHS)
def test_one_stream_too_many_is_refused_and_room_comes_back(
    api: httpx.Client, app: FastAPI, job: str, path: str, eventually: Callable[..., object]
) -> None:
    url = path.format(job)
    with streaming(api, PATHS[0]), streaming(api, url):
        refused = api.get(url)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["retry-after"] == "30"
        assert "2 event streams open" in refused.json()["detail"]
        assert counted(app) == 2
    eventually(lambda: counted(app) == 0, 20)
    with streaming(api, url):
        assert counted(app) == 1


@FEW
def test_others_have_their_own_until_the_server_has_as_many_as_it_holds(
    api: httpx.Client, app: FastAPI, job: str
) -> None:
    first, second = make_token(api, "first"), make_token(api, "second")
    with streaming(api, "/stream"), streaming(api, "/stream"), streaming(api, f"/jobs/{job}/stream", first):
        refused = api.get(f"/v1/jobs/{job}/events?watch=1", headers=second)
        assert (refused.status_code, refused.json()["code"]) == (503, "streams_exhausted")
        assert refused.headers["retry-after"] == "30"
        assert ok(api.get(f"/v1/jobs/{job}/events", headers=second))["items"] is not None, "pages are answered"
        assert counted(app) == 3


@FEW
def test_a_reader_that_vanishes_is_not_counted_any_more(
    api: httpx.Client, app: FastAPI, job: str, eventually: Callable[..., object]
) -> None:
    where = urlsplit(str(api.base_url))
    head = f"GET /stream HTTP/1.1\r\nHost: x\r\nAuthorization: {api.headers['authorization']}\r\n\r\n".encode()
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            gone = [
                stack.enter_context(socket.create_connection((where.hostname, where.port), timeout=30))
                for _ in range(2)
            ]
            for sock in gone:
                sock.sendall(head)
                assert b"200 OK" in sock.recv(4096)
                # What it has not read is thrown away: the other side gets a reset, as of a process that was killed.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert counted(app) == 2
        eventually(lambda: counted(app) == 0, 20)
    families = text_string_to_metric_families(api.get("/metrics").text)
    open_now = [one.value for family in families if family.name == "shoal_event_streams" for one in family.samples]
    assert sum(open_now) == 0


def test_who_has_none_left_takes_no_memory() -> None:
    streams = OpenStreams(each=1, in_all=10)
    for subject in map(str, range(1000)):
        with streams.one_more(subject):
            assert len(streams) == 1
    assert not streams._of
