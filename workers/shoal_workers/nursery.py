"""Processes that have loaded what workers of a local cluster need, and fork each of them off themselves.

A worker that starts by itself imports Ray for a second and torch for three, and a local cluster starts a dozen on the
few cores that compute. Here the first process loads torch and the rest once, and forks a nursery for whatever is alike
for Ray: it reads its environment when it is loaded, and that names the raylet and the driver's job. Each of these loads
Ray, forks workers, and ends with its raylet.

Run as `python -m shoal_workers.nursery` with a listening socket as standard input. Whoever connects
(`shoal_workers.forked_worker`) sends one request with its three standard files, and holds the connection: it is told
the id of its process, and then how that ended; where the connection ends first, the process is killed. One that cannot
be forked from here has its connection closed without a word.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_workers.allocator import importing

# What actors import when they begin, and then the actors.
_WITHOUT_RAY = (
    "shoal_recovery.store",
    "shoal_workers.agent",
    "shoal_workers.clouds",
    "shoal_workers.kubernetes",
    "shoal_workers.rank",
    "shoal_workers.supervisor",
)
_WITH_RAY = ("shoal_workers.actor", "shoal_workers.connector", "shoal_workers.supervisor_actor")
_OF_RAY, _RAYLET = "RAY_", "RAY_RAYLET_PID"
_MOST_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _CLONE_NEWNET = 1, 0x40000000


class _Loop:
    """Calls back for files that can be read."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is key:  # what came before may have put an end to it
                    key.data()

    def on(self, file: Any, call: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, call)


class _First(_Loop):
    """Passes what is asked for on to the nursery of all that is alike."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__()
        self._listener = listener
        self._nurseries: dict[frozenset[tuple[str, str]], socket.socket] = {}
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a nursery ended
        self.on(listener, self._accept)

    def _accept(self) -> None:
        asked, _ = self._listener.accept()
        self.on(asked, lambda: self._pass_on(asked))

    def _pass_on(self, asked: socket.socket) -> None:
        self.selector.unregister(asked)
        with contextlib.suppress(OSError), asked:  # it may have gone meanwhile
            sent, files, *_ = socket.recv_fds(asked, _MOST_BYTES, 3)
            try:
                if sent and _is_alike(request := json.loads(sent)):
                    nursery = self._nursery(request["environment"], asked)
                    socket.send_fds(nursery, [sent], [asked.fileno(), *files])
            finally:
                _close(files)

    def _nursery(self, environment: Mapping[str, str], asked: socket.socket) -> socket.socket:
        kind = frozenset(item for item in environment.items() if item[0].startswith(_OF_RAY))
        if kind not in self._nurseries:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            network = _network_of(asked)
            mine = [self._listener, self.selector, asked, ours, *self._nurseries.values()]
            _fork(lambda: _Nursery(theirs, dict(kind), network).serve(), mine)
            theirs.close()
            self._nurseries[kind] = ours
            self.on(ours, lambda: self._forget(kind))
        return self._nurseries[kind]

    def _forget(self, kind: frozenset[tuple[str, str]]) -> None:
        """It has ended, with its raylet or by itself."""
        ended = self._nurseries.pop(kind)
        self.selector.unregister(ended)
        ended.close()


@dataclass(slots=True)
class _Worker:
    pid: int
    pidfd: int
    asked: socket.socket

    def close(self) -> None:
        os.close(self.pidfd)
        self.asked.close()


class _Nursery(_Loop):
    """Of the workers of a raylet and a job, in a process of its own."""

    def __init__(self, requests: socket.socket, of_ray: Mapping[str, str], network: str) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = int(of_ray[_RAYLET])
        raylet = os.pidfd_open(pid)
        _enter(network)
        os.environ.update(of_ray)
        _load(_WITH_RAY)
        import ray

        title: Any = ray._raylet
        title.setproctitle(title_of(pid))
        super().__init__()
        self._requests = requests
        self._workers: dict[int, _Worker] = {}
        self.on(requests, self._fork)
        self.on(raylet, lambda: os._exit(0))  # and what it has forked dies with it

    def _fork(self) -> None:
        sent, files, *_ = socket.recv_fds(self._requests, _MOST_BYTES, 4)
        asked = socket.socket(fileno=files.pop(0))
        mine = [self._requests, self.selector, asked, *self._workers.values()]
        pid = _fork(lambda: _work(json.loads(sent), files), mine)
        _close(files)
        worker = self._workers[pid] = _Worker(pid, os.pidfd_open(pid), asked)
        self.on(worker.pidfd, lambda: self._ended(worker))
        self.on(asked, lambda: self._abandoned(worker))
        with contextlib.suppress(OSError):
            asked.send(str(pid).encode())

    def _ended(self, worker: _Worker) -> None:
        _, status = os.waitpid(worker.pid, 0)
        for file in (worker.pidfd, worker.asked):
            with contextlib.suppress(KeyError):  # it was abandoned before
                self.selector.unregister(file)
        with contextlib.suppress(OSError):
            worker.asked.send(str(os.waitstatus_to_exitcode(status)).encode())
        self._workers.pop(worker.pid).close()

    def _abandoned(self, worker: _Worker) -> None:
        self.selector.unregister(worker.asked)
        signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)


def title_of(raylet: int) -> str:
    """What a nursery calls itself."""
    return f"shoal nursery of raylet {raylet}"


def _is_alike(request: Mapping[str, Any]) -> bool:
    """Whether it would find the same modules. Workers with environments of their own may not."""
    found = request["python"], request["environment"].get("PYTHONPATH")
    return found == (sys.executable, os.environ.get("PYTHONPATH")) and _RAYLET in request["environment"]


def _fork(begin: Callable[[], None], closed: Iterable[Any]) -> int:
    """The id of a process that begins so, without what is to be closed in it."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _die_with_parent()
        for each in closed:
            each.close()
        begin()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(status)  # and never back into what its parent was doing


def _work(request: dict[str, Any], files: list[int]) -> None:
    """A Python program, as if it were started by itself."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    _close(files)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _network_of(asked: socket.socket) -> str:
    """Of who has connected."""
    pid = int.from_bytes(asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
    return f"/proc/{pid}/ns/net"


def _enter(network: str) -> None:
    """Where nodes have networks of their own, what is started on one has that of the node."""
    if os.readlink(network) != os.readlink("/proc/self/ns/net"):
        file = os.open(network, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {network}")
        os.close(file)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _load(names: Iterable[str]) -> None:
    with importing():
        for name in names:
            importlib.import_module(name)


def main() -> None:
    _die_with_parent()
    _load(_WITHOUT_RAY)
    _First(socket.socket(fileno=os.dup(0))).serve()


if __name__ == "__main__":
    main()
