"""Reads of an object store that take their time: in pieces, so that it shows that they get on, and with patience where
the store does not answer for a moment. Owns how much is asked for at once and how often; what is read is the caller's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

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

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        """As the store's."""
        left = deque(places)
        while left:
            num_bytes, piece = self._piece_bytes, list[memoryview]()
            while left and num_bytes:
                part = left.popleft()
                piece.append(part[:num_bytes])
                if part.nbytes > num_bytes:
                    left.appendleft(part[num_bytes:])
                num_bytes -= piece[-1].nbytes
            self._read_piece(name, offset, piece)
            offset += sum(part.nbytes for part in piece)

    def _read_piece(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        for pause_s in (*_PAUSES_S, None):
            if self._abandoned.is_set():
                raise StoreUnreachable(self.uri, f"{name} is not waited for any more")
            began_s = self._clock()
            try:
                self._store.read_into(name, offset, places)
            except StoreRefused:
                raise
            except StoreUnreachable:
                if pause_s is None or self._arrivals.silent_s + pause_s > _PATIENCE_S:
                    raise
                self._abandoned.wait(pause_s)
            else:
                self._arrivals.came()
                num_bytes = sum(place.nbytes for place in places)
                self._piece_bytes = next_piece_bytes(self._piece_bytes, num_bytes, self._clock() - began_s)
                return


def next_piece_bytes(asked_bytes: int, came_bytes: int, took_s: float) -> int:
    """How much to ask for where pieces of `asked_bytes` were usual, and the last one took so long: about what comes in
    a second, for each request costs time, too."""
    if took_s > 2 * _PIECE_S:
        return max(_LEAST_PIECE_BYTES, min(asked_bytes, came_bytes) // 2)
    if took_s < _PIECE_S / 2 and came_bytes >= asked_bytes:
        return min(_MOST_PIECE_BYTES, asked_bytes * (8 if took_s < _PIECE_S / 16 else 2))
    return asked_bytes
