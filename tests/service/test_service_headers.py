"""What strangers write into headers: it is refused or left alone, and comes out of no answer."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httpx
import pytest
from control_plane import ControlPlane, job_mapping, ok


def raw(plane: ControlPlane, request: bytes) -> bytes:
    """The answer to bytes that no client of ours would send."""
    where = urlsplit(plane.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as sock:
        sock.sendall(request)
        found = b""
        while part := sock.recv(65536):
            found += part
    return found


@pytest.mark.parametrize(
    "lines",
    [
        b"Authorization: Bearer a\r\n Set-Cookie: b=c",  # a line that goes on
        b"Authorization: Bearer a\x00b",
        b"Authorization: Bearer a\nX-Injected: yes",
        b"X-Name\r\n: value",
        b"X Name: value",
        b"Idempotency-Key: a\rb",
    ],
)
def test_broken_headers_are_refused(plane: ControlPlane, lines: bytes) -> None:
    answer = raw(plane, b"GET /v1/me HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\nConnection: close\r\n\r\n")
    status = int(answer.split(b" ", 2)[1])
    assert status in (400, 401), answer
    assert b"injected" not in answer.lower() and b"set-cookie" not in answer.lower()


def test_a_second_request_in_the_body_of_the_first_is_not_heard(plane: ControlPlane, http: httpx.Client) -> None:
    before = len(ok(http.get("/v1/audit-events", params={"limit": 200}))["items"])
    hidden = b"POST /v1/projects HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + plane.token.encode()
    hidden += b'\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"id": "hidden"}'
    answer = raw(
        plane,
        b"POST /v1/me HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
    )
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert "hidden" not in [each["id"] for each in ok(http.get("/v1/projects"))["items"]]
    assert len(ok(http.get("/v1/audit-events", params={"limit": 200}))["items"]) == before


def test_nobody_is_believed_about_their_address_unless_a_proxy_is_trusted(
    plane: ControlPlane, http: httpx.Client
) -> None:
    forged = {"X-Forwarded-For": "198.51.100.7", "X-Forwarded-Proto": "https", "Forwarded": "for=198.51.100.7"}
    ok(http.post("/v1/jobs", json=job_mapping(), headers=forged))
    newest = ok(http.get("/v1/audit-events", params={"limit": 1}))["items"][0]
    assert (newest["action"], newest["address"]) == ("job.create", "127.0.0.1")
    statuses = []
    for number in range(40):  # nor does another address each time make guesses free
        headers = {"Authorization": f"Bearer shoal_{number}", "X-Forwarded-For": f"198.51.100.{number}"}
        statuses.append(httpx.get(f"{plane.url}/v1/me", headers=headers).status_code)
    assert 429 in statuses and set(statuses) == {401, 429}
    assert ok(http.get("/v1/me"))["kind"] == "administrator"


@pytest.mark.parametrize("key", ["X-CSRF-Token", "Last-Event-ID", "Idempotency-Key", "Accept"])
def test_what_is_sent_does_not_come_back_as_a_header(http: httpx.Client, key: str) -> None:
    odd = "a%0d%0aSet-Cookie:x=y;'\"<script>"
    for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/login"), ("GET", "/nowhere")):
        answer = http.request(method, path, headers={key: odd}, params={"next": odd, "cursor": odd})
        assert answer.status_code < 500
        assert all(odd not in value and "x=y" not in value for value in answer.headers.values()), (method, path)
        assert "<script>a" not in answer.text and odd not in answer.text


@pytest.mark.parametrize(
    "path", ["/v1/jobs", "/v1/me", "/v1/jobs/{}", "/v1/jobs/{}/events", "/openapi.json", "/healthz", "/", "/jobs/{}"]
)
def test_head_is_answered_as_get_without_a_body(plane: ControlPlane, http: httpx.Client, path: str) -> None:
    job_id = ok(http.post("/v1/jobs", json=job_mapping()))["id"]
    got, asked = http.get(path.format(job_id)), http.head(path.format(job_id))
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-type"] == got.headers["content-type"]
    assert asked.headers.get("etag") == got.headers.get("etag")
    head = f"HEAD {path.format(job_id)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {plane.token}\r\n".encode()
    answer = raw(plane, head + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n"), "not a byte of a body"


def test_head_begins_no_stream_and_is_refused_as_get_is(http: httpx.Client) -> None:
    job_id = ok(http.post("/v1/jobs", json=job_mapping()))["id"]
    for path in ("/stream", f"/jobs/{job_id}/stream", f"/v1/jobs/{job_id}/events?watch=1"):
        asked = http.head(path)
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["content-type"].startswith("text/event-stream")
    assert http.head("/v1/jobs/job_x").status_code == 404
    assert http.head("/v1/nope").status_code == 404
    assert http.head("/v1/jobs", params={"limt": "1"}).status_code == 422
    assert httpx.head(f"{http.base_url}/v1/jobs").status_code == 401
    refused = http.head("/v1/plans")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
    assert http.delete("/v1/jobs").headers["allow"] == "GET, HEAD, POST"
    lines = [line for line in http.get("/metrics").text.splitlines() if 'method="HEAD",route="/v1/jobs"' in line]
    assert any(line.startswith("shoal_http_requests_total") for line in lines)
    open_now = [line for line in http.get("/metrics").text.splitlines() if line.startswith("shoal_event_streams")]
    assert open_now and all(line.endswith(" 0.0") for line in open_now)
