"""Since when this process has had its turn without a pause: of a time in which it was not there, was stopped, or slept
together with its machine it cannot say who was silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger()

_BEAT_S = 1.0
_MOST_S = 5.0  # between two beats of a process that has its turn


class Awake:
    """By the time of day, as leases are: it goes on while a machine sleeps, and where somebody sets it nothing that was
    measured by it before counts. Use from one thread, which asks often (`beat`)."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since_s = self._last_s = clock()

    def for_s(self) -> float:
        """How long by now."""
        now_s = self._clock()
        if not 0.0 <= now_s - self._last_s <= _MOST_S:
            log.warning("this process had no turn, or the clock was set", pause_s=now_s - self._last_s)
            self._since_s = now_s
        self._last_s = now_s
        return now_s - self._since_s

    def interrupted(self) -> None:
        """Nobody could be heard just now, as nothing could be written down."""
        self._since_s = self._last_s = self._clock()

    async def beat(self) -> None:
        """Until it is cancelled."""
        while True:
            self.for_s()
            await asyncio.sleep(_BEAT_S)
