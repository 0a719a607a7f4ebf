"""When this process ran: of a time in which it was stopped, or did not get a turn, it cannot say who was silent."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_BEAT_S = 0.05
_MOST_S = 0.25  # between two beats of a process that has its turn
_KEPT_GAPS = 256


class Pulse:
    """`beat` is called often, by `start` from a thread; any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = clock()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT_GAPS)
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def beat(self) -> None:
        with self._lock:
            now_s = self._clock()
            if now_s - self._last_s > _MOST_S:
                self._gaps.append((self._last_s + _MOST_S, now_s))
            self._last_s = now_s

    def awake_s(self, since_s: float, now_s: float) -> float:
        """How much of this time the process could have listened. Of every gap what is usual between two beats counts,
        or who is always late would never find anybody silent."""
        with self._lock:
            gaps = (*self._gaps, (self._last_s + _MOST_S, now_s))
        slept_s = sum(max(0.0, min(end_s, now_s) - max(begin_s, since_s)) for begin_s, end_s in gaps)
        return max(0.0, now_s - since_s - slept_s)

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            self.beat()
