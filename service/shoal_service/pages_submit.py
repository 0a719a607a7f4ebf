"""The page on which a job is written, checked, planned and submitted: nothing is spent before its plan and price are
seen."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Query, Request
from sqlalchemy import select
from starlette.responses import HTMLResponse, RedirectResponse, Response

from shoal_planner.cluster import ClusterSnapshot, snapshot_from_mapping, snapshot_to_mapping
from shoal_planner.job import JobSpec
from shoal_planner.plan import plan_to_mapping
from shoal_planner.profile import profile_from_mapping
from shoal_planner.script_spec import AnyJob
from shoal_planner.search import PlanResult
from shoal_service import api_jobs, clusters, jobs, rented_places, storages, views
from shoal_service.access import Principal, Role, default_project, job_not_found
from shoal_service.bodies import read_yaml
from shoal_service.dry_run import expected
from shoal_service.errors import BadInput, Problem
from shoal_service.foretold import foretold
from shoal_service.gate import Caller, ChosenProject, refused
from shoal_service.models import ClusterRow
from shoal_service.models_people import ProjectRow
from shoal_service.pages import read_form
from shoal_service.plan_map import plan_map
from shoal_service.rendering import rendered
from shoal_service.services import Deps, Services
from shoal_service.submission import check_surroundings, read_any_job
from shoal_service.timeline import duration
from shoal_service.unheeded import unheeded
from shoal_service.words import dollars

router = APIRouter()
EXAMPLE = """\
name: first-try
model: {family: llama, layers: 8, hidden: 256, heads: 8, kv_heads: 4, ffn: 688, vocab: 256, tie_embeddings: true}
data: {uri: "stdlib:", tokenizer: bytes}
train: {global_batch: 16, seq_len: 128, steps: 60, lr: 3.0e-4, warmup_steps: 10}
# checkpoint: {uri: "file:///tmp/checkpoints", every_steps: 20}    # a job rests (pause) in its object store
"""


@router.get("/new", response_class=HTMLResponse)
async def new_page(
    request: Request,
    deps: Deps,
    caller: Caller,
    like: Annotated[str | None, Query(alias="from", max_length=80)] = None,
    step: Annotated[int | None, Query(ge=1, lt=2**53)] = None,
) -> Response:
    """With a job to start from, its own document, in its project; and with a `step` of that, one that begins with its
    weights."""
    text, project = EXAMPLE, default_project(caller)
    if like is not None:
        async with deps.database.read() as session:
            row = await jobs.get(session, like)
        if caller.role_in(row.project_id) is None:
            raise job_not_found(like)
        project = row.project_id
        spec = row.spec if step is None else beginning_at(row.spec, row.id, step)
        text = yaml.safe_dump(spec, sort_keys=False, width=110)
    return await _page(request, deps, _Form(text=text, project=project))


def beginning_at(spec: Mapping[str, Any], job_id: str, step: int) -> dict[str, Any]:
    """The document of a job that begins with the weights that another one has stored. Raises BadInput where that has no
    object store, or is a script."""
    uri = (spec.get("checkpoint") or {}).get("uri")
    if uri is None or "train" not in spec:
        raise BadInput("invalid_field", f"step = {step}: {job_id} has stored no weights to begin with", "step")
    return {**spec, "train": {**spec["train"], "init_from": f"{uri.rstrip('/')}/{job_id}", "init_step": step}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What the form carries: a job as `text`, and the project that it is for."""

    text: str
    project: str
    nonce: str | None = None


@router.post("/new/preview", response_class=HTMLResponse)
async def preview(request: Request, deps: Deps, chosen: ChosenProject) -> Response:
    """Checks a job and plans it, as submitting would; creates nothing."""
    form = await read_form(request)
    text, part = form.get("job", ""), "hx-request" in request.headers
    try:
        found, problem = await _preview(deps, chosen, text), None
    except Problem as error:
        found, problem = None, error
    if part:
        return rendered(request, "preview.html", {"preview": found, "problem": problem})
    shown = _Form(text=text, project=chosen, nonce=form.get("nonce"))
    return await _page(request, deps, shown, preview=found, problem=problem)


@router.post("/new")
async def submit_from_page(request: Request, deps: Deps, chosen: ChosenProject) -> Response:
    """The same form sent twice makes one job."""
    form = await read_form(request)
    text, nonce = form.get("job", ""), form.get("nonce", "")
    key = f"page-{nonce[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    try:
        row = await api_jobs.submit(request, deps, chosen, await read_yaml(text, "job"), key)
    except Problem as problem:
        refused(request, problem)
        return await _page(request, deps, _Form(text=text, project=chosen, nonce=nonce), problem=problem)
    return RedirectResponse(f"/jobs/{row.id}", status_code=303)


async def _page(
    request: Request,
    deps: Services,
    form: _Form,
    *,
    preview: dict[str, Any] | None = None,
    problem: Problem | None = None,
) -> Response:
    projects = await _projects(deps, request.state.principal)
    values = {
        "text": form.text,
        "projects": projects,
        "project": form.project if form.project in projects else next(iter(projects), form.project),
        "nonce": form.nonce or secrets.token_urlsafe(12),
        "preview": preview,
        "problem": problem,
    }
    return rendered(request, "new.html", values, problem.status if problem else 200)


async def _projects(deps: Services, caller: Principal) -> list[str]:
    """Those that the caller may submit jobs to, in order."""
    mine = caller.projects(Role.MEMBER)
    if mine is not None:
        return sorted(mine)
    async with deps.database.read() as session:
        return list(await session.scalars(select(ProjectRow.id).order_by(ProjectRow.id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    cluster: ClusterRow
    snapshot: ClusterSnapshot
    result: PlanResult


async def _preview(deps: Services, project: str, text: str) -> dict[str, Any]:
    """`plan` is None where none is made before the job runs, or `cluster_id` where no cluster is there. Raises
    BadInput."""
    spec = await read_any_job(await read_yaml(text, "job"), deps.settings.store_check_s, deps.settings.places)
    async with deps.database.read() as session:
        accesses = await storages.for_job(session, project, spec)
    spec = await check_surroundings(spec, deps.settings, accesses)
    warnings = await unheeded(spec, deps.settings.store_check_s)
    async with deps.database.read() as session:
        rows = {row.id: row for row in await clusters.all_clusters(session) if clusters.connected(row)}
    cluster_id, _, rents = await rented_places.choose(deps, spec, list(rows.values()))
    values: dict[str, Any] = {"name": spec.name, "cluster_id": cluster_id, "plan": None, "rents": rents}
    values["warnings"] = warnings
    if cluster_id is None or rents or not isinstance(spec, JobSpec) or not spec.model.is_known:
        return values
    row = rows[cluster_id]
    snapshot, profile = snapshot_from_mapping(row.snapshot), profile_from_mapping(row.profile)
    result = await deps.planner.plan(spec, snapshot, profile, seed=0)
    planned = _planned(spec, _Planned(cluster=row, snapshot=snapshot, result=result))
    return values | planned | {"warnings": warnings + planned["warnings"]}


def _planned(spec: AnyJob, found: _Planned) -> dict[str, Any]:
    assert isinstance(spec, JobSpec)
    plan = found.result.plan
    predicted = plan.prediction
    assert predicted is not None, "a search answers with predictions"
    published: dict[str, Any] = plan_to_mapping(plan)
    steps, tokens = spec.train.steps, spec.train.steps * spec.train.tokens_per_step
    priced = all(node.price_per_hour > 0 for node in found.snapshot.nodes)
    per_hour = sum(node.price_per_hour for node in found.snapshot.nodes)
    whole_s = steps * predicted.step_s
    told = expected(spec, plan, found.snapshot)
    return {
        "plan": plan_map(published, snapshot_to_mapping(found.snapshot)),
        "reason": plan.reason,
        "warnings": [] if told is None else foretold(spec.limits, told, time.time()),
        "step": duration(predicted.step_s),
        "steps": steps,
        "tokens_per_s": f"{predicted.tokens_per_s:,.0f}",
        "tokens": f"{tokens:,}",
        "whole": duration(whole_s),
        "devices": len(plan.devices()),
        "nodes": len(found.snapshot.nodes),
        "per_hour": dollars(per_hour) if priced else None,
        "price": dollars(per_hour * whole_s / 3600) if priced else None,
        "per_million": dollars(per_hour / 3600 / predicted.tokens_per_s * 1e6) if priced else None,
        "candidates": [(text, duration(seconds)) for text, seconds in found.result.candidates[:6]],
        "predicted": views.predicted_view(published.get("predicted")),
    }
