"""Whether an epoch was abandoned, and the lock between writing live state and abandoning."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal_workers.errors import EpochAbandoned


class Fence:
    """One per exchange. Any thread may use it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._lock = threading.RLock()
        self._fallen = threading.Event()

    @property
    def fallen(self) -> bool:
        return self._fallen.is_set()

    def check(self) -> None:
        if self._fallen.is_set():
            raise EpochAbandoned(f"epoch {self.epoch} was abandoned")

    @contextmanager
    def commit(self) -> Iterator[None]:
        with self._lock:
            self.check()
            yield

    def fall(self) -> None:
        """Returns when no commit is under way; none begins afterwards."""
        with self._lock:
            self._fallen.set()

    def pause(self, seconds_s: float) -> None:
        """Sleeps, but wakes when the fence falls. Raises EpochAbandoned then."""
        self._fallen.wait(seconds_s)
        self.check()
