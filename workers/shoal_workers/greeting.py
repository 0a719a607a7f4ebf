"""How a caller shows that it belongs to the cluster, before it says anything else: with the first bytes of a
connection, which only those know who know the cluster's key.

Nobody waits for an answer: a caller must not stand still before a process that does, and links are not encrypted, so
whoever reads along reads more than this. Where the key comes from is `cluster_key`'s; processes that nobody gave one
share the empty key.
"""

from __future__ import annotations

import hashlib
import hmac
import socket

_TOKEN_BYTES = 32
_PATIENCE_S = 10.0  # a stranger that says nothing holds a thread for no longer


class Stranger(Exception):
    """The caller does not know the key, or says nothing."""


class _Process:
    """A process belongs to one cluster, from its start to its end."""

    key = b""


def use_key(key: bytes) -> None:
    """What this process greets with, and expects, from now on."""
    _Process.key = key


def greet(sock: socket.socket) -> None:
    """As the one who calls. Raises OSError."""
    sock.sendall(_token())


def expect_greeting(sock: socket.socket) -> None:
    """As the one who is called. Raises Stranger."""
    given = bytearray()
    try:
        sock.settimeout(_PATIENCE_S)
        while len(given) < _TOKEN_BYTES:
            part = sock.recv(_TOKEN_BYTES - len(given))
            if not part:
                break
            given += part
        sock.settimeout(None)
    except OSError as error:
        raise Stranger(f"it is not known who called: {error}") from error
    if not hmac.compare_digest(bytes(given), _token()):
        raise Stranger("the caller does not belong to this cluster")


def _token() -> bytes:
    return hmac.digest(_Process.key, b"shoal-caller", hashlib.sha256)
