"""The processes that a local cluster forks its workers off; `shoal_workers.nursery` says how."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import ray._private.workers

from shoal_workers.nursery import AT_START, name_of

# What raylets are to start in place of Ray's own.
WORKER = str(Path(__file__).with_name("forked_worker.py"))
_RAYS_WORKER = str(Path(ray._private.workers.__file__).with_name("default_worker.py"))
_BACKLOG = 64


class Nurseries:
    """`folder` is where their socket goes, whose path must be short; whoever owns it deletes it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / "nursery")
        Path(path).unlink(missing_ok=True)  # of a cluster before this one that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(_BACKLOG)  # by now, so that a worker that comes before the first nursery waits for it
            command = [sys.executable, "-m", "shoal_workers.nursery"]
            self._first = subprocess.Popen(command, stdin=listener.fileno(), stdout=subprocess.DEVNULL)
        # What the environment of raylets must have.
        told = {"socket": path, "worker": _RAYS_WORKER, "at_start": AT_START}
        self.environment = {"SHOAL_NURSERY": json.dumps(told)}

    def processes(self, raylet: int) -> list[psutil.Process]:
        """What was forked for this raylet, and what forked it."""
        found: list[psutil.Process] = []
        for nursery in psutil.Process(self._first.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if nursery.name() == name_of(raylet):
                    found += [nursery, *nursery.children(recursive=True)]
        return found

    def close(self) -> None:
        self._first.kill()
        self._first.wait()
