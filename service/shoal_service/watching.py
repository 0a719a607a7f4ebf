"""What a scrape of /metrics finds in the database. It reads a few rows by their indexes and never a journal: jobs by
state, clusters, duties, and the figures of the jobs that run, or have ended just now, newest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal import AT_REST, TERMINAL, JobState
from shoal_service import clusters, jobs, pools
from shoal_service.job_metrics import WatchedJob, job_families
from shoal_service.job_totals import figures_of
from shoal_service.model_names import model_name
from shoal_service.models import ClusterRow, DutyRow, JobRow, TrackerRow
from shoal_service.models_people import ProjectRow
from shoal_service.models_watching import JobTotalsRow
from shoal_service.models_webhooks import DeliveryRow
from shoal_service.outbox import PENDING
from shoal_service.progress import stuck

_STILL_SHOWN_S = 600.0  # after a job has ended: so that its last figures are scraped
_AT_REST = tuple(state.value for state in AT_REST)
_BY = (JobRow.project_id, JobRow.state)
_RUN = tuple(state.value for state in JobState if state not in (*AT_REST, JobState.QUEUED))


async def families(
    session: AsyncSession, projects: frozenset[str] | None, *, most_jobs: int, no_progress_s: float
) -> list[Metric]:
    """Of these projects. None: of all of them, and of the server itself."""
    now_s = time.time()
    mine = [] if projects is None else [JobRow.project_id.in_(projects)]
    found = [
        *await _counts(session, mine, projects, now_s),
        *await _jobs(session, mine, most_jobs, now_s, no_progress_s),
    ]
    if projects is None:
        found += [*await _clusters(session), *await _pools(session), *await _duties(session, now_s)]
    return found


async def _counts(
    session: AsyncSession, mine: Sequence[ColumnElement[bool]], projects: frozenset[str] | None, now_s: float
) -> list[Metric]:
    states = GaugeMetricFamily("shoal_jobs", "Jobs by state.", labels=("project", "state"))
    query = select(JobRow.project_id, JobRow.state, func.count()).where(*mine)
    found = {(project, state): count for project, state, count in await session.execute(query.group_by(*_BY))}
    for project in await session.scalars(select(ProjectRow.id).order_by(ProjectRow.id)):
        if projects is None or project in projects:
            for state in JobState:  # zeros too: an alert on the first failure needs something that it rises from
                states.add_metric([project, state.value], found.get((project, state.value), 0))
    ended = CounterMetricFamily("shoal_jobs_ended", "Jobs that have ended.", labels=("project", "outcome"))
    for each in states.samples:
        if JobState(each.labels["state"]) in TERMINAL:
            ended.add_metric([each.labels["project"], each.labels["state"]], each.value)
    waits = select(func.min(JobRow.since_at_s)).where(JobRow.state == JobState.QUEUED.value, *mine)
    oldest_s = await session.scalar(waits)
    queue = GaugeMetricFamily(
        "shoal_queue_oldest_job_seconds",
        "How long the job has been in the queue that has been there longest; 0: there is none.",
        value=0.0 if oldest_s is None else max(0.0, now_s - oldest_s),
    )
    return [states, ended, queue]


async def _jobs(
    session: AsyncSession, mine: Sequence[ColumnElement[bool]], most: int, now_s: float, no_progress_s: float
) -> list[Metric]:
    just_now = JobRow.state.in_(_AT_REST) & (JobRow.since_at_s > now_s - _STILL_SHOWN_S)
    query = (
        select(JobRow, JobTotalsRow.figures, ClusterRow.updated_at_s)
        .outerjoin(JobTotalsRow, JobTotalsRow.job_id == JobRow.id)
        .outerjoin(ClusterRow, ClusterRow.id == JobRow.cluster_id)
        .where(or_(JobRow.state.in_(_RUN), just_now), *mine)
        .order_by(JobRow.id.desc())
        .limit(most + 1)
    )
    rows = (await session.execute(query)).all()
    left_out = GaugeMetricFamily(
        "shoal_jobs_left_out",
        "1 if there are older jobs, too, that run and have no figures of their own here (SHOAL_METRICS_JOBS).",
        value=int(len(rows) > most),
    )
    shown = [_watched(row, figures, heard_s or 0.0, now_s, no_progress_s) for row, figures, heard_s in rows[:most]]
    return [left_out, *job_families(shown, now_s)]


def _watched(
    row: JobRow, figures: dict[str, Any] | None, heard_s: float, now_s: float, no_progress_s: float
) -> WatchedJob:
    found = None if figures is None else figures_of(figures)
    state = JobState(row.state)
    return WatchedJob(
        id=row.id,
        project=row.project_id,
        name=row.name,
        model=model_name(row.spec),
        state=row.state,
        cluster=row.cluster_id or "",
        at_s=row.since_at_s if jobs.ended(row) else now_s,
        step=row.step,
        steps=jobs.num_steps(row),
        loss=row.loss,
        step_s=row.step_s,
        tokens_per_s=row.tokens_per_s,
        redone_steps=row.redone_steps,
        lost_steps=row.lost_steps,
        skipped_steps=row.skipped_steps,
        store_fails=row.store_problem is not None,
        budget_usd=(row.spec.get("limits") or {}).get("budget_usd"),
        is_stuck=found is not None and stuck(found, state, row.step_s, heard_s, no_progress_s) is not None,
        figures=found,
    )


async def _clusters(session: AsyncSession) -> list[Metric]:
    here = GaugeMetricFamily("shoal_cluster_connected", "1 while its connector holds its lease.", labels=("cluster",))
    nodes = GaugeMetricFamily(
        "shoal_cluster_nodes", "Nodes of a cluster as last told.", labels=("cluster", "device", "market")
    )
    prices = GaugeMetricFamily(
        "shoal_instance_price_dollars_per_hour",
        "The lowest stated price of such a node of a cluster, as last told.",
        labels=("cluster", "instance_type", "zone", "market"),
    )
    for row in await clusters.all_clusters(session):
        here.add_metric([row.id], int(clusters.connected(row)))
        counts: dict[tuple[str, str], int] = {}
        lowest: dict[tuple[str, str, str], float] = {}
        for node in row.snapshot["nodes"]:
            market = "spot" if node.get("spot") else "on_demand"
            counts[node["device"], market] = counts.get((node["device"], market), 0) + 1
            kind = f"{node['devices']}x{node['device']}", str(node.get("zone", "default")), market
            if price := float(node.get("price_per_hour", 0.0)):
                lowest[kind] = min(price, lowest.get(kind, price))
        for (device, market), count in sorted(counts.items()):
            nodes.add_metric([row.id, device, market], count)
        for kind, price in sorted(lowest.items()):
            prices.add_metric([row.id, *kind], price)
    return [here, nodes, prices]


async def _pools(session: AsyncSession) -> list[Metric]:
    labels = ("cluster", "pool")
    nodes = GaugeMetricFamily(
        "shoal_pool_nodes", "Nodes of a pool: there, starting, asked for, going away.", labels=(*labels, "state")
    )
    prices = GaugeMetricFamily(
        "shoal_pool_price_dollars_per_hour", "What one more node of a pool costs in an hour.", labels=labels
    )
    counters = {
        name: CounterMetricFamily(f"shoal_pool_nodes_{what}", text, labels=labels)
        for name, what, text in (
            ("num_asked", "asked", "Nodes that were asked for."),
            ("num_came", "came", "Nodes that came."),
            ("num_short", "short", "Nodes that were asked for and did not come."),
            ("num_released", "released", "Nodes that were given back."),
        )
    }
    for row in await pools.every(session):
        if pools.is_fresh(row):
            key, about = [row.cluster_id, row.name], pools.resource(row)
            states = {"there": len(about["nodes"]), "going_away": len(about["leaving"])}
            for state, count in {**states, "starting": about["starting"], "asked_for": about["target"]}.items():
                nodes.add_metric([*key, state], count)
            prices.add_metric(key, about["price_per_hour"])
            for name, counter in counters.items():
                counter.add_metric(key, getattr(row, name))
    return [nodes, prices, *counters.values()]


async def _duties(session: AsyncSession, now_s: float) -> list[Metric]:
    leases = GaugeMetricFamily(
        "shoal_duty_lease_seconds", "How long a replica still has something that it does for all.", labels=("duty",)
    )
    for row in await session.scalars(select(DutyRow).where(DutyRow.lease_until_s > now_s).order_by(DutyRow.name)):
        leases.add_metric([row.name], row.lease_until_s - now_s)
    failing = select(func.count()).select_from(TrackerRow)
    failing = failing.where(TrackerRow.complete.is_(False), TrackerRow.problem.is_not(None))
    trackers = GaugeMetricFamily(
        "shoal_trackers_failing", "Trackers of jobs that take nothing at present.", value=await session.scalar(failing)
    )
    waiting = select(func.count()).select_from(DeliveryRow).where(DeliveryRow.state == PENDING)
    deliveries = GaugeMetricFamily(
        "shoal_webhook_deliveries_pending",
        "What webhooks are to be told, and were not yet.",
        value=await session.scalar(waiting),
    )
    return [leases, trackers, deliveries]
