"""How long a process may act on what it was ordered, without a sign that whoever orders still hears it.

Agents and ranks tell the time in their heartbeats, and who watches them tells it back: so each knows by its own clock
when it was heard last. In a partition nothing comes back on the side without the head of the cluster. There a rank
votes no more, an agent begins no upload, and both end themselves after a while. A watcher whose connection closes has
died, which is no partition: ranks step on until the next one comes, but not for ever, as a partition may keep it from
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger()

_LOOK_S = 0.5


class Lifeline:
    """Any thread may call. As long as nobody has ever answered there is nothing to keep to. `orphaned_s` is how long it
    goes on when its watcher has died."""

    def __init__(
        self,
        *,
        cut_off_s: float,
        ends_itself_s: float,
        orphaned_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cut_off_s = self._limit_s = cut_off_s
        self._ends_itself_s = ends_itself_s
        self._orphaned_s = orphaned_s
        self._clock = clock
        self._lock = threading.Lock()
        self._watcher: object = None
        self._heard_s: float | None = None
        self._epoch = 0

    def answered(self, watcher: object, at_s: float, epoch: int = 0) -> None:
        """This watcher heard what was said at `at_s`; it knows of epochs up to this one."""
        with self._lock:
            if self._heard_s is None or at_s >= self._heard_s:
                self._watcher, self._heard_s, self._limit_s = watcher, at_s, self._cut_off_s
            self._epoch = max(epoch, self._epoch)

    def left(self, watcher: object) -> None:
        """Its connection closed. What had run out before stays so: it may have given this process up."""
        with self._lock:
            if watcher is self._watcher and self._fresh:
                self._watcher, self._heard_s, self._limit_s = None, self._clock(), self._orphaned_s

    def holds(self, epoch: int = 0) -> bool:
        """Whether what belongs to this epoch may still be done."""
        with self._lock:
            return self._epoch <= epoch and self._fresh

    @property
    def heard(self) -> bool:
        """In whatever epoch."""
        with self._lock:
            return self._fresh

    @property
    def _fresh(self) -> bool:
        return self._heard_s is None or self._clock() - self._heard_s < self._limit_s

    def wait_for_end(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Returns when nobody has answered for so long that the process is of no use any more. Time in which it was
        stopped itself does not count."""
        left_s = self._ends_itself_s - self._cut_off_s
        while left_s > 0:
            pause(_LOOK_S)
            left_s = self._ends_itself_s - self._cut_off_s if self.heard else left_s - _LOOK_S
        log.warning("cut off from whoever gives orders, ending", after_s=self._ends_itself_s)
