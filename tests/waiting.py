"""Waiting for something that other processes or threads bring about, with a deadline instead of a sleep."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_PAUSE_S = 0.02


def eventually(check: Callable[[], T], timeout_s: float = 30.0) -> T:
    """What `check` returns once that is true; until then it is asked again. An AssertionError of `check` counts as not
    yet, and is raised when the time is up; any other exception is raised at once."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        failure: AssertionError | None = None
        try:
            found = check()
            if found:
                return found
        except AssertionError as error:
            failure = error
        if time.monotonic() >= deadline_s:
            raise failure or AssertionError(f"not within {timeout_s:g} s: {check}")
        pause.wait(_PAUSE_S)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Waits until the process has stopped itself; lets it go on in any case."""
    try:
        eventually(lambda: _state(pid) == "T", 60.0)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
