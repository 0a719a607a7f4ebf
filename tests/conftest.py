"""Fixtures for all tests. The plain modules beside this file (`servers`, `waiting`) can be imported by name as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from servers import ProgramMissing, RunningServer, new_place, start_rclone, start_seaweedfs
from time_budget import ROOT, TimeBudget, sources_of
from waiting import eventually as wait_until

# How long an example takes says nothing on a machine that others use, too.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-seeds", default="0-49", help="of the long test of random faults, as A-B")
    parser.addoption("--fault-out", default="build/faults", help="where it files what came of them, and goes on")
    parser.addoption("--within", type=float, metavar="MINUTES", help="begin nothing that would not end in time")
    parser.addoption("--ended", default="build/long.jsonl", help="where --within keeps how tests ended")


def pytest_configure(config: pytest.Config) -> None:
    within = config.getoption("--within")
    if within is not None:
        budget = TimeBudget(Path(config.getoption("--ended")), sources_of(ROOT), within * 60)
        config.pluginmanager.register(budget, "time budget")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What failed once and then passed says why: it may be a fault that seldom shows."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"before its rerun: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.write_sep("-", title)
            terminalreporter.write_line(text)


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """`eventually(check, timeout_s)`: what `check` returns once that is true, or its AssertionError."""
    return wait_until


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real S3 server for the whole session. Take `s3_uri` for a place of your own on it."""
    server = start_seaweedfs(tmp_path_factory.mktemp("seaweedfs"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A second real S3 server, of those that ignore the condition of a conditional write."""
    try:
        server = start_rclone(tmp_path_factory.mktemp("rclone"))
    except ProgramMissing as missing:  # of an environment that was made before this one was a dependency
        pytest.skip(str(missing))
    yield server
    server.stop()


@pytest.fixture
def rclone_environment(rclone: RunningServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environment = rclone.environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture
def s3_environment(seaweedfs: RunningServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What boto3 finds in this test, and what a process that this test starts must be given."""
    environment = seaweedfs.environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture
def s3_uri(s3_environment: dict[str, str]) -> str:
    """An empty place."""
    return new_place()
