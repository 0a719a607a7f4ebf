"""REST: what happened to a job. Events (as pages and as a stream), loss curve, plans, recoveries, cost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from shoal_planner.answers import plan_of_answer
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.errors import InvalidField, show
from shoal_planner.picture import plan_svg
from shoal_recovery.checkpoints import list_manifests, manifest_name
from shoal_recovery.errors import StoreError
from shoal_recovery.journal import EVENTS
from shoal_recovery.store import open_store
from shoal_service import comparison, jobs, journal, known_by, rentals, storages
from shoal_service.answers import encoded, fitting, page
from shoal_service.bell import job_topic
from shoal_service.bulk_losses import losses_resource
from shoal_service.checkpoint_facts import Facts, facts_of
from shoal_service.cursors import described_text
from shoal_service.curve import MOST_POINTS, curve
from shoal_service.errors import BadInput, Conflict, DatabaseAway, NotFound, Unavailable
from shoal_service.gate import streamed
from shoal_service.models import JournalRow
from shoal_service.panels_comparison import Cost, on_demand_plan
from shoal_service.problems import documented
from shoal_service.retention import check_kept
from shoal_service.services import Deps, Services
from shoal_service.shapes_history import (
    BulkLosses,
    BytesBySource,
    Checkpoint,
    Checkpoints,
    Curve,
    PlanInForce,
    Recoveries,
)
from shoal_service.shapes_jobs import Events
from shoal_service.spending import spending_of

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["history"])
_PAGE = 1000
_GENERATIONS_BYTES = 50_000  # beside the plan itself, which may be large
_MOST_SEQ = 2**31 - 1
_PICTURE: dict[int | str, dict[str, Any]] = {200: {"description": "A picture", "content": {"image/svg+xml": {}}}}
# A picture has its own style and nothing else; names in it come from users.
_PICTURE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
Kind = Annotated[str, Field(json_schema_extra={"enum": sorted(EVENTS)})]
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"model": Events, "description": "A page, or a stream", "content": {"text/event-stream": {}}}
}


@router.get("/events", responses={**_STREAMED, **documented(404, 410)})
async def get_events(
    request: Request,
    deps: Deps,
    job_id: str,
    after: Annotated[int, Query(ge=0, le=_MOST_SEQ)] = 0,
    limit: Annotated[int, Query(ge=1, le=_PAGE)] = 200,
    kind: Annotated[list[Kind] | None, Query(description="Only entries of these kinds.")] = None,
    watch: bool = False,
    last_event_id: Annotated[Annotated[str, described_text("^[0-9]{1,9}$", 40)] | None, Header()] = None,
) -> Response:
    """The journal after number `after`. With `watch=1` or `Accept: text/event-stream` a stream of server-sent events
    whose ids are journal numbers; it goes on from `Last-Event-ID`, and ends with the event `end` once the job has."""
    kinds = tuple(kind or ())
    if unknown := next((each for each in kinds if each not in EVENTS), None):
        known = f"must be one of {', '.join(sorted(EVENTS))}"
        raise BadInput("invalid_field", str(InvalidField("kind", unknown, known)), "kind")
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        start = after if last_event_id is None else _read_id(last_event_id)
        check_kept(row, start)
        if not watch and "text/event-stream" not in request.headers.get("accept", ""):
            rows = await journal.entries_after(session, job_id, after, limit + 1, kinds)
            return _page(rows[:limit], after, row.last_seq, more=len(rows) > limit)
    return streamed(request, deps, _follow(deps, job_id, start, kinds))


def _page(rows: Sequence[JournalRow], after: int, last_seq: int, *, more: bool) -> Response:
    def rest(kept: int) -> dict[str, Any]:
        next_after = rows[kept - 1].seq if kept else after
        return {"next_after": next_after, "more": more or kept < len(rows), "last_seq": last_seq}

    return page([journal.event_resource(row) for row in rows], rest)


def _read_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadInput("invalid_field", f"Last-Event-ID = {text!r}: must be a journal number", "Last-Event-ID")
    return int(text)


async def _follow(deps: Services, job_id: str, after: int, kinds: tuple[str, ...]) -> AsyncIterator[ServerSentEvent]:
    topic = job_topic(job_id)
    while not deps.bell.closed:
        count = deps.bell.count(topic)
        try:
            piece = await deps.tails.read(job_id, after, kinds, count)
        except DatabaseAway:  # the stream outlives that
            await asyncio.sleep(deps.settings.poll_s)
            continue
        for seq, kind, data in piece.entries:
            after = seq
            yield ServerSentEvent(data, event=kind, id=str(seq), sep="\n")
        if piece.more:
            continue  # else nothing is left: what comes from here on rings the bell
        if piece.end is not None:
            yield ServerSentEvent(piece.end, event="end", sep="\n")
            return
        await deps.bell.wait(topic, count, deps.bell.patience_s(deps.settings.poll_s))


@router.get("/metrics", responses=documented(404, ok=Curve))
async def get_metrics(
    deps: Deps,
    job_id: str,
    max_points: Annotated[int, Query(ge=10, le=MOST_POINTS)] = MOST_POINTS,
    from_step: Annotated[int, Query(ge=0, le=_MOST_SEQ)] = 0,
    to_step: Annotated[int | None, Query(ge=0, le=_MOST_SEQ)] = None,
) -> Response:
    """The loss curve, or the part of it from `from_step` to `to_step`: the branch that counts, the points that were
    rolled back, and marks where plans changed."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        if to_step is not None and to_step < from_step:
            raise BadInput("invalid_field", f"to_step = {to_step}: below from_step, {from_step}", "to_step")
        found = {**await curve(session, job_id, max_points, from_step, to_step), "thinned": row.is_thinned}
    return Response(encoded(found), media_type="application/json")


@router.get("/plan", responses=documented(404, 410, ok=PlanInForce), response_model=None)
async def get_plan(
    deps: Deps, job_id: str, epoch: Annotated[int | None, Query(ge=0, le=_MOST_SEQ)] = None
) -> dict[str, Any]:
    """The plan that the job runs by (or that of `epoch`), the cluster as it was then, and all plans so far."""
    plans, chosen = await _plans(deps, job_id, epoch)
    generations = [
        {
            "seq": row.seq,
            "since": jobs.rfc3339(row.at_s),
            **{name: row.payload[name] for name in ("epoch", "plan_id", "step", "reason")},
        }
        for row in plans
    ]
    return {**journal.plan_resource(chosen), "generations": fitting(generations, _GENERATIONS_BYTES, from_end=True)}


@router.get("/plan.svg", responses={**_PICTURE, **documented(404, 409, 410)}, response_class=Response)
async def get_plan_picture(
    deps: Deps, job_id: str, epoch: Annotated[int | None, Query(ge=0, le=_MOST_SEQ)] = None
) -> Response:
    """The plan that the job runs by (or that of `epoch`) as a picture that needs nothing else."""
    _, chosen = await _plans(deps, job_id, epoch)
    try:
        plan, snapshot = plan_of_answer(chosen.payload["plan"]), snapshot_from_mapping(chosen.payload["snapshot"])
        drawn = plan_svg(plan, snapshot)
    except InvalidField as error:
        problem = f"plan {chosen.payload['plan_id']} cannot be drawn by this version: {error}"
        raise Conflict("plan_not_drawable", problem) from error
    name = f"plan-{plan.plan_id}.svg"
    headers = {**_PICTURE_HEADERS, "Content-Disposition": f'inline; filename="{name}"'}
    return Response(drawn, media_type="image/svg+xml", headers=headers)


async def _plans(deps: Services, job_id: str, epoch: int | None) -> tuple[list[JournalRow], JournalRow]:
    """All plans of a job, oldest first (at most the newest 1000), and the newest, or newest of `epoch`. Raises
    NotFound."""
    async with deps.database.read() as session:
        check_kept(await jobs.get(session, job_id))
        plans = list(reversed(await journal.newest(session, job_id, 1000, (journal.PLAN_KIND,))))
    chosen = [row for row in plans if epoch is None or row.payload["epoch"] == epoch]
    if not chosen:
        which = "no plan yet" if epoch is None else f"no plan of epoch {epoch}"
        raise NotFound("no_plan_yet", f"{job_id} has {which}", "epoch" if epoch is not None else None)
    return plans, chosen[-1]


@router.get("/recoveries", responses=documented(404, 410, ok=Recoveries), response_model=None)
async def get_recoveries(deps: Deps, job_id: str) -> Recoveries:
    """Every change of plan in flight, oldest first (of many the newest, as many as an answer may hold; `total` says how
    many there were), and bytes by source over the newest 1000."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        check_kept(row)
        found = await journal.newest(session, job_id, 1000, (journal.RECOVERY_KIND,))
        told = await journal.newest(session, job_id, 1000, known_by.KINDS)
    tellings = known_by.Tellings(journal.as_told(told))
    items = [journal.recovery_resource(entry, tellings) for entry in reversed(found)]
    return {
        "items": fitting(items, from_end=True),
        "total": row.num_recoveries,
        "redone_steps": row.redone_steps,
        "lost_steps": row.lost_steps,
        "bytes": _by_source(items),
    }


def _by_source(items: Sequence[Mapping[str, Any]]) -> BytesBySource:
    own, node, peer, store = (
        sum(item["bytes"].get(source, 0) for item in items) for source in ("own", "node", "peer", "store")
    )
    return {"own": own, "node": node, "peer": peer, "store": store}


@router.get("/bulk-losses", responses=documented(404, 409, ok=BulkLosses), response_model=None)
async def get_bulk_losses(deps: Deps, job_id: str) -> dict[str, Any]:
    """For each node, pool and zone of the nodes that the job has now: how many bytes of its state only the object store
    would hold if all of it went at once, the costliest first; and the newest step that stands there."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        adopted, stored_step = await journal.at_stake(session, job_id)
    try:
        return await asyncio.to_thread(losses_resource, row, adopted, stored_step)
    except InvalidField as error:
        raise Conflict("plan_not_readable", f"the plan of {job_id} cannot be read by this version: {error}") from error


@router.get("/checkpoints", responses=documented(404, 503, ok=Checkpoints), response_model=None)
async def get_checkpoints(deps: Deps, job_id: str) -> Checkpoints:
    """What stands whole in the job's object store now, newest first; size and time are those of the journal. Of a job
    that runs a script, what it has stored: Ray Train deletes older ones as it was told to."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        entries = await journal.newest(session, job_id, _PAGE, ("checkpoint_committed", "checkpoint_reported"))
        facts = await facts_of(session, job_id, entries)
        place: str | None = ((await storages.located_of(session, row)).get("checkpoint") or {}).get("uri")
    if jobs.is_script(row):
        items = [_checkpoint(entry.payload["uri"], entry.payload["step"], entry, facts) for entry in entries]
        return {"uri": row.spec["checkpoint"]["uri"], "items": fitting(items)}
    uri = (row.spec.get("checkpoint") or {}).get("uri")
    try:
        async with asyncio.timeout(deps.settings.store_check_s):
            steps = () if place is None else await asyncio.to_thread(lambda: list_manifests(open_store(place), job_id))
    except (StoreError, TimeoutError) as error:
        raise Unavailable("store_unreachable", f"checkpoint.uri = {show(uri)}: {_problem(error)}") from error
    said = {entry.payload["step"]: entry for entry in reversed(entries)}
    items = [_checkpoint(f"{uri}/{manifest_name(job_id, s)}", s, said.get(s), facts) for s in steps]
    return {"uri": uri, "items": fitting(items)}


def _problem(error: StoreError | TimeoutError) -> str:
    return error.problem if isinstance(error, StoreError) else "does not answer"


def _checkpoint(uri: str, step: int, said: JournalRow | None, facts: Facts) -> Checkpoint:
    found = None if said is None else facts.verified(said)
    return {
        "step": step,
        "uri": uri,
        "epoch": None if said is None else said.payload["epoch"],
        "num_bytes": None if said is None else said.payload["num_bytes"],
        "committed_at": None if said is None else jobs.rfc3339(said.at_s),
        "duration_s": None if said is None else said.payload.get("duration_s"),
        "held_up_s": None if said is None else facts.held_up_s.get((said.payload["epoch"], step)),
        "verified": None if found is None else {"at": jobs.rfc3339(found.at_s), "by": found.by, "seq": found.seq},
    }


@router.get("/cost", responses=documented(404, 410, ok=Cost), response_model=None)
async def get_cost(deps: Deps, job_id: str) -> dict[str, Any]:
    """What the nodes that the job has had cost so far and cost now, in dollars, by type of node (of its newest 5,000
    changes). What nodes without a price cost is unknown (null) and in no sum. Beside it, what its tokens would have
    cost on nodes of one kind on demand (`on_demand_plan`), once that was looked for."""
    async with deps.database.read() as session:
        row = await jobs.get(session, job_id)
        check_kept(row)
        history = await journal.history(session, job_id)
        kept = await comparison.of_job(session, job_id)
        rented = await rentals.of_job(session, job_id)
    spent = spending_of(row, history, rented)
    return dataclasses.asdict(spent) | {"on_demand_plan": on_demand_plan(kept, spent, row)}
