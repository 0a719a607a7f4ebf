"""Streams of server-sent events: no more of them than the operator says, of each and in all; those that have ended, in
whatever way, make room."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from urllib.parse import urlsplit

import httpx
import pytest
from control_plane import enter, job_mapping, ok
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from sse_starlette import ServerSentEvent

from shoal_service.auth import COOKIE, csrf_token
from shoal_service.open_streams import OpenStreams, while_allowed

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


@contextlib.contextmanager
def watched(api: httpx.Client, job: str, headers: dict[str, str]) -> Iterator[list[httpx.Response]]:
    """All kinds of streams, open for whoever has these headers."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(streaming(api, path.format(job), headers)) for path in PATHS]


def ended(streams: list[httpx.Response]) -> bool:
    """All of them, each by saying why."""
    until_s, told = time.monotonic() + 40, []
    for stream in streams:
        told.append("")
        for part in stream.iter_text():  # signs of life come all the time
            assert time.monotonic() < until_s, "a stream goes on"
            told[-1] += part
    return all(": you may not read this any more" in each for each in told)


def test_streams_end_when_their_token_is_revoked(
    api: httpx.Client, app: FastAPI, job: str, eventually: Callable[..., object]
) -> None:
    made = ok(api.post("/v1/tokens", json={"name": "watcher", "role": "viewer", "project": "default"}))
    with watched(api, job, {"Authorization": f"Bearer {made['secret']}"}) as streams, streaming(api, "/stream"):
        assert api.delete(f"/v1/tokens/{made['id']}").is_success
        assert ended(streams)
        eventually(lambda: counted(app) == 1, 20)  # and others go on


def test_streams_end_when_their_token_expires(api: httpx.Client, job: str) -> None:
    asked = {"name": "brief", "role": "viewer", "project": "default", "expires_in_s": 6}
    with watched(api, job, {"Authorization": f"Bearer {ok(api.post('/v1/tokens', json=asked))['secret']}"}) as streams:
        assert ended(streams)


def test_streams_end_when_their_browser_signs_out(api: httpx.Client, job: str) -> None:
    with httpx.Client(base_url=api.base_url, timeout=30) as browser:
        enter(browser, ok(api.post("/v1/login-links"))["url"])
        session = {"Cookie": f"{COOKIE}={browser.cookies[COOKIE]}"}
        with watched(api, job, session) as streams:
            out = browser.post("/sign-out", data={"csrf": csrf_token(browser.cookies[COOKIE])})
            assert out.status_code in (200, 303), out.text
            assert ended(streams)


async def test_events_go_on_while_nothing_is_said_against_them_and_not_beyond() -> None:
    answers = iter((True, True, False))

    async def may() -> bool:
        return next(answers)

    async def events() -> AsyncIterator[ServerSentEvent]:
        for number in count():
            yield ServerSentEvent(str(number))

    told = [event async for event in while_allowed(events(), may, every_s=0.0)]
    assert [event.data for event in told] == ["0", "1", None]
