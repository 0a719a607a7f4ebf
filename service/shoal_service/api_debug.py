"""REST: all that helps to find out what is wrong with a job, as one file without secrets."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from shoal_service import debug_dump
from shoal_service.gate import Caller
from shoal_service.problems import documented
from shoal_service.services import Deps

router = APIRouter(prefix="/v1/jobs/{job_id}/debug-dump", tags=["history"])
_ZIP: dict[int | str, dict[str, Any]] = {200: {"description": "A ZIP archive", "content": {"application/zip": {}}}}


@router.get("", responses={**_ZIP, **documented(404)}, response_class=Response)
async def get_debug_dump(deps: Deps, caller: Caller, job_id: str) -> Response:
    """A ZIP archive: the job's spec and status, the newest part of its journal (plans included), attempts, curve and
    printed lines, its cluster, versions, and, for administrators of the server, settings. Secrets are left out."""
    async with deps.database.read() as session:
        made = await debug_dump.dump(session, job_id, deps.settings, with_settings=caller.server_admin)
    headers = {"Content-Disposition": f'attachment; filename="{job_id}-debug.zip"', "Cache-Control": "no-store"}
    return Response(made, media_type="application/zip", headers=headers)
