"""What holds for the whole tree: which packages need what, and that importing does nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "shoal_planner": ROOT / "planner",
    "shoal_recovery": ROOT / "recovery",
    "shoal_service": ROOT / "service",
    "shoal": ROOT / "service",
    "shoal_workers": ROOT / "workers",
}
WITHOUT_TENSORS = ("shoal_planner", "shoal_recovery", "shoal_service", "shoal")


def modules_of(package: str) -> list[str]:
    found = pkgutil.walk_packages([str(PACKAGES[package] / package)], f"{package}.")
    return [
        package,
        *(module.name for module in found if not module.name.endswith("__main__") and ".versions" not in module.name),
    ]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("package", WITHOUT_TENSORS)
def test_package_needs_neither_torch_nor_ray(package: str) -> None:
    """As where they are not installed: a module that is None in sys.modules cannot be imported."""
    names = [name for name in modules_of(package) if name != "shoal_service.migrations.env"]
    done = run(
        "import sys, importlib\n"
        "sys.modules.update(torch=None, ray=None)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_does_nothing(package: str) -> None:
    """Nothing is printed, listened on or started."""
    names = [name for name in modules_of(package) if name != "shoal_service.migrations.env"]
    done = run(
        "import importlib, socket, subprocess, threading\n"
        "def refuse(*arguments, **named): raise AssertionError('an import listens or starts a process')\n"
        "socket.socket.bind = refuse\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_an_agent_and_a_supervisor_need_no_torch() -> None:
    """They live as long as a job and are many; only ranks pay for torch."""
    done = run(
        "import sys\n"
        "sys.modules.update(torch=None)\n"
        "import shoal_workers.agent, shoal_workers.supervisor, shoal_workers.connector\n"
    )
    assert done.returncode == 0, done.stderr
