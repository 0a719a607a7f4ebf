"""Whether a job's object store can be written from here. Owns the patience; what a store does is `shoal_recovery`'s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.store import open_store

T = TypeVar("T")
_PATIENCE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """`refused`: it will not take anything, whoever waits; `problem`: it does not at present."""

    refused: str | None = None
    problem: str | None = None


def try_store(uri: str | None) -> Tried:
    """Writes and reads a small object, if there is a store; returns within a bounded time."""
    if uri is None:
        return Tried()
    try:
        return patiently(uri, lambda: _attempt(uri), _PATIENCE_S)
    except StoreUnreachable as error:
        return Tried(problem=error.problem)


def patiently(uri: str, ask: Callable[[], T], patience_s: float, meanwhile: Callable[[], None] | None = None) -> T:
    """What `ask` answers, or raises. Raises StoreUnreachable where it takes longer than that: a store that hangs must
    not hold up whoever has more to do than to wait for it. What was asked then goes on beside. `meanwhile` is called
    again and again until then, takes a moment each time, and may raise."""
    asked: Future[T] = Future()

    def attempt() -> None:
        try:
            asked.set_result(ask())
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=attempt, name="store-check", daemon=True).start()
    ends_s = time.monotonic() + patience_s
    while meanwhile is not None and not asked.done() and time.monotonic() < ends_s:
        meanwhile()
    if not wait([asked], timeout=max(0.0, ends_s - time.monotonic())).done:
        raise StoreUnreachable(uri, f"did not answer within {patience_s:.0f} s")
    return asked.result()


def _attempt(uri: str) -> Tried:
    try:
        open_store(uri).check_writable()
    except StoreRefused as error:
        return Tried(refused=error.problem)
    except InvalidField as error:
        return Tried(refused=error.problem)
    except StoreError as error:
        return Tried(problem=error.problem)
    return Tried()
