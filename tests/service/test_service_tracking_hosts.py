"""The operator's credentials for trackers go where the operator said; a job's own address reaches nothing private."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, control_plane, job_mapping, ok, story
from waiting import eventually

from shoal_planner.job import job_to_mapping, parse_job
from shoal_service.settings import Settings
from shoal_service.sinks import Order, SinkFailed
from shoal_service.track_child import Child
from shoal_service.tracking_hosts import Reach, TrackingHosts, named_origins, origin_of

LIMIT_S = 120.0
HELD = "held-by-the-operator"
NAMED = TrackingHosts(named=named_origins(["https://mlflow.example/tracking", "http://mlflow:5000"]))


class Server:
    """Keeps what it is asked with, and knows nothing."""

    def __init__(self) -> None:
        self.heard: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.heard.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(404)
                self.end_headers()

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture
def of_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials wherever MLflow, and what it asks with, look for them."""
    home = tmp_path / "home"
    (home / ".mlflow").mkdir(parents=True)
    (home / ".mlflow/credentials").write_text(
        f"[mlflow]\nmlflow_tracking_username = me\nmlflow_tracking_password={HELD}"
    )
    (home / ".netrc").write_text(f"machine 127.0.0.1 login me password {HELD}\n")
    (home / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", HELD)


def mlflow(uri: str) -> dict[str, Any]:
    return {"mlflow": {"tracking_uri": uri}}


def asked_with(plane_settings: dict[str, str], server: Server, folder: Path) -> list[str | None]:
    """The credentials with which a job's MLflow server at this address is asked."""
    track = mlflow(server.url)
    with (
        control_plane(folder, **plane_settings) as plane,
        httpx.Client(base_url=plane.url, headers=plane.headers) as http,
    ):
        job_id = str(ok(http.post("/v1/jobs", json=job_mapping(track=track)))["id"])
        connector = Connector(http=http)
        ok(connector.renew(lease_s=300))
        ok(connector.send(job_id, story(job_mapping(track=track), started_at_s=time.time()).entries[:20]))
        eventually(lambda: server.heard, LIMIT_S)
    return [each.get("authorization") for each in server.heard]


@pytest.mark.usefixtures("of_operator")
def test_a_jobs_own_address_is_asked_without_the_operators_credentials(server: Server, tmp_path: Path) -> None:
    assert set(asked_with({"tracking_private": "true"}, server, tmp_path / "data")) == {None}


@pytest.mark.usefixtures("of_operator")
def test_an_address_that_the_operator_names_is_asked_with_them(server: Server, tmp_path: Path) -> None:
    assert None not in asked_with({"tracking_hosts": f"{server.url}/"}, server, tmp_path / "data")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://127.0.0.1:5000", "must begin with https://"),
        ("https://127.0.0.1:5000", "an address of a private network"),
        ("https://[::1]/", "an address of a private network"),
        ("HTTPS://169.254.169.254", "an address of a private network"),
        ("https://localhost", "a name of a private network"),
        ("http://mlflow.example", "must begin with https://"),
    ],
)
def test_private_addresses_are_refused_before_a_job_is_made(http: httpx.Client, uri: str, says: str) -> None:
    for dry in ({}, {"dry_run": "1"}):
        refused = http.post("/v1/jobs", params=dry, json=job_mapping(track=mlflow(uri)))
        assert (refused.status_code, refused.json()["param"]) == (422, "track.mlflow.tracking_uri"), refused.text
        assert says in refused.json()["detail"] and "SHOAL_TRACKING_HOSTS" in refused.json()["detail"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_name_that_becomes_a_private_address_is_not_connected_to(
    server: Server, tmp_path: Path, host: str
) -> None:
    spec = job_to_mapping(parse_job(job_mapping(track=mlflow(server.url.replace("127.0.0.1", host)))))
    order = Order(
        tool="mlflow",
        job_id="job_1",
        name="x",
        spec=spec,
        created_at_s=1.7e9,
        url=None,
        generation=1,
        position={},
        folder=str(tmp_path),
    )
    child = await Child.start(LIMIT_S, Reach(credentials=False, private=False))
    with pytest.raises(SinkFailed, match=r"127\.0\.0\.1 is an address of a private network|::1 is an address"):
        await child.open(order)
    await child.close(LIMIT_S)
    assert not server.heard


@pytest.mark.parametrize(
    ("uri", "reach"),
    [
        ("https://mlflow.example", Reach(credentials=True, private=True)),
        ("https://MLFLOW.example:443/other", Reach(credentials=True, private=True)),
        ("http://mlflow:5000", Reach(credentials=True, private=True)),
        ("databricks", Reach(credentials=True, private=True)),
        ("databricks://team", Reach(credentials=True, private=True)),
        ("http://mlflow.example", Reach(credentials=False, private=False)),
        ("https://mlflow.example:8443", Reach(credentials=False, private=False)),
        ("https://mlflow.example.evil.example", Reach(credentials=False, private=False)),
        ("https://evil.example/mlflow.example", Reach(credentials=False, private=False)),
        ("https://evil.example\\@mlflow.example", Reach(credentials=False, private=False)),
        ("https://mlflow.example\t.evil.example", Reach(credentials=False, private=False)),
        ("sqlite:////srv/mlflow.db", Reach(credentials=False, private=False)),
    ],
)
def test_who_gets_credentials(uri: str, reach: Reach) -> None:
    assert NAMED.reach("mlflow", {"tracking_uri": uri}) == reach


def test_the_operators_own_server_is_named_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert Settings(tracking_hosts="https://a.example").trackers.named == {
        ("http", "127.0.0.1", 5000),
        ("https", "a.example", 443),
    }
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////srv/mlflow.db")
    assert Settings().trackers.named == set()


@pytest.mark.parametrize("value", ["mlflow.example", "https://", "https://a.example,ftp://b.example"])
def test_a_host_that_is_none_is_refused_when_the_server_starts(value: str) -> None:
    with pytest.raises(ValueError, match=r"must be http\(s\)://HOST"):
        Settings(tracking_hosts=value)


def test_what_parsers_may_differ_about_is_nobodys() -> None:
    for uri in ("https://a\\b", "https://a b", "https://me:pw@a", "https://a:99999", "https://[::1", "https:", "//a"):
        assert origin_of(uri) is None, uri
