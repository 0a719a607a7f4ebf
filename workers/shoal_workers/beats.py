"""Heartbeats between agents: small datagrams to and from those that a supervisor names; for how long each was silent.

Datagrams, because one that is lost or late must not hold up the next, nothing has to be connected or reset, and copies
of state on their way to the same node do not stand before them. Who was never heard is not silent: networks that carry
no datagrams make no evidence. What silence means is decided elsewhere.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from shoal_workers.pulse import Pulse

log = structlog.get_logger()

_GREETING = b"shoal-beat-1 "
_MOST_BYTES = 512
_LOOK_S = 0.1  # at the latest, for the pulse


@dataclass(frozen=True, slots=True)
class Peer:
    """An agent. A later one of the same node has another port."""

    node: str
    host: str
    port: int


class Hearing:
    """Who was heard when. Any thread may call."""

    def __init__(self, pulse: Pulse, clock: Callable[[], float]) -> None:
        self._pulse = pulse
        self._clock = clock
        self._lock = threading.Lock()
        self._named: dict[object, frozenset[Peer]] = {}
        self._heard_s: dict[tuple[str, int], float] = {}

    def attend(self, by: object, peers: Iterable[Peer]) -> None:
        """`by` wants to know of these, and of no others any more."""
        with self._lock:
            self._named[by] = frozenset(peers)
            self._forget()

    def leave(self, by: object) -> None:
        with self._lock:
            self._named.pop(by, None)
            self._forget()

    def peers(self) -> frozenset[Peer]:
        with self._lock:
            return frozenset().union(*self._named.values())

    def hear(self, node: str, port: int) -> None:
        with self._lock:
            if any((peer.node, peer.port) == (node, port) for peers in self._named.values() for peer in peers):
                self._heard_s[node, port] = self._clock()

    def silent(self) -> list[tuple[str, float]]:
        """Those that were heard once, and how long ago the last time."""
        with self._lock:
            heard = sorted(self._heard_s.items())
        now_s = self._clock()
        return [(node, self._pulse.awake_s(heard_s, now_s)) for (node, _), heard_s in heard]

    def _forget(self) -> None:
        wanted = {(peer.node, peer.port) for peers in self._named.values() for peer in peers}
        self._heard_s = {key: heard_s for key, heard_s in self._heard_s.items() if key in wanted}


class Beats:
    """Sends and hears in a thread of its own, on the port that the agent has for connections, too."""

    def __init__(self, node: str, host: str, port: int, heartbeat_s: float) -> None:
        self._greeting = _GREETING + f"{port} {node}".encode()
        self._heartbeat_s = heartbeat_s
        self._pulse = Pulse()
        self.hearing = Hearing(self._pulse, time.monotonic)
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((host, port))
        except OSError as error:  # somebody else's datagrams: then nobody hears this agent, and nobody misses it
            log.warning("no heartbeats to other agents", node=node, error=str(error))
            self._socket.bind((host, 0))

    def start(self) -> None:
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        due_s = time.monotonic()
        with self._socket:
            while not self._closed.is_set():
                self._pulse.beat()
                left_s = due_s - time.monotonic()
                if not self._receive(max(0.0, min(left_s, _LOOK_S))) and due_s <= time.monotonic():
                    self._send()
                    due_s = time.monotonic() + self._heartbeat_s

    def _receive(self, wait_s: float) -> bool:
        """Whether there was one. All that wait are taken before the next is sent: after a pause, above all."""
        self._socket.settimeout(wait_s)
        try:
            datagram = self._socket.recv(_MOST_BYTES)
        except OSError:  # none came in time, or one that was sent came to nobody
            return False
        if datagram.startswith(_GREETING):
            port, _, node = datagram.removeprefix(_GREETING).decode(errors="replace").partition(" ")
            if port.isdecimal():
                self.hearing.hear(node, int(port))
        return True

    def _send(self) -> None:
        self._socket.settimeout(0.0)
        for peer in self.hearing.peers():
            try:
                self._socket.sendto(self._greeting, (peer.host, peer.port))
            except OSError as error:  # no way there at present: whoever is there will say that it hears nothing
                log.debug("heartbeat not sent", peer=peer.node, error=str(error))
