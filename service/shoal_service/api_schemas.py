"""REST: schemas of the documents that users write, for their editors, which cannot sign in."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from shoal_planner.job_schema import job_schema
from shoal_service.problems import documented

router = APIRouter(prefix="/v1/schemas", tags=["schemas"])
_SCHEMA: dict[int | str, dict[str, Any]] = {
    200: {"description": "A JSON Schema", "content": {"application/schema+json": {}}}
}


@router.get("/job", responses={**_SCHEMA, **documented()}, response_class=Response)
async def get_job_schema() -> Response:
    """The JSON Schema of a JOB."""
    return JSONResponse(job_schema(), media_type="application/schema+json", headers={"Cache-Control": "max-age=3600"})
