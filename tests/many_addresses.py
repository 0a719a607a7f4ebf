"""For schemathesis: each request comes from an address of its own, as a proxy in front would tell. It tries a wrong
token on every route, and from one address so many guesses are held up, whatever the route. Where it leaves the token
out, none is sent: what it was given for all its requests is added after that."""

from __future__ import annotations

import itertools
from typing import Any

import schemathesis

_numbers = itertools.count(1)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    number = next(_numbers)
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    phase = case.meta.phase.data if case.meta else None
    left_out = getattr(getattr(phase, "scenario", None), "name", None) == "MISSING_PARAMETER"
    if not left_out or phase.parameter != "Authorization":
        case.headers = {**(case.headers or {}), "X-Forwarded-For": address}
        return

    def without_token(request: Any) -> Any:
        """The case itself stays as it is: changed, it would be judged as one that has what all are given."""
        request.headers["X-Forwarded-For"] = address
        request.headers.pop("Authorization", None)
        return request

    kwargs["auth"] = without_token
