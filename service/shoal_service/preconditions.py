"""ETags of jobs, and requests that hold only as long as a job is as its sender saw it.

An ETag tells what somebody wishes and decides (spec, wish, cluster, state), not how far a job is: a tag that changed
with every step would never match.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from fastapi import Header

from shoal_service.errors import Problem
from shoal_service.models import JobRow

IfMatch = Annotated[
    str | None, Header(max_length=1000, description="Only if the job still has this ETag; `*`: whatever it has.")
]


def etag(row: JobRow) -> str:
    decided = [row.id, row.spec, row.wish, row.cluster_id, row.state, row.state_code]
    return f'"{hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]}"'


def check(row: JobRow, if_match: str | None) -> None:
    """Raises Problem (412) where the job is another one than its sender saw."""
    if if_match is None:
        return
    wanted = [tag.strip() for tag in if_match.split(",")]
    if "*" not in wanted and etag(row) not in wanted:
        problem = f"If-Match = {if_match!r}: {row.id} has changed since: it is {row.state}, and wished to be {row.wish}"
        raise Problem(412, "precondition_failed", problem, "If-Match", {"etag": etag(row)})
