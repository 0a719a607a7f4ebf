"""A disk, for whoever has more to do than to wait for one that hangs: work there that makes no progress is an error
after a while, and the next is at once, until it has gone through after all.

Owns the patience and the threads that wait; what is read and written is its callers' business.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
_PATIENCE_S = 5.0
_LOOKS = 10  # in that time


class Progress(Protocol):
    def __call__(self) -> None:
        """Said after each part that is done. Raises OSError where nobody waits for the rest any more."""


def no_matter() -> None:
    """Progress that nobody looks at."""


class PatientDisk:
    """Any thread may call. What it was to do soon, while it hung, it does as soon as it does not."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._hanging: list[threading.Thread] = []
        self._later: list[Callable[[], object]] = []

    def run(self, write: Callable[[Progress], T], undo: Callable[[T], object] = lambda _: None) -> T:
        """What `write` returns or raises. Raises OSError where the disk hangs; what comes of `write` later is undone
        then, and what it reads from must stay there, though it may change."""
        with self._lock:
            if self._hangs():
                raise self._error()
            writing, thread = self._begin(write, undo)
        if not self._ends(writing, thread):
            raise self._error()
        return writing.done.result()

    def soon(self, do: Callable[[], object]) -> None:
        """Does it, and returns when that is done, or the disk hangs: then it is done later. What it raises is lost."""
        with self._lock:
            if self._hangs():
                self._later.append(do)
                return
            writing, thread = self._begin(lambda _: do(), lambda _: None)
        self._ends(writing, thread)

    def _hangs(self) -> bool:
        """The caller has the lock."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        return bool(self._hanging)

    def _begin(
        self, write: Callable[[Progress], T], undo: Callable[[T], object]
    ) -> tuple[_Writing[T], threading.Thread]:
        """The caller has the lock."""
        writing = _Writing(write, undo, self._lock)

        def work() -> None:
            writing.run()
            if writing.is_given_up:
                self._catch_up()

        thread = threading.Thread(target=work, name="disk", daemon=True)
        thread.start()
        return writing, thread

    def _ends(self, writing: _Writing[T], thread: threading.Thread) -> bool:
        """Whether it does before the disk hangs."""
        if writing.ends(self._patience_s):
            return True
        with self._lock:
            if writing.done.done():
                return True
            writing.is_given_up = True
            self._hanging.append(thread)
        log.warning("disk hangs", patience_s=self._patience_s)
        return False

    def _catch_up(self) -> None:
        while True:
            with self._lock:
                if not self._later:
                    return
                do = self._later.pop(0)
            with contextlib.suppress(Exception):
                do()

    def _error(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"the disk hangs: nothing has moved for {self._patience_s:g} s")


class _Writing(Generic[T]):
    def __init__(self, write: Callable[[Progress], T], undo: Callable[[T], object], lock: threading.Lock) -> None:
        self.done: Future[T] = Future()
        self.is_given_up = False
        self._write = write
        self._undo = undo
        self._lock = lock
        self._parts = 0

    def run(self) -> None:
        try:
            result = self._write(self._progress)
        except Exception as error:  # whatever it is: for the caller, in whose thread it is raised
            self.done.set_exception(error)
            return
        with self._lock:
            if not self.is_given_up:
                self.done.set_result(result)
                return
        self._undo(result)

    def ends(self, patience_s: float) -> bool:
        """Whether it does before it makes no progress for so long. Looks are counted, not seconds: a process that was
        stopped meanwhile has missed one at most."""
        parts, looks = self._parts, 0
        while looks < _LOOKS:
            try:
                self.done.exception(patience_s / _LOOKS)
            except TimeoutError:
                looks = looks + 1 if self._parts == parts else 0
                parts = self._parts
            else:
                return True
        return False

    def _progress(self) -> None:
        if self.is_given_up:
            raise OSError(errno.ETIMEDOUT, "nobody waits for it any more")
        self._parts += 1
