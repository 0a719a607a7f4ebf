"""All tests of this folder need a CUDA device, and are skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal_workers.processes import Processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device is at hand"))


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes(2, timeout_s=300.0) as started:
        yield started
