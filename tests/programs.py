"""Programs of others that tests run: beside the interpreter, where tests/*/install.sh put them, or on the path."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def program(name: str) -> str:
    """Its path; the test is skipped by name where it is not there."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found
