"""What a process says over a connection on which it is watched: its reports as they come, and heartbeats."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from shoal_workers import messages as m
from shoal_workers.wire import Connection


def report(
    connection: Connection,
    outbox: queue.SimpleQueue[Any],
    heartbeat_s: float,
    silent: Callable[[], list[tuple[str, float]]] = list,
) -> None:
    """Until the connection closes: raises ConnectionClosed. A heartbeat goes also where there is always something to
    report: it is what the other side answers. `silent`: whom this process hears, and how long ago the last time."""
    due_s = time.monotonic() + heartbeat_s
    while True:
        try:
            connection.send(m.encode(outbox.get(timeout=max(0.0, due_s - time.monotonic()))))
        except queue.Empty:
            pass
        if time.monotonic() >= due_s:
            rows = [list(row) for row in silent()]
            connection.send(m.encode(m.Heartbeat(at_s=time.monotonic(), silent=rows)))
            due_s = time.monotonic() + heartbeat_s
