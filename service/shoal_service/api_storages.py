"""REST: storage profiles of a project, how its object stores are reached."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from shoal_planner.data_spec import STORAGE
from shoal_planner.errors import InvalidField
from shoal_recovery.storage_access import StoreAccess
from shoal_service import people, storages
from shoal_service.api_people import Limit
from shoal_service.bell import CLUSTERS
from shoal_service.bodies import Body
from shoal_service.cursors import cut
from shoal_service.errors import invalid_field
from shoal_service.preconditions import IfMatch, tagged
from shoal_service.problems import documented
from shoal_service.services import Deps
from shoal_service.shapes import Page
from shoal_service.shapes_people import Storage

router = APIRouter(prefix="/v1/projects/{project_id}/storages", tags=["storages"])
ProjectId = Annotated[str, Path(max_length=40, pattern=r"^[a-z0-9-]+$")]
Name = Annotated[str, Path(pattern=f"^{STORAGE.pattern}$")]
NameCursor = Annotated[
    str | None, Query(pattern=f"^{STORAGE.pattern}$", description="`next_cursor` of the page before.")
]


class Credentials(Body):
    """Where credentials are found by whoever opens the store: control plane, nodes, and who exports. One of the two."""

    environment: str | None = Field(
        default=None, description="X: in the variables SHOAL_STORAGE_X_ACCESS_KEY_ID and so on."
    )
    profile: str | None = Field(default=None, description="x: in the section shoal-x of the AWS credentials file.")


class NewStorage(Body):
    endpoint: str | None = Field(
        default=None, description="Where the S3 protocol is spoken, as in https://minio.example:9000."
    )
    region: str | None = None
    credentials: Credentials | None = Field(default=None, description="Null: what boto3 finds by itself.")


@router.get("", responses=documented(404, ok=Page[Storage]), response_model=None)
async def list_storages(
    deps: Deps, project_id: ProjectId, limit: Limit = 50, cursor: NameCursor = None
) -> Page[Storage]:
    """By name."""
    async with deps.database.read() as session:
        await people.get_project(session, project_id)
        rows = await storages.of_project(session, project_id, limit=limit + 1, after=cursor)
    shown, following = cut(rows, limit, lambda row: row.name)
    return {"items": [storages.resource(row) for row in shown], "next_cursor": following}


@router.get("/{name}", responses=documented(404, ok=Storage))
async def get_storage(deps: Deps, project_id: ProjectId, name: Name) -> Response:
    async with deps.database.read() as session:
        return tagged(storages.resource(await storages.get(session, project_id, name)))


@router.put("/{name}", responses=documented(404, 412, ok=Storage, created=Storage))
async def put_storage(
    deps: Deps, project_id: ProjectId, name: Name, body: NewStorage, if_match: IfMatch = None
) -> Response:
    """Makes a profile, or replaces it: jobs that begin or go on from then on go by it. Of credentials it has names
    alone; what looks like more is refused, and not repeated."""
    named = body.credentials or Credentials()
    try:
        access = StoreAccess(endpoint=body.endpoint, region=body.region, keys=named.environment, profile=named.profile)
    except InvalidField as error:
        raise invalid_field(error) from error
    async with deps.database.write() as session:
        row, is_new = await storages.put(session, project_id, name, access, if_match)
        found = storages.resource(row)
    deps.bell.ring(CLUSTERS)
    return tagged(found, 201 if is_new else 200)


@router.delete("/{name}", status_code=204, responses=documented(404, 409, 412))
async def delete_storage(deps: Deps, project_id: ProjectId, name: Name, if_match: IfMatch = None) -> Response:
    """409 while a job that has not ended uses it."""
    async with deps.database.write() as session:
        await storages.remove(session, project_id, name, if_match)
    return Response(status_code=204)
