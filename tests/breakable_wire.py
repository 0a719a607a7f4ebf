"""A wire to a server that a test can cut, make slow, and mend: a port of its own, and everything passed on while it is
whole."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 16
_SLOW_BYTES = 1 << 12


class BreakableWire:
    def __init__(self, target: str, host: str = "127.0.0.1") -> None:
        """`target` is a URL with a port; `host` is where it listens."""
        parts = urlsplit(target)
        self._target = (str(parts.hostname), int(parts.port or 0))
        self._lock = threading.Lock()
        self._whole = True
        self._bytes_per_s: float | None = None
        self._quick = threading.Event()
        self._open: set[socket.socket] = set()
        self._listeners: list[socket.socket] = []
        listener = socket.create_server((host, 0), backlog=64)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.listen(listener)

    def listen(self, listener: socket.socket) -> None:
        """There, too, which may be another network than the target's."""
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Ends what is under way; who connects from now on is hung up on."""
        with self._lock:
            self._whole = False
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def slow(self, bytes_per_s: float) -> None:
        """So much of each connection, and each way."""
        self._quick.clear()
        self._bytes_per_s = bytes_per_s

    def mend(self) -> None:
        with self._lock:
            self._whole, self._bytes_per_s = True, None
        self._quick.set()  # what is held up goes on at once

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self.cut()
        self._quick.set()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listener.accept()
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), caller, socket.create_connection(self._target) as server:
            with self._lock:
                if not self._whole:
                    return
                self._open |= {caller, server}
            back = threading.Thread(target=self._pass_on, args=(server, caller), daemon=True)
            back.start()
            self._pass_on(caller, server)
            back.join()
            with self._lock:
                self._open -= {caller, server}

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                for begin in range(0, len(data), _SLOW_BYTES):
                    part = data[begin : begin + _SLOW_BYTES]
                    if (bytes_per_s := self._bytes_per_s) is not None:
                        self._quick.wait(len(part) / bytes_per_s)
                    sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
