"""The head of a local Shoal's Ray cluster, killed: for a moment, or for good."""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
from collections.abc import Callable

import psutil
from running import Running
from waiting import eventually

_THERE_S = 60.0


def kill_head(running: Running, node: str) -> Callable[[], None]:
    """It comes back by itself, with all that it knew; what waits for that. This node knows where it listens."""
    host, port = running.raylet_flags(node)["gcs-address"].rsplit(":", 1)
    _kill(running)
    return functools.partial(eventually, functools.partial(_listens, host, int(port)), _THERE_S)


def lose_head(running: Running, *, with_memory: bool) -> Callable[[], None]:
    """Nobody brings it back, and ranks step on for a while. Then, in what this returns, whoever owns the machines ends
    what is left on them and makes a new cluster of them all, which knows nothing but what they keep: on their disks
    alone where they had to be started anew."""
    psutil.Process(running.shoal.cluster_pid).suspend()
    _kill(running)

    def renew() -> None:
        running.end_cluster()
        if with_memory:
            shutil.rmtree(running.shoal.memory_dir)
        running.shoal._start_cluster()

    return renew


def _kill(running: Running) -> None:
    for process in psutil.Process(running.shoal.cluster_pid).children():
        if "gcs_server" in process.name():
            process.kill()


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False
