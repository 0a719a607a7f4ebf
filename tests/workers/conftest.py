"""Processes that stay for the whole session: importing torch costs more than most of what the tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal_workers.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes(8, timeout_s=180.0) as started:
        yield started
