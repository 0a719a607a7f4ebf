"""A thread that waits in the place of another, so that the other can be called away.

gloo has no way to interrupt a wait for a message of which some bytes have already passed: shutting its sockets wakes
every other wait, but not that one, which then lasts until its timeout. So no thread that somebody needs waits in gloo.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

Action = Callable[[], Any]


class CalledAway(Exception):
    """Somebody asked the waiting thread to leave; what it waited for may yet happen."""


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any = None
    error: BaseException | None = None


class _Desk:
    """What both threads share; the serving thread knows nothing else, so that it outlives nobody's buffers."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Action | None] = SimpleQueue()
        self.answers: SimpleQueue[_Answer | None] = SimpleQueue()
        self.num_asked = 0
        self.num_answered = 0

    def serve(self) -> None:
        while (action := self.asked.get()) is not None:
            try:
                answer = _Answer(value=action())
            except Exception as error:  # whatever it is, the waiting thread gets it
                answer = _Answer(error=error)
            del action  # it holds buffers
            self.num_answered += 1
            self.answers.put(answer)


class Hand:
    """Does one action at a time, for one thread; any may `call_away`. Costs some microseconds per action."""

    def __init__(self) -> None:
        self._desk = _Desk()
        self._came: list[_Answer | None] = []  # and was not fetched yet
        weakref.finalize(self, self._desk.asked.put, None)

    @property
    def busy(self) -> bool:
        """Whether an action is under way, be it one that nobody waits for any more."""
        return self._desk.num_asked != self._desk.num_answered

    def wait(self, action: Action) -> Any:
        """What `action` returns or raises. Raises CalledAway if that comes first; never use it again then."""
        self.ask(action)
        return self.answer()

    def ask(self, action: Action) -> None:
        """Begins it. Its `answer` is to be fetched before the next one is asked for."""
        if not self._desk.num_asked:
            threading.Thread(target=self._desk.serve, name="gloo-wait", daemon=True).start()
        self._desk.num_asked += 1
        self._desk.asked.put(action)

    def has_answered(self, within_s: float) -> bool:
        """Whether `answer` would return at once, or within so many seconds."""
        with suppress(Empty):
            if not self._came:
                self._came.append(self._desk.answers.get(timeout=within_s))
        return bool(self._came)

    def answer(self) -> Any:
        """As `wait`, for what was asked for."""
        answer = self._came.pop() if self._came else self._desk.answers.get()
        if answer is None:
            raise CalledAway
        if answer.error is not None:
            raise answer.error
        return answer.value

    def call_away(self) -> None:
        self._desk.answers.put(None)
