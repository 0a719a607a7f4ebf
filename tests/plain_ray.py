"""A Ray cluster as its users start one, with `ray start`: its head keeps what it knows in memory, and ends with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from servers import free_ports
from waiting import eventually

_START_S = 180.0
_PROGRAMS = Path(sys.executable).parent
_OBJECT_STORE_BYTES = 80_000_000


class PlainRay:
    """A head that computes nothing. `folder` holds what nodes keep on disks and in memory, by cluster and node, and the
    logs; Ray's own files go to `ray_dir`, whose path must be short. Owns its processes, and ends no others. Its head is
    given `head_options` and `environment` beside the usual ones."""

    def __init__(
        self,
        folder: Path,
        ray_dir: Path,
        head_options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self._folder = folder
        self._ray_dir = ray_dir
        self._head_options = head_options
        self._env = {
            **os.environ,
            "SHOAL_WORKER_MEMORY_DIR": str(folder / "memory"),
            "SHOAL_WORKER_DISK_DIR": str(folder / "disk"),
            "SHOAL_WORKER_BIND_HOST": "127.0.0.1",
            "SHOAL_WORKER_ADVERTISE_HOST": "127.0.0.1",
            "SHOAL_WORKER_SILENCE_S": "5",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            **(environment or {}),
        }
        self._started: dict[str, psutil.Process] = {}
        self._known: dict[int, psutil.Process] = {}
        port = port or free_ports(1)[0]
        self.address = f"127.0.0.1:{port}"
        self.start_head()

    @property
    def environment(self) -> Mapping[str, str]:
        """Of processes that are to find it."""
        return self._env

    def start_head(self) -> None:
        """Again only after `kill("head")`: it is another one at the same address."""
        port = self.address.rpartition(":")[2]
        usual = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._ray_dir}")
        self._start("head", *usual, *self._head_options)

    def add(self, name: str, device: str = "cpu-1t") -> None:
        labels = {"device": device, "node": name, "host-memory-bytes": str(2 * 2**30)}
        said = ",".join(f"shoal.io/{key}={value}" for key, value in labels.items())
        self._start(name, f"--address={self.address}", f"--labels={said}")

    def connect(self, cluster_id: str, environment: Mapping[str, str]) -> None:
        """`environment` names the control plane."""
        options = ("--server", environment["SHOAL_SERVER"], "--cluster-id", cluster_id, "--address", self.address)
        done = subprocess.run(
            [str(_PROGRAMS / "shoal"), "connect", *options],
            env={**self._env, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def kill(self, name: str) -> None:
        """A node with all that runs on it."""
        self._look()
        for process in (*self._started[name].children(recursive=True), self._started[name]):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_head(self) -> None:
        """What knows the cluster, alone; what `ray start` makes of that is up to Ray."""
        self._look()
        (gcs,) = [each for each in self._started["head"].children(recursive=True) if "gcs_server" in each.name()]
        gcs.kill()

    def of_title(self, title: str) -> list[psutil.Process]:
        """Its living processes whose title begins so."""
        self._look()
        found = []
        for process in self._known.values():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.is_running() and " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return found

    def stop(self) -> None:
        self._look()
        for process in self._known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(self._known.values()), timeout=10)

    def _start(self, name: str, *options: str) -> None:
        command = [str(_PROGRAMS / "ray"), "start", "--block", "--num-cpus=1", "--disable-usage-stats", *options]
        command.append(f"--object-store-memory={_OBJECT_STORE_BYTES}")
        log = self._folder / f"{name}.log"
        with log.open("wb") as file:
            started = psutil.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._started[name] = started

        def runs() -> bool:
            assert started.is_running(), log.read_text()
            return "Ray runtime started" in log.read_text()

        try:
            eventually(runs, _START_S)
        except BaseException:
            self.stop()
            raise

    def _look(self) -> None:
        """Children of who has died are found no more."""
        for process in self._started.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in (process, *process.children(recursive=True)):
                    self._known[each.pid] = each
