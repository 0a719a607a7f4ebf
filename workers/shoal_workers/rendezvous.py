"""A torch.distributed store over an agent: the ranks of an epoch leave their addresses there and read their peers'.

Written here rather than taken from torch, because connecting to a TCPStore looks names up in reverse, which stalls for
five seconds now and then, and because agents stay free of torch. Owns no state; keys live in the agent.
"""

from __future__ import annotations

import base64
import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal_workers.greeting import Pass
from shoal_workers.messages import Done, GetKey, KeyIs, ProtocolError, SetKey, decode, decode_as, encode
from shoal_workers.wire import Connection, connect


class AgentStore(dist.Store):  # type: ignore[name-defined,misc]  # missing in the stubs
    """What ProcessGroupGloo asks of a store: set, get, wait, check. Safe to call from several threads. Keys begin with
    the scope of the pass, and a '/'. Raises ProtocolError where the agent does not admit it."""

    def __init__(self, address: tuple[str, int], timeout_s: float, shown: Pass) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        # Two, so that one thread can set what another waits for.
        self._asking, self._waiting = _Line(address, shown), _Line(address, shown)

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._asking.request(SetKey(key=key, value=base64.b64encode(raw).decode()))

    def get(self, key: str) -> bytes:
        value = self._wait(key, self._timeout_s)
        if value is None:
            raise RuntimeError(f"no rank has set {key} within {self._timeout_s} s")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            if self._wait(key, self._timeout_s if timeout is None else timeout.total_seconds()) is None:
                raise RuntimeError(f"no rank has set {key} in time")

    def check(self, keys: list[str]) -> bool:
        return all(self._wait(key, 0.0) is not None for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return False

    def close(self) -> None:
        """Wakes whoever waits here, with an error."""
        self._asking.connection.close()
        self._waiting.connection.close()

    def _wait(self, key: str, timeout_s: float) -> bytes | None:
        line = self._waiting if timeout_s > 0 else self._asking
        answer = decode_as(KeyIs, line.request(GetKey(key=key, timeout_s=timeout_s)))
        return None if answer.value is None else base64.b64decode(answer.value)


class Gate:
    """Where the ranks of an epoch wait for each other, however long one of them takes: whoever is ready first would
    else give up who still reads its state from a store. `AgentStore.close` ends every wait here with an error."""

    def __init__(self, store: AgentStore, prefix: str, rank: int, num_ranks: int) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._num_ranks = num_ranks

    def pass_with_all(self, name: str) -> None:
        """Returns when all ranks have come to the gate of this name. Each name serves once."""
        self._store.set(f"{self._prefix}/{name}/{self._rank}", b"here")
        if self._rank:
            self._await(f"{name}/open")
            return
        for rank in range(self._num_ranks):
            self._await(f"{name}/{rank}")
        self._store.set(f"{self._prefix}/{name}/open", b"open")

    def _await(self, key: str) -> None:
        while True:
            with contextlib.suppress(RuntimeError):
                self._store.wait([f"{self._prefix}/{key}"])
                return


class _Line:
    """One question at a time."""

    def __init__(self, address: tuple[str, int], shown: Pass) -> None:
        self.connection: Connection = connect(address, shown=shown)
        self._lock = threading.Lock()

    def request(self, message: SetKey | GetKey) -> dict[str, Any]:
        with self._lock:
            wire = self.connection.request(encode(message))
        if isinstance(answer := decode(wire), Done) and answer.problem:
            raise ProtocolError(answer.problem)
        return wire
