"""What would come of a job that is submitted: every check, the cluster that it would go to, the plan that it would run
by, and what that costs. Creates nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal_planner.answers import plan_answer
from shoal_planner.cluster import ClusterSnapshot, snapshot_from_mapping
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_planner.script_spec import AnyJob, any_job_to_mapping, kind_of
from shoal_service import clusters, rented_places, storages
from shoal_service.foretold import foretold
from shoal_service.models import ClusterRow
from shoal_service.services import Services
from shoal_service.shapes_jobs import DryRun, Expected
from shoal_service.submission import check_surroundings
from shoal_service.unheeded import unheeded

_HOUR_S = 3600.0


async def rehearse(deps: Services, project: str, spec: AnyJob) -> DryRun:
    """`plan` and `expected` are None where nobody can tell before the job begins; `reason` says why. Raises BadInput
    as submitting does."""
    async with deps.database.read() as session:
        accesses = await storages.for_job(session, project, spec)
    spec = await check_surroundings(spec, deps.settings, accesses)
    warnings = await unheeded(spec, deps.settings.store_check_s)
    async with deps.database.read() as session:
        candidates = [row for row in await clusters.all_clusters(session) if clusters.connected(row)]
    cluster_id, found, rents = await rented_places.choose(deps, spec, candidates)
    document = any_job_to_mapping(spec)
    answer: DryRun = {
        "dry_run": True,
        "name": spec.name,
        "kind": kind_of(document),
        "spec": document,
        "cluster_id": cluster_id,
        "plan": None,
        "expected": None,
        "warnings": warnings,
        "reason": "",
    }
    if found is None:
        return {**answer, "reason": rents or _why_not(spec, cluster_id)}
    assert isinstance(spec, JobSpec)
    snapshot = snapshot_from_mapping(_row(candidates, cluster_id).snapshot)
    plan = found.plan
    told = expected(spec, plan, snapshot)
    return {
        **answer,
        "reason": plan.reason,
        "plan": plan_answer(found, seed=0),
        "expected": told,
        "warnings": warnings + ([] if told is None else foretold(spec.limits, told, time.time())),
    }


def expected(job: JobSpec, plan: Plan, snapshot: ClusterSnapshot) -> Expected | None:
    """What all steps of the job take by this plan, if nothing happens: seconds of a step, hours, and dollars for all
    nodes that the job would have, since it has them whether its plan uses them or not. Dollars are None where no node
    has a price; nodes without one are counted."""
    if plan.prediction is None:
        return None
    allowed = job.limits.device_types
    had = {name.rsplit(":", 1)[0] for name in plan.unused} | {
        replica.node for pipeline in plan.pipelines for stage in pipeline.stages for replica in stage.replicas
    }
    nodes = [node for node in snapshot.nodes if node.id in had and (not allowed or node.device in allowed)]
    prices = [node.price_per_hour for node in nodes if node.price_per_hour]
    hours = job.train.steps * plan.prediction.step_s / _HOUR_S
    per_hour = sum(prices) if prices or not nodes else None
    usd = None if per_hour is None else per_hour * hours
    tokens = job.train.steps * job.train.tokens_per_step
    return {
        "steps": job.train.steps,
        "step_s": plan.prediction.step_s,
        "tokens_per_s": plan.prediction.tokens_per_s,
        "hours": hours,
        "num_nodes": len(nodes),
        "unpriced_nodes": len(nodes) - len(prices),
        "usd_per_hour": per_hour,
        "usd": usd,
        "usd_per_million_tokens": None if usd is None else usd / tokens * 1e6,
    }


def _row(rows: Sequence[ClusterRow], cluster_id: str | None) -> ClusterRow:
    return next(row for row in rows if row.id == cluster_id)


def _why_not(spec: AnyJob, cluster_id: str | None) -> str:
    if cluster_id is None:
        return "no cluster is connected: the job would wait for one"
    if isinstance(spec, JobSpec):
        return "the modules of the job's own are looked at on the cluster first, and planned then"
    return "there is no plan of a script: Ray Train spreads its workers"
