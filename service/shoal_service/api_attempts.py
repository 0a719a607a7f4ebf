"""REST: the attempts of a job."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from shoal_service import attempts, jobs
from shoal_service.cursors import OF_PAGE_BEFORE, described_text
from shoal_service.errors import BadInput
from shoal_service.problems import documented
from shoal_service.services import Deps
from shoal_service.shapes import Page
from shoal_service.shapes_history import Attempt

router = APIRouter(prefix="/v1/jobs/{job_id}/attempts", tags=["history"])
_CURSOR = "attempt_"


@router.get("", responses=documented(404, ok=Page[Attempt]), response_model=None)
async def list_attempts(
    deps: Deps,
    job_id: str,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[Annotated[str, described_text(f"^{_CURSOR}[0-9]{{1,9}}$", 40)] | None, OF_PAGE_BEFORE] = None,
) -> dict[str, Any]:
    """Every epoch that the job has had, newest first: on which cluster and nodes, by which plan, what it was for, when
    it began and ended, and what it did. `next_cursor` is null on the last page."""
    before = None if cursor is None else _read_cursor(cursor)
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        found = await attempts.read(session, job_id, row.state, before, limit + 1)
    more = len(found) > limit
    return {
        "items": found[:limit],
        "next_cursor": f"{_CURSOR}{found[limit - 1]['attempt']}" if more else None,
    }


def _read_cursor(cursor: str) -> int:
    number = cursor.removeprefix(_CURSOR)
    if not (cursor.startswith(_CURSOR) and number.isascii() and number.isdigit() and len(number) < 10):
        raise BadInput("invalid_field", f"cursor = {cursor!r}: is not a cursor of this list", "cursor")
    return int(number)
