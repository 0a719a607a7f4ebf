"""Fixtures for all tests. The plain modules beside this file (`servers`, `waiting`) can be imported by name as well."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import RunningServer, start_seaweedfs
from waiting import eventually as wait_until


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """`eventually(check, timeout_s)`: what `check` returns once that is true, or its AssertionError."""
    return wait_until


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real S3 server for the whole session. Take `s3_uri` for a place of your own on it."""
    server = start_seaweedfs(tmp_path_factory.mktemp("seaweedfs"))
    with contextlib.closing(_Stopping(server)):
        yield server


@pytest.fixture
def s3_environment(seaweedfs: RunningServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What boto3 finds in this test, and what a process that this test starts must be given."""
    environment = seaweedfs.environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture
def s3_uri(s3_environment: dict[str, str]) -> str:
    """An empty place in a new bucket."""
    return new_bucket()


def new_bucket() -> str:
    """Where boto3's configuration points to."""
    import boto3

    bucket = f"shoal-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    client.close()
    return f"s3://{bucket}/checkpoints"


class _Stopping:
    def __init__(self, server: RunningServer) -> None:
        self.close = server.stop
