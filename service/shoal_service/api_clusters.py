"""REST for connectors: leases, what clusters are wished to run, and the journals that come from there."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.errors import InvalidField
from shoal_planner.profile import profile_from_mapping
from shoal_recovery.journal import StateChanged
from shoal_recovery.journal_shares import ShareTaken
from shoal_service import clusters, drills, jobs, journal, log_store, pools
from shoal_service.bell import CLUSTERS, JOBS, job_topic, log_topic
from shoal_service.bodies import ClusterReport, Identifier, JournalBatch
from shoal_service.cursors import Cursor, Limit, page_after
from shoal_service.errors import Conflict, invalid_field
from shoal_service.log_of_scripts import printed_by_script
from shoal_service.problems import documented
from shoal_service.services import Deps
from shoal_service.shapes import Page
from shoal_service.shapes_clusters import Cluster, ClusterInFull, Journaled, Lease
from shoal_service.shapes_jobs import Wishes

router = APIRouter(prefix="/v1", tags=["connectors"])


@router.put("/clusters/{cluster_id}", responses=documented(409, ok=Lease), response_model=None)
async def renew_lease(deps: Deps, cluster_id: Annotated[Identifier, Path()], report: ClusterReport) -> Lease:
    """Takes or renews the lease of a cluster and tells what it consists of. 409 while another holder's lasts.

    Jobs that waited for any cluster are given to the first that comes, and so are those of clusters that are gone,
    where nothing is lost by that, and those that wait for another one while this one has idle nodes for them."""
    _check_values(report)
    lease_s = min(report.lease_s, deps.settings.max_lease_s)
    async with deps.database.write() as session:
        row = await clusters.renew(
            session,
            cluster_id,
            holder=report.holder,
            lease_s=lease_s,
            snapshot=report.snapshot,
            profile=report.profile,
            fault_tolerant_head=report.fault_tolerant_head,
            ages_s={sign.node: (sign.age_s, sign.by) for sign in report.signs or ()},
        )
        if report.pools is not None:
            await pools.take_report(session, cluster_id, [each.model_dump() for each in report.pools])
        adopted = await clusters.adopt_waiting(session, cluster_id)
    deps.bell.ring(CLUSTERS, *map(job_topic, adopted))
    if adopted:
        deps.bell.ring(JOBS)
    deps.takeover.look(cluster_id)
    deps.moving.look(cluster_id)
    return {"cluster_id": cluster_id, "lease_until": jobs.rfc3339(row.lease_until_s), "lease_s": lease_s}


def _check_values(report: ClusterReport) -> None:
    try:
        snapshot_from_mapping(report.snapshot)
    except InvalidField as error:
        raise invalid_field(error, "snapshot") from error
    try:
        profile_from_mapping(report.profile)
    except InvalidField as error:
        raise invalid_field(error, "profile") from error
    try:
        pools.check_report([each.model_dump() for each in report.pools or ()])
    except InvalidField as error:
        raise invalid_field(error) from error


@router.get("/clusters", responses=documented(ok=Page[Cluster]))
async def list_clusters(deps: Deps, limit: Limit = 200, cursor: Cursor = None) -> Response:
    """By id; `next_cursor` is null on the last page."""
    async with deps.database.read() as session:
        found = [clusters.resource(row) for row in await clusters.all_clusters(session)]
    return page_after(found, lambda each: (each["id"],), limit, cursor)


@router.get("/clusters/{cluster_id}", responses=documented(404, ok=ClusterInFull), response_model=None)
async def get_cluster(deps: Deps, cluster_id: str) -> ClusterInFull:
    """One cluster and all that was measured there (`profile`), each figure with its source. Its nodes are in the pages
    of `GET /v1/nodes?cluster_id=`; `snapshot` is what the cluster says beside these."""
    async with deps.database.read() as session:
        row = await clusters.get(session, cluster_id)
    beside = {name: value for name, value in row.snapshot.items() if name != "nodes"}
    return {**clusters.resource(row), "snapshot": beside, "profile": row.profile}


@router.get("/clusters/{cluster_id}/wishes", responses=documented(404, ok=Wishes), response_model=None)
async def get_wishes(
    deps: Deps,
    cluster_id: str,
    after: int | None = None,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Wishes:
    """Every job of the cluster that has not ended, and every drill. Held open for up to
    `wait_s` while the version is still `after`."""
    deadline = time.monotonic() + min(wait_s, deps.settings.max_wait_s)
    while True:
        count = deps.bell.count(CLUSTERS)
        await deps.scheduler.look(cluster_id)
        async with deps.database.read() as session:
            row = await clusters.get(session, cluster_id)
            found = await clusters.wishes(session, cluster_id, drills.wishes(row))
        left_s = deadline - time.monotonic()
        if found["version"] != after or left_s <= 0 or deps.bell.closed:
            return found
        await deps.bell.wait(CLUSTERS, count, min(left_s, deps.bell.patience_s(deps.settings.poll_s)))


@router.post("/jobs/{job_id}/journal", responses=documented(404, 409, ok=Journaled), response_model=None)
async def append_journal(deps: Deps, job_id: str, batch: JournalBatch) -> Journaled:
    """Adds to a job's journal. Entries that are known are skipped; a gap answers 409 with `expected_seq`."""
    entries = journal.parse_entries(batch.entries)
    async with deps.database.write() as session:
        row = await jobs.get(session, job_id, to_change=True)
        cluster = await clusters.get(session, batch.cluster_id)
        clusters.check_holder(cluster, batch.holder, time.time())
        if row.cluster_id != batch.cluster_id:
            owner = "no cluster yet" if row.cluster_id is None else f"cluster {row.cluster_id}"
            raise Conflict("wrong_cluster", f"{job_id} belongs to {owner}, not to {batch.cluster_id}")
        before, printed = row.last_seq, printed_by_script(entries, row.epoch)
        last_seq = await journal.append(session, row, entries)
        if printed.lines:
            await log_store.append(session, job_id, [printed], deps.settings.log_bytes_per_job)
    if last_seq != before:
        deps.meters.ingested(entries[before - last_seq :], time.time())
        deps.bell.ring(job_topic(job_id), JOBS, *([log_topic(job_id)] if printed.lines else []))
        # A job that has ended leaves the wishes of its cluster, and one that has left nodes makes room.
        if any(isinstance(entry.event, StateChanged | ShareTaken) for entry in entries):
            deps.bell.ring(CLUSTERS)
    return {"last_seq": last_seq}
