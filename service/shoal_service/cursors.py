"""Pages of lists: where one ends the next begins. Of rows of the database by one column of theirs, and of what clusters
say in the order of keys. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query
from pydantic import Field
from starlette.responses import Response

from shoal_service.answers import page
from shoal_service.errors import BadInput

T = TypeVar("T")
Key = tuple[str | int | float, ...]
Limit = Annotated[int, Query(ge=1, le=500)]
NEXT = "`next_cursor` of the page before."
OF_PAGE_BEFORE = Query(description=NEXT)


def described_text(pattern: str, max_length: int) -> Any:
    """For the type of a parameter: clients are told what it looks like; what is wrong with it is said by whoever reads
    it, in words."""
    return Field(max_length=max_length, json_schema_extra={"pattern": pattern})


# JSON of a list that begins with a text or a number, as base64 writes it.
Cursor = Annotated[Annotated[str, described_text("^W[yz][A-Za-z0-9_-]+$", 1000)] | None, OF_PAGE_BEFORE]


def cursor_of(prefix: str) -> Any:
    """Of lists that go by ids."""
    return Query(pattern=rf"^{prefix}_[0-9A-Z]{{26}}$", description=NEXT)


def cut(rows: Sequence[T], limit: int, key: Callable[[T], str]) -> tuple[Sequence[T], str | None]:
    """Of `limit` + 1 rows that were asked for, in the order of `key`: those of this page, and the key after which the
    next one begins, if there is one."""
    return rows[:limit], key(rows[limit - 1]) if len(rows) > limit else None


def page_after(items: Sequence[Any], key: Callable[[Any], Key], limit: int, cursor: str | None) -> Response:
    """The items behind the cursor, which are in no order: at most `limit`, and as many as an answer may hold. Every key
    has values of the same types. Raises BadInput."""
    found = sorted(items, key=key)
    if cursor is not None:
        after = _read(cursor)
        try:
            found = [item for item in found if key(item) > after]
        except TypeError as error:
            raise _foreign(cursor) from error

    def rest(kept: int) -> dict[str, Any]:
        return {"next_cursor": _written(key(found[kept - 1])) if kept < len(found) else None}

    return page(found[:limit], rest)


def _written(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def _read(cursor: str) -> Key:
    try:
        found = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise _foreign(cursor) from error
    if not isinstance(found, list) or not all(isinstance(each, str | int | float) for each in found):
        raise _foreign(cursor)
    return tuple(found)


def _foreign(cursor: str) -> BadInput:
    return BadInput("invalid_field", f"cursor = {cursor!r}: is not a cursor of this list", "cursor")
