"""Tags of messages between two ranks. Each is used at most once per step in each direction, and steps do not overlap:
a vote lies between them."""

from __future__ import annotations

from enum import IntEnum


class Purpose(IntEnum):
    ACTIVATION = 0
    GRADIENT = 1
    REDUCE = 2
    GATHER = 3
    SPREAD = 4
    FETCH = 5
    SCATTER = 6
    RELAY = 7
    TICKET = 8


def tag(purpose: Purpose, number: int) -> int:
    """`number` is the micro-batch and the sender's chunk, the unit, or which use of a unit in the step it is."""
    return number * len(Purpose) + purpose


def purpose_of(tag: int) -> Purpose:
    return Purpose(tag % len(Purpose))
