"""For schemathesis: each request comes from an address of its own, as a proxy in front would tell. It tries a wrong
token on every route, and from one address so many guesses are held up, whatever the route."""

from __future__ import annotations

import itertools
from typing import Any

import schemathesis

_numbers = itertools.count(1)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    number = next(_numbers)
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    case.headers = {**(case.headers or {}), "X-Forwarded-For": address}
