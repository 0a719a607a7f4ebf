"""Processes that have loaded what workers of a local cluster need, and fork each of them off themselves.

A worker that starts by itself imports Ray for a second and torch for three, and a local cluster starts a dozen on the
few cores that compute. Here the first process loads torch and the rest once, and forks a nursery for whatever is alike
for Ray: it reads its environment when it is loaded, and that names the raylet and the driver's job. Each of these loads
Ray, forks workers, and ends with its raylet, or when it has had none for a while.

Run as `python -m shoal_workers.nursery` with a listening socket as standard input. Whoever connects
(`shoal_workers.forked_worker`) says of what kind its process is and then what it is given, and holds the connection: it
is told the id of its process, and then how that ended; where the connection ends first, the process is killed. What
cannot be forked from here has its connection closed without a word. What a process is given it reads itself, after it
was forked: it may hold secrets of a job, of which others get no copy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
# Variables that are read when modules are loaded, or before: what is forked has what they were then.
AT_START = ("LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH", _OF_RAY)
_IDLE_S = 60.0
_MOST_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_NAME, _CLONE_NEWNET = 1, 15, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

Kind = frozenset[tuple[str, str]]


class _Loop:
    """Calls back for files that can be read. Each that it has open is one of these."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        while keys := self._selector.select(self.patience_s()):
            for key, _ in keys:
                if self._selector.get_map().get(key.fd) is key:  # what came before may have put an end to it
                    try:
                        key.data()
                    except Exception:  # of one request, and no reason to end what was forked for others
                        traceback.print_exc()

    def patience_s(self) -> float | None:
        """Nothing for so long is the end."""
        return None

    def on(self, file: Any, call: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def forget(self, file: Any) -> None:
        self._selector.unregister(file)
        _close(file)

    def close(self) -> None:
        """In a process that was forked off this one."""
        for key in list(self._selector.get_map().values()):
            _close(key.fileobj)
        self._selector.close()


class _First(_Loop):
    """Passes whoever asks on to the nursery of all that is alike."""

    def __init__(self, listener: socket.socket, found: Mapping[str, str]) -> None:
        super().__init__()
        self._listener, self._found = listener, found
        self._nurseries: dict[Kind, socket.socket] = {}
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a nursery ended
        self.on(listener, self._accept)

    def _accept(self) -> None:
        asked, _ = self._listener.accept()
        self.on(asked, lambda: self._pass_on(asked))

    def _pass_on(self, asked: socket.socket) -> None:
        files: list[int] = []
        try:
            sent, files, *_ = socket.recv_fds(asked, _MOST_BYTES, 1)
            python, given = json.loads(sent or b"[null, {}]")
            if python == sys.executable and _RAYLET in given and _at_start(given) == self._found:
                kind = frozenset(item for item in given.items() if item[0].startswith(_OF_RAY))
                if kind not in self._nurseries:
                    self._begin(kind, files)
                socket.send_fds(self._nurseries[kind], [b"."], [asked.fileno(), *files])
        finally:
            self.forget(asked)
            for file in files:
                os.close(file)

    def _begin(self, kind: Kind, files: Iterable[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _fork(lambda: _Nursery(theirs, dict(kind)).serve(), (self, ours, *files))
        theirs.close()
        self._nurseries[kind] = ours
        self.on(ours, lambda: self._ended(kind))

    def _ended(self, kind: Kind) -> None:
        self.forget(self._nurseries.pop(kind))


@dataclass(slots=True)
class _Worker:
    pid: int
    pidfd: int
    asked: socket.socket


class _Nursery(_Loop):
    """Of the workers of a raylet and a job, in a process of its own."""

    def __init__(self, requests: socket.socket, of_ray: Mapping[str, str]) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raylet = int(of_ray[_RAYLET])
        pidfd = os.pidfd_open(raylet)
        _libc.prctl(_PR_SET_NAME, name_of(raylet).encode())
        _enter(f"/proc/{raylet}/ns/net")
        os.environ.update(of_ray)
        _load(_WITH_RAY)
        super().__init__()
        self._requests = requests
        self._workers: dict[int, _Worker] = {}
        self.on(requests, self._fork)
        self.on(pidfd, lambda: os._exit(0))  # and what it has forked dies with it

    def patience_s(self) -> float | None:
        return None if self._workers else _IDLE_S

    def _fork(self) -> None:
        sent, files, *_ = socket.recv_fds(self._requests, 1, 2)
        if not sent:
            os._exit(0)
        asked, given = (socket.socket(fileno=file) for file in files)
        try:
            pid = _fork(lambda: _work(given), (self, asked))
        except OSError:
            asked.close()
            raise
        finally:
            given.close()
        worker = _Worker(pid, os.pidfd_open(pid), asked)
        self._workers[pid] = worker
        self.on(worker.pidfd, lambda: self._ended(worker))
        self.on(asked, lambda: self._abandoned(worker))
        with contextlib.suppress(OSError):
            asked.send(str(pid).encode())

    def _ended(self, worker: _Worker) -> None:
        _, status = os.waitpid(worker.pid, 0)
        del self._workers[worker.pid]
        self.forget(worker.pidfd)
        with contextlib.suppress(OSError):
            worker.asked.send(str(os.waitstatus_to_exitcode(status)).encode())
        with contextlib.suppress(KeyError, ValueError):  # it was abandoned before
            self.forget(worker.asked)

    def _abandoned(self, worker: _Worker) -> None:
        self.forget(worker.asked)
        signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)


def name_of(raylet: int) -> str:
    """Of a process that forks its workers, as the kernel has it."""
    return f"nursery {raylet}"


def _at_start(given: Mapping[str, str]) -> dict[str, str]:
    """But for what is Ray's, and what Ray's driver adds, which is read at each call."""
    names = (name for name in given if name.startswith(AT_START) and not name.startswith(_OF_RAY))
    return {name: given[name] for name in names if name != "PYTHONBREAKPOINT"}


def _fork(begin: Callable[[], None], closed: Iterable[Any]) -> int:
    """The id of a process that begins so, without what is to be closed in it. Raises OSError."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    status = 1
    try:
        _die_with_parent(parent)
        for each in closed:
            _close(each)
        begin()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # as an interpreter ends, and never back into what the parent was doing
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _work(given: socket.socket) -> None:
    """A Python program, as if it were started by itself."""
    with given:
        sent, files, *_ = socket.recv_fds(given, _MOST_BYTES, 3)
    request = json.loads(sent)
    os.setpgid(0, 0)  # Ray ends what a worker has started with the group that it is in
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
    np.random.seed()  # or all would draw the same from it
    multiprocessing.current_process().authkey = os.urandom(32)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _close(file: Any) -> None:
    if isinstance(file, int):
        os.close(file)
    else:
        file.close()


def _enter(network: str) -> None:
    """Where nodes have networks of their own, what is started on one has that of the node."""
    if os.readlink(network) != os.readlink("/proc/self/ns/net"):
        file = os.open(network, os.O_RDONLY)
        if _libc.setns(file, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {network}")
        os.close(file)


def _die_with_parent(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _load(names: Iterable[str]) -> None:
    with importing():
        for name in names:
            importlib.import_module(name)


def main() -> None:
    listener, found = socket.socket(fileno=os.dup(0)), _at_start(os.environ)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _load(_WITHOUT_RAY)
    _First(listener, found).serve()


if __name__ == "__main__":
    main()
