"""Storage profiles: how the object stores of a project are reached, under names that its jobs use. What access is, and
how it travels, is the recovery's `storage_access`.

A job's spec keeps the names. Whoever opens its stores, here or in a cluster, gets places with the access that the
profiles say at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.errors import InvalidField
from shoal_planner.script_spec import AnyJob, any_job_to_mapping
from shoal_recovery.journal import TERMINAL
from shoal_recovery.storage_access import StoreAccess, located
from shoal_service import people, preconditions
from shoal_service.errors import Conflict, NotFound, invalid_field
from shoal_service.jobs import rfc3339
from shoal_service.models import JobRow
from shoal_service.models_people import StorageRow
from shoal_service.shapes_people import NamedCredentials, Storage

Accesses = Mapping[str, StoreAccess]
_ENDED = tuple(state.value for state in TERMINAL)


async def put(
    session: AsyncSession, project: str, name: str, access: StoreAccess, if_match: str | None = None
) -> tuple[StorageRow, bool]:
    """Makes or replaces it; whether it is new. Raises NotFound where there is no such project, and Problem (412) where
    it is not as `if_match` says."""
    await people.get_project(session, project)
    row = await session.get(StorageRow, (project, name), with_for_update=True)
    check(row, if_match, name)
    is_new, now = row is None, time.time()
    if row is None:
        row = StorageRow(project_id=project, name=name, created_at_s=now)
        session.add(row)
    row.endpoint, row.region, row.updated_at_s = access.endpoint, access.region, now
    row.keys, row.profile = access.keys, access.profile
    await session.flush()
    return row, is_new


async def get(session: AsyncSession, project: str, name: str, *, to_change: bool = False) -> StorageRow:
    """Raises NotFound."""
    row = await session.get(StorageRow, (project, name), with_for_update=to_change, populate_existing=True)
    if row is None:
        raise NotFound("storage_not_found", f"name = {name!r}: project {project} has no such storage", "name")
    return row


async def of_project(
    session: AsyncSession, project: str, *, limit: int | None = None, after: str | None = None
) -> Sequence[StorageRow]:
    """By name: at most `limit` of those behind `after`."""
    query = select(StorageRow).where(StorageRow.project_id == project).order_by(StorageRow.name).limit(limit)
    return (await session.scalars(query if after is None else query.where(StorageRow.name > after))).all()


async def remove(session: AsyncSession, project: str, name: str, if_match: str | None = None) -> None:
    """Raises NotFound, Conflict while a job that has not ended uses it, and Problem (412)."""
    row = await get(session, project, name, to_change=True)
    check(row, if_match, name)
    query = select(JobRow).where(JobRow.project_id == project, JobRow.state.not_in(_ENDED)).order_by(JobRow.id)
    for job in (await session.scalars(query)).all():
        if name in names_in(job.spec):
            problem = f"storage {name} of project {project} is in use: {job.id} has not ended"
            raise Conflict("storage_in_use", problem, job_id=job.id)
    await session.delete(row)


async def for_job(session: AsyncSession, project: str, spec: AnyJob, *, kept: bool = False) -> Accesses:
    """Of all that the job names; `kept`: nobody removes one before this transaction, which writes, has ended. Raises
    BadInput."""
    wanted, lock = names_in(any_job_to_mapping(spec)), {"read": True} if kept else None
    rows = {name: await session.get(StorageRow, (project, name), with_for_update=lock) for name in wanted}
    missing = next((name for name, row in rows.items() if row is None), None)
    if missing is not None:
        known = ", ".join(row.name for row in await of_project(session, project)) or "none"
        problem = f"is no storage of project {project}, which has: {known}"
        raise invalid_field(InvalidField(wanted[missing], missing, problem))
    return {name: access_of(row) for name, row in rows.items() if row is not None}


def access_of(row: StorageRow) -> StoreAccess:
    return StoreAccess(endpoint=row.endpoint, region=row.region, keys=row.keys, profile=row.profile)


def names_in(spec: Mapping[str, Any]) -> dict[str, str]:
    """The profiles that a JOB names, each with the first field that names it."""
    found: dict[str, str] = {}
    for field, section in _sections(spec):
        if section.get("storage") is not None:
            found.setdefault(section["storage"], f"{field}.storage")
    return found


def _sections(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of a JOB that name a place and, where it is not reached as everywhere, its profile."""
    yield "checkpoint", spec.get("checkpoint") or {}
    data = spec.get("data") or {}
    yield "data", data
    for index, source in enumerate(data.get("mix") or ()):
        yield f"data.mix[{index}]", source


def located_spec(spec: Mapping[str, Any], accesses: Accesses) -> dict[str, Any]:
    """The spec as those read it who open its stores: places have their access, and no profile is named. A profile that
    there is none of leaves its place as it is."""
    found = dict(spec)
    for section in ("checkpoint", "data"):
        if found.get(section):
            found[section] = _located(found[section], accesses)
    if mix := (found.get("data") or {}).get("mix"):
        found["data"]["mix"] = [_located(source, accesses) for source in mix]
    return found


def _located(section: Mapping[str, Any], accesses: Accesses) -> dict[str, Any]:
    access = accesses.get(section.get("storage") or "")
    if access is None:
        return dict(section)
    places = {
        name: located(uri, access)
        for name in ("uri", "eval_uri")
        if (uri := section.get(name)) is not None and uri.startswith("s3://")
    }
    return {**section, **places, "storage": None}


async def located_specs(session: AsyncSession, rows: Sequence[JobRow]) -> dict[str, dict[str, Any]]:
    """By the ids of these jobs."""
    naming = {row.project_id for row in rows if names_in(row.spec)}
    query = select(StorageRow).where(StorageRow.project_id.in_(naming))
    known: dict[str, dict[str, StoreAccess]] = {}
    for storage in (await session.scalars(query)).all() if naming else ():
        known.setdefault(storage.project_id, {})[storage.name] = access_of(storage)
    return {row.id: located_spec(row.spec, known.get(row.project_id, {})) for row in rows}


async def located_of(session: AsyncSession, row: JobRow) -> dict[str, Any]:
    return (await located_specs(session, [row]))[row.id]


def check(row: StorageRow | None, if_match: str | None, name: str) -> None:
    """Raises Problem (412)."""
    what = "there is none of that name" if row is None else "it has changed since"
    preconditions.require(None if row is None else _tag(row), if_match, f"storage {name}: {what}")


def _tag(row: StorageRow) -> str:
    return preconditions.tag_of(row.project_id, row.name, row.endpoint, row.region, row.keys, row.profile)


def resource(row: StorageRow) -> Storage:
    credentials: NamedCredentials = {"environment": row.keys, "profile": row.profile}
    return {
        "name": row.name,
        "project": row.project_id,
        "endpoint": row.endpoint,
        "region": row.region,
        "credentials": credentials if row.keys or row.profile else None,
        "created_at": rfc3339(row.created_at_s),
        "updated_at": rfc3339(row.updated_at_s),
        "etag": _tag(row),
    }
