"""Processes made slow for real: stopped and let go on by turns, much quicker than anybody would notice a silence."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator

_TURN_S = 0.012


class Slowed:
    """From now on each process runs for one turn in `times`, until `end`."""

    def __init__(self, pids: Iterable[int], times: float) -> None:
        self._pids = tuple(pids)
        self._times = times
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowed", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._signal(signal.SIGSTOP)
            self._over.wait(_TURN_S * (1 - 1 / self._times))
            self._signal(signal.SIGCONT)
            self._over.wait(_TURN_S / self._times)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def slowed(pids: Iterable[int], times: float) -> Iterator[None]:
    slowing = Slowed(pids, times)
    try:
        yield
    finally:
        slowing.end()
