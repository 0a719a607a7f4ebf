"""Short announcements from rank to rank, heard at once: what is on its way from device to device.

Owns the sockets, one for each direction between two ranks, and a thread for each that comes in. A letter is heard when
it arrives, whatever the rank is doing: so whoever sends waits for nothing that the receiver has yet to get to.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal_workers.wire import Connection, ConnectionClosed, Server, connect

Address = tuple[int, int]
"""An IPv4 address and a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """The next message from rank `sender` on its wire to the one who hears it; `dtype` is a number, as is agreed."""

    sender: int
    tag: int
    numel: int
    dtype: int
    ticket: str


class Letters:
    """Of one rank, which others reach at `host`. Threads of this object call `heard`, with each sender's letters in
    their order, and `lost`, with the rank of a sender from whom nothing more will come."""

    def __init__(self, host: str, heard: Callable[[Letter], None], lost: Callable[[int], None]) -> None:
        self._host = socket.gethostbyname(host)
        self._heard = heard
        self._lost = lost
        self._server = Server(self._host, self._listen, "letters")
        self._peers: tuple[Address, ...] = ()
        self._to: dict[int, Connection] = {}
        self._open: list[Connection] = []
        self._lock = threading.Lock()  # around what is open, and whether more may be
        self._closed = False
        self._server.start()

    @property
    def address(self) -> Address:
        return int(ipaddress.IPv4Address(self._host)), self._server.port

    def meet(self, peers: Sequence[Address]) -> None:
        """The addresses of all ranks."""
        self._peers = tuple(peers)

    def send(self, peer: int, letter: Letter) -> None:
        """Raises ConnectionClosed. One thread at a time."""
        if peer not in self._to:
            address, port = self._peers[peer]
            self._to[peer] = self._kept(connect((str(ipaddress.IPv4Address(address)), port)))
        self._to[peer].send(dataclasses.asdict(letter))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = tuple(self._open)
        self._server.close()
        for connection in connections:
            connection.close()

    def _kept(self, connection: Connection) -> Connection:
        with self._lock:
            if self._closed:
                connection.close()
            self._open.append(connection)
        return connection

    def _listen(self, connection: Connection) -> None:
        sender = None
        try:
            while True:
                wire, _ = self._kept(connection).receive() if sender is None else connection.receive()
                letter = Letter(**wire)
                sender = letter.sender
                self._heard(letter)
        except ConnectionClosed:
            if sender is not None:
                self._lost(sender)
