"""Framed messages over sockets: one JSON object, optionally followed by raw bytes.

Owns framing and closing. What the messages mean is in `messages.py`; who talks to whom is with the callers.
A frame is: length of the JSON text (4 bytes), length of the payload (8 bytes), JSON text, payload.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from shoal_workers.greeting import Caller, Pass, Stranger, WrongToken, expect_greeting, greet

log = structlog.get_logger()

_HEADER = struct.Struct("!IQ")
_MAX_JSON_BYTES = 256 * 1024 * 1024
_SCRATCH_BYTES = 1024 * 1024
_ACCEPT_AGAIN_S = 0.1
_REFUSED_S = 2.0
_REFUSED_BYTES = 1 << 20

Buffer = bytes | bytearray | memoryview


class ConnectionClosed(Exception):
    """The other side is gone, or this side closed the connection."""


class Connection:
    """One socket. Any thread may send; one thread at a time may receive. `caller` is who has shown a pass to this
    side, where it was called."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self.caller = Caller()
        self._send_lock = threading.Lock()

    def send(self, message: dict[str, Any], payload: Iterable[Buffer] = ()) -> None:
        """Raises ConnectionClosed."""
        text = json.dumps(message, separators=(",", ":")).encode()
        parts = [memoryview(part).cast("B") for part in payload]
        header = _HEADER.pack(len(text), sum(part.nbytes for part in parts))
        try:
            with self._send_lock:
                self._socket.sendall(header + text)
                for part in parts:
                    self._socket.sendall(part)
        except OSError as error:
            self.close()  # half a frame may be under way: nothing that follows it could be understood
            raise ConnectionClosed(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], int]:
        """The next message and how many payload bytes follow it, which the caller must take with `read_into`.

        Raises ConnectionClosed.
        """
        header = bytearray(_HEADER.size)
        self.read_into(memoryview(header))
        json_bytes, payload_bytes = _HEADER.unpack(header)
        if json_bytes > _MAX_JSON_BYTES:
            raise ConnectionClosed(f"a frame of {json_bytes} bytes is not one of ours")
        text = bytearray(json_bytes)
        self.read_into(memoryview(text))
        try:
            message = json.loads(text)
        except ValueError as error:
            raise ConnectionClosed(f"a frame that is not JSON is not one of ours: {error}") from error
        if not isinstance(message, dict):
            raise ConnectionClosed("a frame that is no JSON object is not one of ours")
        return message, payload_bytes

    def read_into(self, view: memoryview) -> None:
        """Fills `view`. Raises ConnectionClosed."""
        position, total = 0, view.nbytes
        try:
            while position < total:
                count = self._socket.recv_into(view[position:])
                if not count:
                    raise ConnectionClosed("end of file")
                position += count
        except OSError as error:
            raise ConnectionClosed(str(error)) from error

    def skip(self, num_bytes: int) -> None:
        """Takes payload bytes that nobody wants. Raises ConnectionClosed."""
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes > 0:
            part = scratch[:num_bytes]
            self.read_into(part)
            num_bytes -= part.nbytes

    def request(self, message: dict[str, Any], payload: Iterable[Buffer] = ()) -> dict[str, Any]:
        """Sends and takes the one answer, for connections that one caller uses at a time. Raises ConnectionClosed."""
        self.send(message, payload)
        answer, _ = self.receive()
        return answer

    def poll(self, timeout_s: float) -> bool:
        """Whether anything has come within this time, be it the end."""
        waiting = select.poll()  # not select(): it knows no descriptors above 1023
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1e3))

    def set_timeout(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def set_send_timeout(self, timeout_s: float) -> None:
        """How long the other side may take nothing before a send fails; receiving still waits without end."""
        seconds, rest = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def give_up_after(self, silent_s: float) -> None:
        """When the machine of the other side has acknowledged nothing for so long, be it a message or a probe while an
        answer is waited for. However long its process takes is no matter."""
        tcp = socket.IPPROTO_TCP
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(tcp, socket.TCP_KEEPIDLE, max(1, int(silent_s / 4)))
        self._socket.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, int(silent_s / 4)))
        self._socket.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(silent_s * 1e3))

    def refuse(self, why: str) -> None:
        """Says so, as an answer to whatever is asked, and closes. Takes some of what is asked, unread: else the kernel
        would throw away what was said."""
        with contextlib.suppress(ConnectionClosed, OSError):
            self.send({"kind": "Done", "problem": why})
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_REFUSED_S)
            left = _REFUSED_BYTES
            while left > 0 and (part := self._socket.recv(min(left, 1 << 16))):
                left -= len(part)
        self.close()

    def close(self) -> None:
        """Wakes whoever waits on this connection, on both sides."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: tuple[str, int], timeout_s: float = 5.0, shown: Pass | None = None) -> Connection:
    """To somebody of this cluster, who is shown this pass (None: that of the process). Raises ConnectionClosed."""
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise ConnectionClosed(f"{address[0]}:{address[1]}: {error}") from error
    connection = Connection(sock)
    try:
        greet(sock, shown)
        sock.settimeout(None)
    except OSError as error:
        connection.close()
        raise ConnectionClosed(f"{address[0]}:{address[1]}: {error}") from error
    return connection


class Server:
    """Accepts connections and hands each to `handle` in a thread of its own, once the caller has shown that it belongs
    to the cluster; the connection closes when it returns."""

    def __init__(self, host: str, handle: Callable[[Connection], None], name: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=128)
        self._handle = handle
        self._name = name
        self._closed = threading.Event()
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self._accept, name=f"{self._name}-accept", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        # shutdown, not only close: a thread that sleeps in accept() would keep the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(_ACCEPT_AGAIN_S):
                    return
                # Out of descriptors, or a caller that is gone already: a server that stopped listening would be worse.
                log.warning("connection not accepted", server=self._name, error=str(error))
                continue
            threading.Thread(target=self._serve, args=(sock, Connection(sock)), name=self._name, daemon=True).start()

    def _serve(self, sock: socket.socket, connection: Connection) -> None:
        try:
            connection.caller = expect_greeting(sock)
            self._handle(connection)
        except WrongToken as error:
            log.warning("caller refused", server=self._name, error=str(error))
            connection.refuse(str(error))
        except Stranger as error:
            log.warning("caller refused", server=self._name, error=str(error))
        except ConnectionClosed:
            pass  # the usual end of a conversation
        finally:
            connection.close()
