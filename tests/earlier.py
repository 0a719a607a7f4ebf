"""The programs as they were before the newest migration was written, out of the history of this checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MIGRATIONS = "service/shoal_service/migrations/versions"
PARTS = ("planner", "service", "workers", "recovery")


def paths(root: Path) -> str:
    """PYTHONPATH of these sources."""
    return os.pathsep.join(str(root / part) for part in PARTS)


def newest_migration(root: Path) -> str:
    return max(path.name for path in (root / MIGRATIONS).glob("v*.py"))


def paths_before(folder: Path) -> str:
    """PYTHONPATH of those, which are put into `folder`; the test is skipped where they cannot be had."""
    path = f"{MIGRATIONS}/{newest_migration(ROOT)}"
    found = _git("log", "--diff-filter=A", "--format=%H", "--", path).split()
    # One that is not in the history yet comes next.
    since = f"{found[-1]}^" if found else "HEAD"
    packed = subprocess.run(["git", "archive", since, *PARTS], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"the version before cannot be had: {packed.stderr.decode().strip()}")
    old = folder / "before"
    old.mkdir()
    subprocess.run(["tar", "-x", "-C", str(old)], input=packed.stdout, check=True)
    assert newest_migration(old) < newest_migration(ROOT)
    return paths(old)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""
