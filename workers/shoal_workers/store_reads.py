"""Reads of an object store that take their time: in pieces, so that it shows that they get on, and with patience where
the store does not answer for a moment. Owns how much is asked for at once and how often; what is read is the caller's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal_recovery.errors import StoreRefused, StoreUnreachable
from shoal_recovery.store import Reader
from shoal_workers.arrivals import Arrivals

_FIRST_PIECE_BYTES, _LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 1 << 20, 1 << 18, 1 << 25
_PIECE_S = 1.0  # about as long as one may take
_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
_PATIENCE_S = 8.0  # without a byte of anything; then whoever waits must hear what is wrong, before it takes us for gone


class PatientReader:
    """Any thread may call. Once `abandoned` is set nothing more is asked for: what reads find is not whole then, and
    StoreUnreachable is raised."""

    def __init__(
        self,
        store: Reader,
        arrivals: Arrivals,
        abandoned: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.uri = store.uri
        self._store = store
        self._arrivals = arrivals
        self._abandoned = abandoned
        self._clock = clock
        self._piece_bytes = _FIRST_PIECE_BYTES

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes | bytearray | memoryview:
        """As the store's, of which a length is known. Raises StoreError."""
        if num_bytes is None:
            return self._store.read(name, offset)
        whole, position = bytearray(num_bytes), 0
        while position < num_bytes:
            wanted = min(self._piece_bytes, num_bytes - position)
            whole[position : position + wanted] = self._piece(name, offset + position, wanted)
            position += wanted
        return whole

    def _piece(self, name: str, offset: int, num_bytes: int) -> bytes | bytearray | memoryview:
        for pause_s in (*_PAUSES_S, None):
            if self._abandoned.is_set():
                raise StoreUnreachable(self.uri, f"{name} is not waited for any more")
            began_s = self._clock()
            try:
                data = self._store.read(name, offset, num_bytes)
            except StoreRefused:
                raise
            except StoreUnreachable:
                if pause_s is None or self._arrivals.silent_s + pause_s > _PATIENCE_S:
                    raise
                self._abandoned.wait(pause_s)
            else:
                self._arrivals.came()
                self._piece_bytes = next_piece_bytes(self._piece_bytes, num_bytes, self._clock() - began_s)
                return data
        raise AssertionError("the last attempt has no pause")


def next_piece_bytes(asked_bytes: int, came_bytes: int, took_s: float) -> int:
    """How much to ask for where pieces of `asked_bytes` were usual, and the last one took so long: about what comes in
    a second, for each request costs time, too."""
    if took_s > 2 * _PIECE_S:
        return max(_LEAST_PIECE_BYTES, min(asked_bytes, came_bytes) // 2)
    if took_s < _PIECE_S / 2 and came_bytes >= asked_bytes:
        return min(_MOST_PIECE_BYTES, 2 * asked_bytes)
    return asked_bytes
