"""Requests that nobody sends by accident: refused one by one, and the server goes on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from control_plane import ControlPlane, control_plane, job_mapping

MAX_BODY_BYTES = 200_000


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    settings = {"max_body_bytes": str(MAX_BODY_BYTES), "body_timeout_s": "1"}
    with control_plane(tmp_path_factory.mktemp("hostile"), **settings) as running:
        yield running


def talk(plane: ControlPlane, *parts: bytes) -> tuple[int, bytes]:
    """Status and the whole answer to what is sent as it is; the connection is then left open by us."""
    host, port = plane.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        for part in parts:
            sock.sendall(part)
        received = b""
        while b"\r\n\r\n" not in received or b"content-length" not in received.lower():
            more = sock.recv(65536)
            if not more:
                break
            received += more
        if received:
            head, _, body = received.partition(b"\r\n\r\n")
            lengths = [
                line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
            ]
            while lengths and len(body) < int(lengths[0]) and (more := sock.recv(65536)):
                body, received = body + more, received + more
    return (int(received.split(b" ", 2)[1]) if received else 0), received


def head(plane: ControlPlane, *lines: str, method: str = "POST", path: str = "/v1/jobs") -> bytes:
    given = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {plane.token}", *lines]
    return "\r\n".join(given).encode("latin-1") + b"\r\n\r\n"


def code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["code"])


def test_bodies_that_are_too_large_are_refused_however_they_are_announced(plane: ControlPlane) -> None:
    announced = head(plane, f"Content-Length: {MAX_BODY_BYTES + 1}", "Content-Type: application/json")
    status, answer = talk(plane, announced)  # and nothing of it is sent
    assert (status, code(answer)) == (413, "body_too_large")
    chunk = b"%x\r\n" % 50_000 + b" " * 50_000 + b"\r\n"
    status, answer = talk(plane, head(plane, "Transfer-Encoding: chunked", "Content-Type: application/json"), chunk * 5)
    assert (status, code(answer)) == (413, "body_too_large")
    status, answer = talk(plane, head(plane, "Content-Length: -1"))
    assert status == 400


def test_a_body_that_does_not_come_is_not_waited_for(plane: ControlPlane) -> None:
    status, answer = talk(plane, head(plane, "Content-Length: 100", "Content-Type: application/json"), b'{"na')
    assert (status, code(answer)) == (408, "body_too_slow")
    assert b"connection: close" in answer.lower()


def test_a_head_that_does_not_come_is_not_waited_for(plane: ControlPlane) -> None:
    assert talk(plane) == (0, b""), "closed without an answer"
    host, port = plane.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head(plane, method="GET")[:-2])
        with pytest.raises(OSError):  # a trickle keeps it open no longer
            for _ in range(300):
                sock.sendall(b"X-More: 1\r\n")
                time.sleep(0.1)


@pytest.mark.parametrize(
    "line",
    [
        "Idempotency-Key: a\rX-Injected: yes",
        "Idempotency-Key: a\nX-Injected: yes",
        "Idempotency-Key: a\x00b",
        "X Bad Name: 1",
    ],
)
def test_headers_that_hold_other_headers_are_refused_or_stay_values(plane: ControlPlane, line: str) -> None:
    body = json.dumps(job_mapping()).encode()
    given = head(plane, line, f"Content-Length: {len(body)}", "Content-Type: application/json")
    status, answer = talk(plane, given, body)
    assert status in (400, 422) or (status == 201 and "\n" in line), answer  # a bare LF ends a line, as a CRLF does
    assert b"x-injected" not in answer.partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/%0d%0aX-Injected:%20yes",
        "/v1/jobs/%00",
        "/v1/jobs/..%2f..%2fetc%2fpasswd",
        "/static/../../settings.py",
        "/static/%2e%2e/%2e%2e/settings.py",
        "/static/..%2f..%2fsettings.py",
        "/v1/clusters/%ff",
        "/v1/jobs/" + "a" * 5000,
    ],
)
def test_paths_that_lead_nowhere(plane: ControlPlane, path: str) -> None:
    status, answer = talk(plane, head(plane, method="GET", path=path))
    assert status in (400, 404, 422), answer[:500]
    assert b"x-injected" not in answer.partition(b"\r\n\r\n")[0].lower() and b"root:" not in answer


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"[" * 50_000, "application/json"),
        (b'{"a":' * 20_000, "application/json"),
        (b"[" * 50_000, "application/yaml"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "application/json"),
        (b'\xff\xfe{"name": 1}', "application/json"),
        (b'{"name": "\\ud800", "model": {"layers": 1}}', "application/json"),
        (b'{"name": "a\\u0000b"}', "application/json"),
        (b"a: &a [1]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\nd: [*c,*c,*c]\n", "application/yaml"),
        (b"!!python/object/apply:os.system ['true']", "application/yaml"),
        (b"name: x", "text/html"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans"])
def test_bodies_that_nobody_means(plane: ControlPlane, body: bytes, kind: str, path: str) -> None:
    given = head(plane, f"Content-Length: {len(body)}", f"Content-Type: {kind}", path=path)
    status, answer = talk(plane, given, body)
    assert status in (400, 415, 422), answer[:500]
    assert b"application/problem+json" in answer


@pytest.mark.parametrize(
    ("path", "allowed"), [("/v1/jobs", "GET, HEAD, POST"), ("/v1/clusters/local", "GET, HEAD, PUT")]
)
def test_a_method_that_is_not_there_names_all_that_are(plane: ControlPlane, path: str, allowed: str) -> None:
    answer = httpx.delete(plane.url + path, headers=plane.headers)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/v1/jobs/", "/nodes/", "/static"])
def test_nobody_is_sent_to_the_host_that_a_request_names(http: httpx.Client, path: str) -> None:
    answer = http.get(path, headers={"Host": "elsewhere.example.org"})
    assert answer.status_code == 404 and "location" not in answer.headers


def test_it_goes_on(plane: ControlPlane) -> None:
    assert httpx.get(f"{plane.url}/v1/health").json() == {"status": "ok"}
