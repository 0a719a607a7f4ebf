"""Fixtures for the tests of recovery: the quick S3 server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer
from servers import boto3_environment


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The endpoint of an S3 server in this process; it accepts any credentials."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def moto_environment(moto: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environment = boto3_environment(moto)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment
