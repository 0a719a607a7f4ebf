"""How a caller shows what it may do, before it says anything else: with the first bytes of a connection, a pass.

A pass is made of the cluster's key, for the whole cluster, one job, or one epoch of a job. Agents, supervisors and
connectors know the key, and check every pass by making it again; a rank process knows no key, only what it was given.
What a pass is good for is decided by whoever is called.

Nobody waits for an answer: a caller must not stand still before a process that does, and links are not encrypted, so
whoever reads along reads more than this. Where the key comes from is `cluster_key`'s; processes that nobody gave one
share the empty key.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass, field

_TOKEN_BYTES = 32
_HEADER = struct.Struct(f"!{_TOKEN_BYTES}sB")  # the token, and the length of the scope that follows
_PATIENCE_S = 10.0  # a stranger that says nothing holds a thread for no longer
_CLUSTER = ""


class Stranger(Exception):
    """The caller does not know the key, or says nothing."""


class WrongToken(Stranger):
    """The caller speaks as we do, but what it shows is not the token of the job and epoch that it names."""


@dataclass(frozen=True, slots=True)
class Pass:
    """`scope`: "" is the cluster, a job's id the job, "job/3" the epoch 3 of it. The token is never shown in texts."""

    scope: str
    token: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.scope.encode()) > 255:
            raise ValueError(f"scope: must have at most 255 bytes, has {len(self.scope.encode())}: {self.scope[:50]!r}")
        if len(self.token) != _TOKEN_BYTES:
            raise ValueError(f"token: must have {_TOKEN_BYTES} bytes, has {len(self.token)}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who showed a pass that was checked: a process of the cluster (neither is given), of a job, of an epoch of it."""

    job: str | None = None
    epoch: int | None = None

    def __str__(self) -> str:
        if self.job is None:
            return "a process of the cluster"
        return f"a process of {self.job}" if self.epoch is None else f"a process of epoch {self.epoch} of {self.job}"


class _Process:
    """A process belongs to one cluster, from its start to its end. With `held` it does not know the key."""

    key = b""
    held: Pass | None = None


def use_key(key: bytes) -> None:
    """Of what this process makes what it shows, and expects, from now on."""
    _Process.key, _Process.held = key, None


def hold(held: Pass) -> None:
    """This process shows this pass, where nothing else is said, and hears nobody who shows another."""
    _Process.key, _Process.held = b"", held


def cluster_pass() -> Pass:
    return _made(_CLUSTER)


def job_pass(job: str) -> Pass:
    """Of the processes of a job: what its ranks show each other, and are shown by whoever gives them orders."""
    return _made(_scope_of(job))


def epoch_pass(job: str, epoch: int) -> Pass:
    """Of the ranks of this epoch, and of agents that act for them."""
    return _made(f"{_scope_of(job)}/{epoch}")


def epoch_pass_from(job: str, epoch: int, token: str) -> Pass:
    """As a rank gets it: `token` is hexadecimal. Raises ValueError."""
    return Pass(f"{_scope_of(job)}/{epoch}", bytes.fromhex(token))


def greet(sock: socket.socket, shown: Pass | None = None) -> None:
    """As the one who calls. Raises OSError."""
    shown = shown or _Process.held or cluster_pass()
    scope = shown.scope.encode()
    sock.sendall(_HEADER.pack(shown.token, len(scope)) + scope)


def expect_greeting(sock: socket.socket) -> Caller:
    """As the one who is called. Raises Stranger, and WrongToken for one that can be told why."""
    try:
        sock.settimeout(_PATIENCE_S)
        token, scope_bytes = _HEADER.unpack(_read(sock, _HEADER.size))
        scope = _read(sock, scope_bytes)
        sock.settimeout(None)
    except OSError as error:
        raise Stranger(f"it is not known who called: {error}") from error
    expected = _expected(scope)
    if not hmac.compare_digest(token, expected):
        if not scope:
            raise Stranger("the caller does not belong to this cluster")
        raise WrongToken(f"the token that was shown is not that of {_caller_of(scope)}")
    return _caller_of(scope)


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        part = sock.recv(num_bytes - len(found))
        if not part:
            raise Stranger("the caller said too little")
        found += part
    return bytes(found)


def _expected(scope: bytes) -> bytes:
    """A process that knows no key cannot check others than the pass that it holds."""
    held = _Process.held
    if held is None:
        return _token(scope)
    if scope != held.scope.encode():
        raise WrongToken(f"only a process of {held.scope} is heard here, not {_caller_of(scope)}")
    return held.token


def _caller_of(scope: bytes) -> Caller:
    """Raises Stranger for what names neither a job nor an epoch."""
    try:
        job, slash, epoch = scope.decode().partition("/")
        if slash and not job:
            raise ValueError(repr(scope))
        return Caller(job or None, int(epoch) if slash else None)
    except ValueError as error:
        raise Stranger(f"the caller names no job: {error}") from error


def _scope_of(job: str) -> str:
    if not job or "/" in job:
        raise ValueError(f"job: must be a name without '/', got {job!r}")
    return job


def _made(scope: str) -> Pass:
    if _Process.held is not None:
        raise ValueError(f"a process of {_Process.held.scope} cannot make a pass for {scope or 'the cluster'!r}")
    return Pass(scope, _token(scope.encode()))


def _token(scope: bytes) -> bytes:
    """The cluster's has a text of its own, so that no scope can be mistaken for it."""
    return hmac.digest(_Process.key, b"shoal-pass/" + scope if scope else b"shoal-caller", hashlib.sha256)
