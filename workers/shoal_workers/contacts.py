"""One process that a supervisor speaks to, what it has said of itself, and when it was heard."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

from shoal_planner.cluster import DeviceRef
from shoal_workers import messages as m
from shoal_workers.rows import Row
from shoal_workers.wire import Connection, ConnectionClosed


@dataclass(slots=True, kw_only=True, eq=False)
class Contact:
    """An agent (`index` None) or the rank process of one device. A heartbeat is heard, but it is no word. `silent` is
    what an agent says of others, `attends` whom it was told to listen for, `pid` and `cuda_devices` what a rank says of
    itself (Hello), `ended_by` the signal that it died of, if it left word of that; a rank is `prepared` when it says
    so."""

    node: str
    index: int | None
    address: tuple[str, int]
    connection: Connection
    last_heard_s: float
    last_word_s: float
    connected: bool = True
    answered_s: float = -math.inf
    silent: tuple[tuple[str, float], ...] = ()
    pid: int | None = None
    cuda_devices: int | None = None
    ended_by: str | None = None
    attends: tuple[Row, ...] = ()
    prepared: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return f"the agent of {self.node}" if self.index is None else f"rank process {self.node}:{self.index}"

    @property
    def device(self) -> DeviceRef:
        assert self.index is not None
        return DeviceRef(node=self.node, index=self.index)

    def send(self, message: Any) -> None:
        """A contact that is gone does not hear it; its closed connection is the evidence, not this."""
        try:
            self.connection.send(m.encode(message))
        except ConnectionClosed:
            self.connected = False
