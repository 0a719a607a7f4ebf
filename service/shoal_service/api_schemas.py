"""REST: schemas of the documents that users write, for their editors, which cannot sign in."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import JSONResponse, Response

from shoal_service.documents import WRITTEN
from shoal_service.errors import NotFound
from shoal_service.problems import documented

router = APIRouter(prefix="/v1/schemas", tags=["schemas"])
_SCHEMA: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A JSON Schema",
        "content": {
            "application/schema+json": {"schema": {"type": "object", "required": ["$schema", "title", "type"]}}
        },
    }
}


@router.get("/{document}", responses={**_SCHEMA, **documented(404)}, response_class=Response)
async def get_schema(document: Annotated[str, Path(max_length=40, examples=list(WRITTEN))]) -> Response:
    """The JSON Schema of a JOB, CLUSTER, MARKET or PLAN (`job`, `cluster`, `market`, `plan`)."""
    made = WRITTEN.get(document)
    if made is None:
        known = ", ".join(WRITTEN)
        raise NotFound("schema_not_found", f"document = {document!r}: must be one of {known}", "document")
    return JSONResponse(made(), media_type="application/schema+json", headers={"Cache-Control": "max-age=3600"})
