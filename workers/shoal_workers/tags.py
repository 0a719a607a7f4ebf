"""Tags of messages between two ranks. Each is used at most once per step in each direction, and steps do not overlap:
a vote lies between them."""

from __future__ import annotations

from enum import IntEnum


class Purpose(IntEnum):
    ACTIVATION = 0
    GRADIENT = 1
    REDUCE = 2
    GATHER = 3


def tag(purpose: Purpose, number: int) -> int:
    """`number` is the micro-batch or the unit."""
    return number * len(Purpose) + purpose
