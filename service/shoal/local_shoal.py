"""Shoal on one machine: a control plane and a local cluster of unequal nodes, as child processes of this one.

Owns their start and end, and the conversation with the local cluster. `shoal up` and `shoal demo` are built on it. The
two children meet over HTTP like any control plane and cluster; this process needs neither FastAPI, Ray nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from shoal.client import Client
from shoal.connect import connector_token
from shoal.errors import ShoalError

CLUSTER_ID = "local"
_SERVER_START_S = 60.0
_CLUSTER_START_S = 180.0
_STOP_S = 30.0
_LAST_BYTES = 2000  # of a log, in an error

# One device that is worth two threads and has room for the whole model, and three half as fast that hold a part of it:
# the kinds differ in fact, and no symmetric plan uses them well.
DEFAULT_CLUSTER: Mapping[str, Any] = {
    "nodes": [
        {"name": "big", "device": "cpu-2t", "count": 1, "host_memory_gib": 4},
        {"name": "small", "device": "cpu-1t", "count": 3, "host_memory_gib": 4, "spot": True},
    ],
    "devices": {"cpu-2t": {"memory_gib": 0.4}, "cpu-1t": {"memory_gib": 0.08}},
}


class LocalShoalFailed(ShoalError):
    """A part did not start, or ended by itself. The message names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """`cluster` in the published format; nodes named in `later` are started by `add`. Port 0 takes a free one. Unless
    it `forks_workers` they start by themselves, as on nodes that are machines of their own."""

    cluster: Mapping[str, Any]
    data_dir: Path
    port: int
    later: tuple[str, ...] = ()
    memory_dir: Path = Path("/dev/shm/shoal")
    forks_workers: bool = True


class LocalShoal:
    """A context: everything is stopped at its end, whatever happened. `say` gets a line on each thing that starts."""

    _cluster_program = "shoal_workers.local"

    def __init__(self, options: LocalOptions, say: Callable[[str], None] = lambda line: None) -> None:
        self._options = options
        self._say = say
        self._server: subprocess.Popen[bytes] | None = None
        self._cluster: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{options.port or free_port()}"

    def __enter__(self) -> Self:
        try:
            self._options.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.start_server()
            self._start_cluster()
        except BaseException:  # Ctrl-C, too, must leave no child behind
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def token(self) -> str:
        return (self._options.data_dir / "admin.token").read_text(encoding="ascii").strip()

    def client(self) -> Client:
        return Client(self.url, self.token)

    @property
    def server_pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    @property
    def data_dir(self) -> Path:
        return self._options.data_dir

    @property
    def cluster_pid(self) -> int:
        """Of the process whose children are the raylets."""
        assert self._cluster is not None
        return self._cluster.pid

    @property
    def memory_dir(self) -> Path:
        """Where nodes keep snapshots; no two of these clusters share it."""
        return self._options.memory_dir / str(os.getpid()) / self.url.rpartition(":")[2]

    def start_server(self) -> None:
        """Also after it was killed. Returns when it answers."""
        if self._server is not None:
            self._server.wait(_STOP_S)
        _check_free(int(self.url.rpartition(":")[2]))
        command = [sys.executable, "-m", "shoal_service"]
        port = self.url.rpartition(":")[2]
        # Alone on its machine, for the user who started it: whatever that user may read and write, jobs may name.
        environment = {
            "SHOAL_DATA_DIR": str(self._options.data_dir),
            "SHOAL_HOST": "127.0.0.1",
            "SHOAL_PORT": port,
            "SHOAL_FILE_ROOTS": "/",
            "SHOAL_WEBHOOK_PRIVATE": "true",
            "SHOAL_TRACKING_PRIVATE": "true",
        }
        with self._log("server").open("ab") as log:
            self._server = subprocess.Popen(
                command, env=_environment(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._await_server()
        self._say(f"control plane  {self.url}")

    def kill(self, *nodes: str) -> float:
        """The nodes vanish at once, as machines do: SIGKILL to all their processes, their folders deleted. When, by the
        wall clock."""
        blow_s: float = self._command({"do": "kill", "nodes": list(nodes)})["at_s"]
        return blow_s

    def add(self, node: str) -> None:
        """Starts a node of the cluster file that was left for later, or one that was killed."""
        self._command({"do": "add", "node": node})

    def pids(self, node: str) -> dict[str, Any]:
        """`raylet`, and `all` processes of the node."""
        return self._command({"do": "pids", "node": node})

    def wait(self) -> None:
        """Returns when a part has ended by itself. Raises LocalShoalFailed then."""
        while True:
            for part, process in (("server", self._server), ("cluster", self._cluster)):
                if process is not None and process.poll() is not None:
                    raise LocalShoalFailed(f"the {part} ended with status {process.returncode}{self._told(part)}")
            time.sleep(0.5)

    def stop(self) -> None:
        if self._cluster is not None and self._cluster.poll() is None:
            assert self._cluster.stdin is not None
            with contextlib.suppress(OSError):  # it may be gone already
                self._cluster.stdin.close()  # the end of its commands is its order to stop
            _end(self._cluster, None)
        if self._cluster is not None:
            self._stream("stdout").close()
        if self._server is not None and self._server.poll() is None:
            _end(self._server, signal.SIGTERM)
        with contextlib.suppress(OSError):  # the cluster removed what was in it; another one of this process may use it
            self.memory_dir.parent.rmdir()

    def _await_server(self) -> None:
        assert self._server is not None
        deadline_s = time.monotonic() + _SERVER_START_S
        while time.monotonic() < deadline_s:
            if self._server.poll() is not None:
                break
            with contextlib.suppress(ShoalError, OSError):
                with self.client() as client:
                    client.nodes()
                return
            time.sleep(0.1)
        raise LocalShoalFailed(f"the control plane does not answer at {self.url}{self._told('server')}")

    def _start_cluster(self) -> None:
        with self._log("cluster").open("a", encoding="utf-8") as log:
            self._cluster = subprocess.Popen(
                [sys.executable, "-m", self._cluster_program],
                env=_environment({}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        start = {
            "cluster": self._options.cluster,
            "cluster_id": CLUSTER_ID,
            "data_dir": str(self._options.data_dir),
            "memory_dir": str(self.memory_dir),
            "later": list(self._options.later),
            "forks_workers": self._options.forks_workers,
            "server": self.url,
            "token": self._connector_token(),
        }
        self._write(start)
        timer = threading.Timer(_CLUSTER_START_S, self._cluster.kill)
        timer.start()
        try:
            while (answer := self._read())["event"] != "ready":
                if answer["event"] == "error":
                    raise LocalShoalFailed(f"{answer['problem']}; see {self._log('cluster')}")
                if answer["event"] == "stopped":  # it could not go on, as where a node does not start in time
                    raise LocalShoalFailed(f"the local cluster could not be started{self._told('cluster')}")
                self._say(f"node started   {answer['node']}")
        finally:
            timer.cancel()

    def _connector_token(self) -> str:
        """A new one for each cluster; those of clusters before it in this data folder are refused from now on."""
        with self.client() as client:
            for token in client.people.tokens():
                if token["cluster_id"] == CLUSTER_ID and token["valid"]:
                    client.people.revoke_token(token["id"])
            return connector_token(client, CLUSTER_ID)

    def _command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._write(command)
            answer = self._read()
        if answer["event"] == "error":
            raise LocalShoalFailed(answer["problem"])
        return answer

    def _write(self, line: Mapping[str, Any]) -> None:
        stream = self._stream("stdin")
        try:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
        except OSError as error:
            raise LocalShoalFailed(f"the local cluster is gone{self._told('cluster')}") from error

    def _read(self) -> dict[str, Any]:
        line = self._stream("stdout").readline()
        if not line:
            raise LocalShoalFailed(f"the local cluster did not start or is gone{self._told('cluster')}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stream(self, name: str) -> IO[str]:
        stream: IO[str] | None = getattr(self._cluster, name)
        assert stream is not None
        return stream

    def _log(self, part: str) -> Path:
        return self._options.data_dir / f"{part}.log"

    def _told(self, part: str) -> str:
        """What it said last, and where the rest stands, for the end of a sentence."""
        with self._log(part).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        return f"{': ' if last else ''}{last}; see {self._log(part)}"


def _check_free(port: int) -> None:
    """Before anything is started: the control plane itself would say it in a log."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        problem = f"cannot be listened on: {os.strerror(error.errno or 0)}; choose another one, or 0 for a free one"
        raise LocalShoalFailed(f"--port {port}: {problem}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's own, for its children."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", **changes}


def _end(process: subprocess.Popen[Any], how: signal.Signals | None) -> None:
    if how is not None:
        process.send_signal(how)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
