"""On which cluster a new job goes: for one that may rent, nodes that could be had count like those that are there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.fleet_wish import FleetWish, Stock, wish_for
from shoal_planner.job import JobSpec
from shoal_planner.profile import profile_from_mapping
from shoal_planner.script_spec import AnyJob
from shoal_planner.search import PlanResult
from shoal_service import pools
from shoal_service.errors import BadInput, TooCheap
from shoal_service.models import ClusterRow
from shoal_service.models_pools import PoolRow
from shoal_service.planning import no_plan_fits
from shoal_service.services import Services


async def choose(
    deps: Services, job: AnyJob, candidates: Sequence[ClusterRow]
) -> tuple[str | None, PlanResult | None, str]:
    """As Planner.choose, with why there is no plan yet: what would be rented first where nothing that is there
    suffices, or that all plans cost more than its limit allows, which may change. Raises BadInput, also where a job may
    rent and no cluster can get nodes."""
    if isinstance(job, JobSpec) and job.limits.rent and candidates:
        return await _choose_with_pools(deps, job, candidates)
    try:
        return (*await deps.planner.choose(job, candidates), "")
    except TooCheap as error:
        return _too_dear(error)


async def _choose_with_pools(
    deps: Services, job: JobSpec, candidates: Sequence[ClusterRow]
) -> tuple[str | None, PlanResult | None, str]:
    async with deps.database.read() as session:
        of_cluster = {row.id: [each for each in await pools.of_cluster(session, row.id)] for row in candidates}
    renters = [row for row in candidates if any(map(pools.is_fresh, of_cluster[row.id]))]
    if not renters:
        problem = "no cluster that is connected can get nodes: its connector has no pools (SHOAL_PROVISIONER)"
        raise BadInput("nobody_rents", f"limits.rent = true: {problem}", "limits.rent")
    if not job.model.is_known:
        return (*await deps.planner.choose(job, candidates), "")
    dear: TooCheap | None = None
    with_nodes = [row for row in candidates if row.snapshot["nodes"]]
    try:
        if with_nodes:
            return (*await deps.planner.choose(job, with_nodes), "")
    except BadInput as error:
        if error.code not in ("no_plan_fits", "price_above_limit"):
            raise
        dear = error if isinstance(error, TooCheap) else None
    reasons = []
    for row in renters:
        wish = await asyncio.to_thread(_wish, job, row, of_cluster[row.id], deps.settings.plan_time_limit_s)
        if wish.counts:
            fleet = ", ".join(f"{count} x {name}" for name, count in wish.counts.items())
            return row.id, None, f"to be rented first on cluster {row.id}: {fleet}. {wish.reason}"
        reasons.append(f"on cluster {row.id}, with nodes that could be rented: {wish.reason}")
    if dear is not None:
        return _too_dear(dear)
    raise no_plan_fits("; ".join(reasons))


def _too_dear(error: TooCheap) -> tuple[str | None, PlanResult | None, str]:
    return error.cluster_id, None, f"{error.detail}: it would wait for lower prices or a higher limit"


def _wish(job: JobSpec, cluster: ClusterRow, rows: Sequence[PoolRow], time_limit_s: float) -> FleetWish:
    """With all that a pool may have: whether it gives that is seen when it is asked."""
    stocks = [
        Stock(pool=known, available=known.most if row.not_offered is None else 0, price_per_hour=pools.price(row))
        for row, known in ((row, pools.pool(row)) for row in rows)
    ]
    assert job.limits.max_price_per_hour is not None  # or it might not rent
    return wish_for(
        job,
        stocks,
        snapshot_from_mapping({**cluster.snapshot, "nodes": []}),
        budget_per_hour=job.limits.max_price_per_hour,
        profile=profile_from_mapping(cluster.profile),
        time_limit_s=time_limit_s,
    )
