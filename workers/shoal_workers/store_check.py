"""Whether a job's object store can be written from here. Owns the patience; what a store does is `shoal_recovery`'s."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError, StoreRefused
from shoal_recovery.store import open_store

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
    found = [Tried(problem=f"did not answer within {_PATIENCE_S:.0f} s")]

    def attempt() -> None:
        found.append(_attempt(uri))

    thread = threading.Thread(target=attempt, name="store-check", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return found[-1]


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
