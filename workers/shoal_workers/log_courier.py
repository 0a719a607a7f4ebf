"""Brings the lines that are printed on the nodes of a cluster to its control plane, beside the journals of its jobs:
neither waits for the other.

Owns what is under way, which is bounded: where the control plane takes nothing, lines wait here as long as there is
room (so that the loss of their node does not take them along) and then with the agents. Agents keep what was not taken
yet, so a courier may die; lines that it brings twice are told by their numbers.
"""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from shoal_workers import messages as m
from shoal_workers.control_plane import ControlPlaneDown
from shoal_workers.nodes import Cluster, NodeSeen, NodeUnreachable
from shoal_workers.rows import Row
from shoal_workers.wire import Connection, ConnectionClosed, connect

log = structlog.get_logger()

_POLL_S = 5.0
_PATIENCE_S = 20.0  # with an agent that does not answer
_TOGETHER_S = 0.3  # lines of all nodes wait so long for each other, for they are stored together
_ASKED_BYTES = 2**20
_AT_ONCE_BYTES = 2**21
_UNDER_WAY_BYTES = 2**25
_ROW_BYTES = 150
_RETRY_S = (0.5, 10.0)


class Taker(Protocol):
    """Where lines go."""

    def bring_logs(self, job: str, sources: list[dict[str, Any]]) -> None:
        """Returns when they are stored, or refused for good. Raises ControlPlaneDown."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Lines of one agent's life; `reader` is told when they stand elsewhere."""

    reader: _Reader
    life: str
    rows: list[Row]

    @property
    def num_bytes(self) -> int:
        return sum(len(row[-1]) + _ROW_BYTES for row in self.rows)


class LogCourier:
    """`busy`: whether any job may print; otherwise no node is asked that is not asked already."""

    def __init__(self, cluster: Cluster, taker: Taker, busy: Callable[[], bool]) -> None:
        self._cluster, self._taker, self._busy = cluster, taker, busy
        self._batches: list[_Batch] = []
        self._taken: list[_Batch] = []  # which are brought just now
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._readers: dict[str, _Reader] = {}
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()
        for reader in list(self._readers.values()):
            reader.close()

    def put(self, batch: _Batch) -> None:
        """Waits until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes < _UNDER_WAY_BYTES or self._closed.is_set())
            self._batches.append(batch)
            self._num_bytes += batch.num_bytes
            self._changed.notify_all()

    def under_way(self, node: str) -> int:
        """How many lines of this node are here, and not yet with the control plane."""
        with self._changed:
            return sum(len(batch.rows) for batch in (*self._batches, *self._taken) if batch.reader.node == node)

    def look(self) -> None:
        """To be called now and then, by one thread: every node that is there while jobs run is read from, until it is
        gone."""
        if not self._busy():
            return
        seen = {each.incarnation: each for each in self._cluster.nodes()}
        self._readers = {key: reader for key, reader in self._readers.items() if reader.alive}
        for key in seen.keys() - self._readers.keys():
            self._readers[key] = _Reader(self._cluster, seen[key], self.put)

    def bring(self) -> None:
        """Until it is closed."""
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: bool(self._batches), _POLL_S)
            if not self._batches or self._closed.wait(_TOGETHER_S):
                continue
            self._take()
            for job, sources in _by_job(self._taken).items():
                self._deliver(job, sources)
            for batch in self._taken:
                batch.reader.has(batch.life, batch.rows[-1][0])
            with self._changed:
                self._num_bytes -= sum(batch.num_bytes for batch in self._taken)
                self._taken = []
                self._changed.notify_all()

    def _take(self) -> None:
        num_bytes = 0
        with self._changed:
            while self._batches and num_bytes < _AT_ONCE_BYTES:
                self._taken.append(self._batches.pop(0))
                num_bytes += self._taken[-1].num_bytes

    def _deliver(self, job: str, sources: list[dict[str, Any]]) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                self._taker.bring_logs(job, sources)
                return
            except ControlPlaneDown as error:
                if not failures:
                    log.warning("printed lines wait", job=job, why=str(error))
                failures += 1
                self._closed.wait(min(_RETRY_S[1], _RETRY_S[0] * 2 ** min(failures - 1, 10)))


def _by_job(batches: list[_Batch]) -> dict[str, list[dict[str, Any]]]:
    """What each job's lines are brought as: those of one agent in the order of their numbers."""
    lines: defaultdict[str, defaultdict[tuple[str, str], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for batch in batches:
        for number, job, *rest in batch.rows:
            lines[job][batch.reader.node, batch.life].append([number, *rest])
    return {
        job: [{"node": node, "life": life, "lines": rows} for (node, life), rows in sorted(of_job.items())]
        for job, of_job in lines.items()
    }


class _Reader:
    """Asks the agent of one node for lines, in a thread of its own, until the node is gone."""

    def __init__(self, cluster: Cluster, seen: NodeSeen, put: Callable[[_Batch], None]) -> None:
        self.node = seen.node.id
        self._cluster, self._seen, self._put = cluster, seen, put
        self._have: dict[str, int] = {}
        self._connection: Connection | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"log-reader-{self.node}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def has(self, life: str, number: int) -> None:
        """Lines up to this one are stored."""
        self._have = {life: number}

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        try:
            self._connection = connect(self._cluster.agent(self._seen))
            self._connection.set_timeout(_PATIENCE_S)
            life, after = uuid.uuid4().hex, 0
            while not self._closed:
                have = self._have.get(life, 0)
                asked = m.ReadLogs(life=life, after=after, have=have, max_bytes=_ASKED_BYTES, wait_s=_POLL_S)
                found = m.decode_as(m.LogsAre, self._connection.request(m.encode(asked)))
                if found.life != life:
                    life, after = found.life, 0
                if found.rows:
                    after = found.rows[-1][0]
                    self._put(_Batch(self, life, found.rows))
        except (NodeUnreachable, ConnectionClosed, m.ProtocolError) as error:
            # Of a node that is there another reader follows; what it has not told to be stored is asked for again.
            log.info("node is not read from", node=self.node, why=str(error))
        finally:
            if self._connection is not None:
                self._connection.close()
