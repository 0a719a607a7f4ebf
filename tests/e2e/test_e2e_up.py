"""`shoal up` as a service manager has it: started in the background, ended with SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from servers import free_ports
from waiting import eventually

LIMIT_S = 120.0
CLUSTER = "nodes: [{name: only, device: cpu-1t, host_memory_gib: 2}]"


@pytest.mark.cluster
def test_a_termination_stops_all_that_was_started(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    said = tmp_path / "said"
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "up"]
    (port,) = free_ports(1)
    options = ["--port", str(port), "--data-dir", str(tmp_path / "data"), "--cluster", str(tmp_path / "cluster.yaml")]
    with said.open("w", encoding="utf-8") as stderr:
        shoal = subprocess.Popen([*command, *options], stderr=stderr, env={**os.environ, "SHOAL_TOKEN": ""})
    try:
        eventually(lambda: "Ctrl-C stops all of it" in said.read_text("utf-8") or shoal.poll() is not None, LIMIT_S)
        shoal.send_signal(signal.SIGTERM)
        assert shoal.wait(LIMIT_S) == 0, said.read_text("utf-8")
    finally:
        shoal.kill()
    assert "stopping" in said.read_text("utf-8")
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0, "the control plane still answers"
