"""Which refusal an error of the database is: it is away, it is busy, somebody else was first, or a value is none that
it can hold. Pure.

That a row is there already, or is there no more, a transaction may find out only when it writes, as others write beside
it. Every route would have to foresee that, so it is told here for all.
"""

from __future__ import annotations

import asyncpg
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from shoal_service.errors import BadInput, DatabaseAway, Problem, Raced

# Classes of PostgreSQL's: connection, resources, an operator's intervention, a system's error; 25006: it only reads
_AWAY = ("08", "53", "57", "58", "25006")
_BUSY = ("40",)  # deadlocks
_BAD_VALUE = ("22",)
_KEYS = (
    *("23505", "23503"),  # PostgreSQL's: one that is there, and one to refer to that is not
    *("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_FOREIGNKEY"),
)
_SQLITE_AWAY = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_READONLY")


def refusal(error: Exception) -> Problem | None:
    """None for what is neither, a defect of ours above all."""
    if isinstance(error, Problem):
        return None
    if isinstance(error, OSError | NoConnectionFree):  # refused, reset, or no answer in time
        return DatabaseAway(_words(error))
    if isinstance(error, OverflowError | UnicodeEncodeError):  # before a driver sends them
        return _bad_value(error)
    if isinstance(error, IntegrityError):
        return _of_rule(error)
    if isinstance(error, DBAPIError):
        return _of_driver(error)
    if isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError):  # while connecting
        return _of_state(str(getattr(error, "sqlstate", None) or ""), error)
    return None


def _of_rule(error: IntegrityError) -> Problem | None:
    """Other rules of tables than those of keys only a defect of ours breaks."""
    state = str(getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorname", None) or "")
    return Raced(_words(error)) if state in _KEYS else None


def _of_driver(error: DBAPIError) -> Problem | None:
    cause = error.orig
    if error.connection_invalidated:
        return DatabaseAway(_words(error))
    named = getattr(cause, "sqlite_errorname", None)
    if named is not None:
        return DatabaseAway(_words(error)) if str(named).startswith(_SQLITE_AWAY) else None
    if isinstance(cause, OverflowError | UnicodeEncodeError):
        return _bad_value(cause)
    driver = getattr(cause, "__cause__", None)
    if isinstance(driver, asyncpg.DataError):  # an argument that cannot be encoded
        return _bad_value(driver)
    return _of_state(str(getattr(cause, "sqlstate", None) or ""), error)


def _of_state(state: str, error: Exception) -> Problem | None:
    if state.startswith((*_AWAY, *_BUSY)):
        return DatabaseAway(_words(error))
    return _bad_value(error) if state.startswith(_BAD_VALUE) else None


def _bad_value(error: BaseException) -> BadInput:
    return BadInput("invalid_field", f"a value is none that can be kept: {error}")


def _words(error: Exception) -> str:
    """For the log: addresses in it are nobody's business outside."""
    cause = getattr(error, "orig", None) or error
    return f"{type(cause).__name__}: {cause}"
