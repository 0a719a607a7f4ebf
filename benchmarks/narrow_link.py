"""A TCP link to a local port that carries so many bytes a second each way, all its connections together."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class NarrowLink:
    """A context. `port` of 127.0.0.1 leads to `target`."""

    def __init__(self, target: int, bytes_per_s: float) -> None:
        self._target = target
        self._ways = (_Way(bytes_per_s), _Way(bytes_per_s))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="narrow-link", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for way, source, sink in zip(self._ways, (near, far), (far, near), strict=True):
                threading.Thread(target=_carry, args=(way, source, sink), name="narrow-way", daemon=True).start()


class _Way:
    """One direction of the link."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def pass_through(self, num_bytes: int) -> None:
        """Returns when they have come through."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            free_s = self._free_s
        time.sleep(max(0.0, free_s - time.monotonic()))


def _carry(way: _Way, source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK):
            way.pass_through(len(data))
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for one in (source, sink):
            one.close()
