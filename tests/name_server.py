"""A name server, as the cluster of Kubernetes has one: it knows services, whose addresses may change."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator, Mapping

PORT = 53  # no other can be said in resolv.conf
_TTL_S = 5
_ADDRESS, _INTERNET = 1, 1
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183
_HEADER = struct.Struct("!6H")


@contextlib.contextmanager
def name_server(host: str, addresses: Mapping[str, str]) -> Iterator[None]:
    """At this address, over UDP. It looks into `addresses`, by whole names, at each question."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            question, reply_to = self.request
            reply_to.sendto(answer(question, addresses), self.client_address)

    server = socketserver.ThreadingUDPServer((host, PORT), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(message: bytes, addresses: Mapping[str, str]) -> bytes:
    """To a message with one question; a name that is known has nothing but an IPv4 address."""
    number = _HEADER.unpack_from(message)[0]
    end = message.index(b"\0", _HEADER.size) + 1
    kind, _ = struct.unpack_from("!2H", message, end)
    asked = message[_HEADER.size : end + 4]
    address = addresses.get(_name(asked).lower())
    record = b""
    if address is not None and kind == _ADDRESS:
        where = 0xC000 | _HEADER.size  # the name that was asked for
        record = struct.pack("!3HIH", where, _ADDRESS, _INTERNET, _TTL_S, 4) + socket.inet_aton(address)
    flags = _NO_SUCH_NAME if address is None else _ANSWER
    return _HEADER.pack(number, flags, 1, int(bool(record)), 0, 0) + asked + record


def _name(asked: bytes) -> str:
    labels, at = [], 0
    while size := asked[at]:
        labels.append(asked[at + 1 : at + 1 + size].decode())
        at += 1 + size
    return ".".join(labels)
