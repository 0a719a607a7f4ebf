"""How much one answer may hold: whatever is listed comes in pages that end before they are too large. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response

T = TypeVar("T")
MAX_ANSWER_BYTES = 200_000
_AROUND = 2_000  # what a page says beside its items


def encoded(item: Any) -> bytes:
    """As JSON, as it goes out. Raises ValueError for what JSON cannot carry."""
    return json.dumps(item, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def page(items: Sequence[Any], rest: Callable[[int], dict[str, Any]]) -> Response:
    """The first items, as many as an answer may hold and at least one, as the field `items`, and `rest` of how many
    these are. Each item is encoded once: pages are what is asked for most."""
    parts, size = [], 0
    for item in items:
        parts.append(encoded(item))
        size += len(parts[-1]) + 1
        if len(parts) > 1 and size > MAX_ANSWER_BYTES - _AROUND:
            parts.pop()
            break
    body = b'{"items":[' + b",".join(parts) + b"]," + encoded(rest(len(parts)))[1:]
    return Response(body, media_type="application/json")


def fitting(items: Sequence[T], max_bytes: int = MAX_ANSWER_BYTES - _AROUND, *, from_end: bool = False) -> list[T]:
    """As many of the first (or last) items as their JSON leaves room for, and at least one."""
    size, kept = 0, 0
    for item in reversed(items) if from_end else items:
        size += len(encoded(item)) + 1
        if kept and size > max_bytes:
            break
        kept += 1
    return list(items[len(items) - kept :] if from_end else items[:kept])
