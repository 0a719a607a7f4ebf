"""What can go wrong in the planner.

    ValueError
      InvalidField        a field of a job, cluster or plan has a value that cannot be used
        NotADocument      there are no fields at all
    Exception
      NoPlanFits          the job is well formed, but no plan on this cluster fits
        HostTooSmall      for want of host memory for snapshots and state: with fewer copies one might
    AssertionError
      ScheduleError       programs that would hang or mix up data: a mistake of ours, found before anything runs

All cross process borders, so they take positional arguments and pickle as they are.
"""

from __future__ import annotations

from shoal_planner.secrecy import HIDDEN, concealed, concealed_text, hides

MOST_SHOWN = 160  # characters of a value in a message: a path shall be whole


class InvalidField(ValueError):
    """A value that the caller gave cannot be used.

    `field` is the dotted path of the field (`model.heads`), `value` what stood there, `problem` a clause that
    completes the sentence "FIELD = VALUE: PROBLEM", which shows nothing that may be a secret.
    """

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(field, value, problem)
        self.field = field
        self.value = value
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field} = {show(self.value, self.field)}: {concealed_text(self.problem)}"


class NotADocument(InvalidField):
    """A whole document (`field`: job, cluster or plan) that is empty or no mapping of fields to values."""

    def __str__(self) -> str:
        return f"the {self.field} {concealed_text(self.problem)}"


class NoPlanFits(Exception):
    """No plan of this job fits the cluster; `constraint` is the binding one, as a sentence for the user."""

    def __init__(self, constraint: str) -> None:
        super().__init__(constraint)
        self.constraint = constraint

    def __str__(self) -> str:
        return self.constraint


class HostTooSmall(NoPlanFits):
    """A host has no room for the snapshots, or the state, that it is to keep."""


class PriceAboveLimit(NoPlanFits):
    """There are plans of this job, on nodes that cost more in an hour than `limit`: the cheapest that were found cost
    `least`, in dollars."""

    def __init__(self, limit: float, least: float) -> None:
        NoPlanFits.__init__(self, price_above_limit(limit, least))
        self.args = (limit, least)
        self.limit = limit
        self.least = least


def price_above_limit(limit: float, least: float) -> str:
    """A clause for the user."""
    return (
        f"limits.max_price_per_hour = {limit:g} USD, and the cheapest nodes that a plan of it was found for cost "
        f"{least:g} USD an hour"
    )


class ScheduleError(AssertionError):
    """The programs of a plan contradict each other; `rank` is where it shows, `problem` a sentence."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(rank, problem)
        self.rank = rank
        self.problem = problem

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.problem}"


def show(value: object, field: str = "") -> str:
    """The value at this dotted path as messages quote it: cut if it is long, and without what may be a secret."""
    if value is not None and hides(field):
        return HIDDEN
    try:
        text = repr(concealed(value))
    except ValueError:  # Python refuses to write out whole numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
