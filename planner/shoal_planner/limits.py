"""What a job may use and cost, and how much it matters beside others: the fields of a JOB that say so, checked by
themselves. What follows from them is decided where nodes are shared out (`allotment`) and where money is counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from shoal_planner.errors import InvalidField
from shoal_planner.ranges import check_positive, check_range

PRIORITIES: Mapping[str, int] = {"low": -100, "normal": 0, "high": 100}
Priority = int | Literal["low", "normal", "high"]
_MOST_PRIORITY = 1000
_MANY = 1_000_000_000
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?([smhd])")
_UNIT_S: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_S = 100 * 366 * 86400.0
# Who has reached one of these rests until it allows more.
RESTING = ("budget_usd", "deadline", "max_duration")


def check_priority(given: Priority) -> None:
    """Raises InvalidField."""
    if not isinstance(given, str):
        check_range("priority", given, -_MOST_PRIORITY, _MOST_PRIORITY)


def priority_of(given: Priority) -> int:
    """The number that a name stands for; the higher goes first."""
    return PRIORITIES[given] if isinstance(given, str) else given


def deadline_at_s(deadline: str) -> float:
    """Seconds since 1970. Raises InvalidField for what is no moment (RFC 3339, with its offset from UTC)."""
    try:
        moment = datetime.fromisoformat(deadline)
    except ValueError as error:
        raise InvalidField("deadline", deadline, "must be a moment as RFC 3339 writes it") from error
    if moment.tzinfo is None:
        raise InvalidField("deadline", deadline, "must say its offset from UTC, as in 2027-01-31T18:00:00Z")
    return moment.timestamp()


def check_to_come(deadline: str | None, now_s: float) -> None:
    """Of what is wanted now: a job that is stored may have one that has passed. Raises InvalidField."""
    if deadline is not None and deadline_at_s(deadline) <= now_s:
        raise InvalidField("limits.deadline", deadline, "has passed already: give a later one, or none (null)")


def duration_s(duration: str) -> float:
    """The seconds of a duration as in 90m, 12h or 2d. Raises InvalidField."""
    if found := _DURATION.fullmatch(duration):
        seconds = float(found[1]) * _UNIT_S[found[2]]
        if 0 < seconds <= _LONGEST_S:
            return seconds
    raise InvalidField("max_duration", duration, "must be a number of s, m, h or d, as in 90m, 12h or 2d")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLimits:
    """`budget_usd` is all that the job's nodes may cost, `max_price_per_hour` what those may cost that it has at one
    time, in dollars; a node without a price costs nothing that anybody knows of. At most `max_devices` at one time.
    At the `deadline` it rests, done or not, and so it does when `max_duration` has passed since it began."""

    max_price_per_hour: float | None = None
    budget_usd: float | None = None
    deadline: str | None = None
    max_duration: str | None = None
    max_devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_price_per_hour", "budget_usd"):
            if (given := getattr(self, name)) is not None:
                check_positive(name, given)
        if self.deadline is not None:
            deadline_at_s(self.deadline)
        if self.max_duration is not None:
            duration_s(self.max_duration)
        if self.max_devices is not None:
            check_range("max_devices", self.max_devices, 1, _MANY)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSpec(CostLimits):
    """What a plan of this job may use. No `device_types` means every type. `rent`: nodes may be rented for it where its
    cluster can get more, within its other limits."""

    device_types: tuple[str, ...] = ()
    min_devices: int = 1
    rent: bool = False

    def __post_init__(self) -> None:
        CostLimits.__post_init__(self)
        if self.rent and self.max_price_per_hour is None:
            raise InvalidField("rent", True, "needs max_price_per_hour: what is rented at one time must have a bound")
        check_range("min_devices", self.min_devices, 1, _MANY)
        if self.max_devices is not None and self.max_devices < self.min_devices:
            problem = f"must be at least min_devices ({self.min_devices})"
            raise InvalidField("max_devices", self.max_devices, problem)

    def check_store(self, uri: str | None) -> None:
        """Who has spent its budget, or is past its deadline, rests in its object store. Raises InvalidField."""
        for name in RESTING:
            if getattr(self, name) is not None and uri is None:
                problem = "needs a checkpoint.uri: a job that may not go on rests there, and would lose all it did"
                raise InvalidField(f"limits.{name}", getattr(self, name), problem)


UNLIMITED = LimitsSpec()
