"""What the control plane refuses, in the form that goes out: application/problem+json.

Exception
  Problem            any refusal, with status and stable code
    Unauthorized     401, who asks is unknown
    Forbidden        403, known, but may not
    NotFound         404
    Conflict         409, it contradicts what is recorded; `extra` says what is
      Raced          somebody else wrote the same at the same moment, and was first
    Gone             410, it was there once
    Unavailable      503, something that this needs does not answer
      DatabaseAway   the database does not, or is too busy
    Gone             410, it was there; how long it is kept is the operator's choice
    BadInput         422, a field has a value that cannot be used
      TooCheap       its limit of price allows no plan of it
    TooManyGuesses   429, too many wrong secrets came from there
"""

from __future__ import annotations

import math
from http import HTTPStatus

from shoal_planner.errors import InvalidField


class Problem(Exception):
    """`code` is stable for programs, `detail` a sentence for people, `param` the field it is about."""

    def __init__(
        self, status: int, code: str, detail: str, param: str | None = None, extra: dict[str, object] | None = None
    ) -> None:
        super().__init__(status, code, detail, param, extra)
        self.status = status
        self.code = code
        self.detail = detail
        self.param = param
        self.extra = extra or {}

    def __str__(self) -> str:
        return self.detail

    def body(self) -> dict[str, object]:
        return {
            "type": f"urn:shoal:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "param": self.param,
            **self.extra,
        }


class Unauthorized(Problem):
    def __init__(self, detail: str) -> None:
        super().__init__(401, "unauthorized", detail)


class Forbidden(Problem):
    def __init__(self, code: str, detail: str) -> None:
        super().__init__(403, code, detail)


class NotFound(Problem):
    def __init__(self, code: str, detail: str, param: str | None = None) -> None:
        super().__init__(404, code, detail, param)


class Conflict(Problem):
    def __init__(self, code: str, detail: str, **extra: object) -> None:
        super().__init__(409, code, detail, None, extra)


class Unavailable(Problem):
    """`retry_after_s`: when asking again makes sense."""

    def __init__(self, code: str, detail: str, retry_after_s: int = 5) -> None:
        super().__init__(503, code, detail)
        self.retry_after_s = retry_after_s


class DatabaseAway(Unavailable):
    """`why` is for the log alone."""

    def __init__(self, why: str) -> None:
        detail = "the database does not answer at present; what was asked may be asked again"
        super().__init__("database_unavailable", detail)
        self.why = why


class Raced(Conflict):
    """Nothing of what was asked was done. `why` is for the log alone."""

    def __init__(self, why: str) -> None:
        detail = "somebody else has created or removed the same at this moment: look what is there, and ask again"
        super().__init__("created_meanwhile", detail)
        self.why = why


class Gone(Problem):
    def __init__(self, code: str, detail: str, **extra: object) -> None:
        super().__init__(410, code, detail, None, extra)


class TooManyGuesses(Problem):
    def __init__(self, wait_s: float) -> None:
        whole_s = math.ceil(wait_s)
        detail = f"too many wrong secrets came from your address: ask again in {whole_s} s"
        super().__init__(429, "too_many_guesses", detail, None, {"retry_after_s": whole_s})


class BadInput(Problem):
    def __init__(self, code: str, detail: str, param: str | None = None, status: int = 422) -> None:
        super().__init__(status, code, detail, param)


class TooCheap(BadInput):
    """A job that is planned for has plans, on nodes that cost more in an hour than its limit: the cheapest that were
    found, `least` dollars, on cluster `cluster_id`."""

    def __init__(self, detail: str, least: float, cluster_id: str | None = None) -> None:
        super().__init__("price_above_limit", detail, "limits.max_price_per_hour")
        self.least = least
        self.cluster_id = cluster_id


def invalid_field(error: InvalidField, path: str = "") -> BadInput:
    """The problem that says what `error` says; `path` is the enclosing object's, as in `job`."""
    field = f"{path}.{error.field}" if path else error.field
    shown = type(error)(field, error.value, error.problem)
    return BadInput("invalid_field", str(shown), field)
