"""The binding of NCCL and its wires, over a library with NCCL's interface that needs no GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import LAYOUTS, assert_same_bits, job
from host_nccl import run_over_nccl, send_what_nobody_takes

from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, whole_state

SOURCE = Path(__file__).parent.parent / "host_nccl.cpp"
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    flags = ("-O1", "-shared", "-fPIC", "-Wall", "-Wl,-soname,libnccl.so.2")
    subprocess.run([str(COMPILER), *flags, "-o", str(built), str(SOURCE)], check=True, timeout=120)
    return str(built)


@pytest.fixture(scope="module")
def apart() -> Iterator[Processes]:
    """Of this file alone: what they load stays."""
    with Processes(2, timeout_s=120.0) as started:
        yield started


@pytest.mark.parametrize("layout", ["tp 2", "layers 1+5"])
def test_a_plan_over_nccl_has_the_bits_of_one_over_hosts(apart: Processes, library: str, layout: str) -> None:
    request = RunRequest(job=replace(job(), name="nccl"), plan=LAYOUTS[layout], until_step=3)
    reference = apart.run(request)
    assert_same_bits(whole_state(request.job, apart.call(2, run_over_nccl, library, request)), reference.state)


def test_abandoning_ends_transfers_under_way(apart: Processes, library: str) -> None:
    assert max(apart.call(2, send_what_nobody_takes, library)) < 10.0
