"""How much one answer may hold: whatever is listed comes in pages that end before they are too large. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
MAX_ANSWER_BYTES = 200_000
_AROUND = 2_000  # what a page says beside its items


def fitting(items: Sequence[T], max_bytes: int = MAX_ANSWER_BYTES - _AROUND, *, from_end: bool = False) -> list[T]:
    """As many of the first (or last) items as their JSON leaves room for, and at least one."""
    size, kept = 0, 0
    for item in reversed(items) if from_end else items:
        size += len(json.dumps(item, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")) + 1
        if kept and size > max_bytes:
            break
        kept += 1
    return list(items[len(items) - kept :] if from_end else items[:kept])
