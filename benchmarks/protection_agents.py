"""Agents of nodes in processes of their own, which tell what they spend on making steps safe, by part.

Owns the processes and what counts as which part: seconds of a processor of the threads that take sums, send and
receive, and the bytes that came over the network.
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from shoal_recovery.store import open_store
from shoal_workers.agent import Agent
from shoal_workers.lifeline import Lifeline
from shoal_workers.shards import ShardStore
from shoal_workers.wire import Connection

_P = ParamSpec("_P")
_T = TypeVar("_T")

Address = tuple[str, int]
PARTS = ("sums", "send", "receive")
_ONCE = "making slots"  # not in every step
_HOST = "127.0.0.1"
_JOIN_S = 5.0


class Agents:
    """One process for each of `nodes`, from `with` to its end."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-protection-", dir="/dev/shm")
        self._members: list[tuple[multiprocessing.process.BaseProcess, Pipe]] = []
        self.addresses: tuple[Address, ...] = ()

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for node in self._nodes:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, node, Path(self._folder.name) / node), daemon=True)
            process.start()
            self._members.append((process, ours))
        self.addresses = tuple((_HOST, pipe.recv()) for _, pipe in self._members)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in self._members:
            pipe.close()  # an agent whose parent has gone away ends
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def spent(self) -> dict[str, float]:
        """By all of them since they began: seconds by part, those of `rest`, and `received_bytes`."""
        total: Counter[str] = Counter()
        for _, pipe in self._members:
            pipe.send("spent")
            total.update(pipe.recv())
        return dict(total)


class _Watch:
    """Seconds of processors by part, of all threads of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, float] = dict.fromkeys((*PARTS, _ONCE, "received_bytes"), 0.0)
        self._began_s = time.process_time()

    def timed(self, part: str, call: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(call)
        def watched(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            began_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.add(part, time.thread_time() - began_s)

        return watched

    def add(self, what: str, amount: float) -> None:
        with self._lock:
            self._found[what] += amount

    def found(self) -> dict[str, float]:
        with self._lock:
            parts_s = sum(self._found[part] for part in (*PARTS, _ONCE))
            return {**self._found, "rest": time.process_time() - self._began_s - parts_s}


def _serve(pipe: Pipe, node: str, folder: Path) -> None:
    watch = _Watch()
    receive = watch.timed("receive", Connection.read_into)

    def read_into(connection: Connection, view: memoryview) -> None:
        watch.add("received_bytes", view.nbytes)
        receive(connection, view)

    changed: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (ShardStore, "open", watch.timed(_ONCE, ShardStore.open)),
        (ShardStore, "seal", watch.timed("sums", ShardStore.seal)),
        (Connection, "send", watch.timed("send", Connection.send)),
        (Connection, "read_into", read_into),
    )
    for owner, name, call in changed:
        setattr(owner, name, call)
    agent = Agent(
        node=node,
        memory_dir=folder / "memory",
        disk_dir=folder / "disk",
        disk_limit_bytes=0,
        host=_HOST,
        heartbeat_s=1.0,
        open_store=open_store,
        lifeline=Lifeline(cut_off_s=600.0, ends_itself_s=600.0),
    )
    agent.start()
    pipe.send(agent.port)
    try:
        while pipe.recv():
            pipe.send(watch.found())
    except EOFError:
        agent.close()
