"""Lists that come in pages, as iterators that fetch a page when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.client_text import given

Call = Callable[..., dict[str, Any]]


def pages(call: Call, path: str, size: int, **params: Any) -> Iterator[dict[str, Any]]:
    """The items of all pages, of which each has at most `size`. `call` raises ShoalError."""
    cursor: str | None = None
    while True:
        page = call("GET", path, params=given(limit=size, cursor=cursor, **params))
        yield from page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return
