"""ETags, and requests that hold only as long as what they change is as their sender saw it.

An ETag tells what somebody wishes and decides (of a job its spec, wish, cluster and state), not how far it is or when
it was used: a tag that changed with every step would never match. It is the field `etag` of what is listed, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Header
from starlette.responses import JSONResponse

from shoal_service.cursors import described_text
from shoal_service.errors import Problem
from shoal_service.models import JobRow

_TAG = '"[0-9a-f]{16}"'
IfMatch = Annotated[
    Annotated[str, described_text(rf"^(\*|{_TAG}(, ?{_TAG}){{0,20}})$", 1000)] | None,
    Header(description="Only if it still has this ETag; `*`: whatever it has."),
]


def tag_of(*decided: Any) -> str:
    """Another one for other values, which JSON can carry."""
    return f'"{hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]}"'


def etag(row: JobRow) -> str:
    return tag_of(row.id, row.spec, row.wish, row.cluster_id, row.state, row.state_code)


def check(row: JobRow, if_match: str | None) -> None:
    """Raises Problem (412) where the job is another one than its sender saw."""
    require(etag(row), if_match, f"{row.id} has changed since: it is {row.state}, and wished to be {row.wish}")


def require(current: str | None, if_match: str | None, problem: str) -> None:
    """Raises Problem (412) where the sender saw another ETag than the `current` one; None: there is nothing there."""
    if if_match is None:
        return
    wanted = [tag.strip() for tag in if_match.split(",")]
    if current is None or ("*" not in wanted and current not in wanted):
        more: dict[str, object] = {"etag": current}
        raise Problem(412, "precondition_failed", f"If-Match = {if_match!r}: {problem}", "If-Match", more)


def tagged(found: Mapping[str, Any], status: int = 200) -> JSONResponse:
    """The answer that has something with its `etag`."""
    return JSONResponse(found, status_code=status, headers={"ETag": found["etag"]})
