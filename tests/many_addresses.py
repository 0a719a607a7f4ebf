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
    """The case itself stays as it is: it would be judged anew, without what all requests are given."""
    number = next(_numbers)
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    phase = case.meta.phase.data if case.meta else None
    left_out = getattr(getattr(phase, "scenario", None), "name", None) == "MISSING_PARAMETER"
    is_unsigned = left_out and phase.parameter == "Authorization"

    def finish(request: Any) -> Any:
        request.headers["X-Forwarded-For"] = address
        if is_unsigned:
            request.headers.pop("Authorization", None)
        return request

    kwargs["auth"] = finish
