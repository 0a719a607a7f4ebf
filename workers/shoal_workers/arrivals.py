"""Bytes that come while a state is brought: whoever waits for the rank is told that they do, and how long none came is
known. Owns no bytes and no connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TELL_S = 1.0  # at most so often; who waits has many times this patience


class Arrivals:
    """Any thread may call. `tell` is called by the one whose bytes have come, never for the passing of time alone: a
    source that gives nothing must not look as if it did."""

    def __init__(self, tell: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._came_s = self._told_s = clock()

    @property
    def silent_s(self) -> float:
        return self._clock() - self._came_s

    def begin(self) -> None:
        """From now on something is asked for: the time before was nobody's silence."""
        self._came_s = self._clock()

    def came(self) -> None:
        """Some bytes, from any source."""
        now_s = self._came_s = self._clock()
        if now_s - self._told_s < _TELL_S:
            return
        with self._lock:
            if now_s - self._told_s < _TELL_S:
                return
            self._told_s = now_s
        self._tell()
