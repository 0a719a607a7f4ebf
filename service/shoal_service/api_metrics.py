"""/metrics, for Prometheus: what this process counts, and what the database knows of jobs and clusters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.responses import Response

from shoal_service import watching
from shoal_service.access import Kind
from shoal_service.errors import DatabaseAway
from shoal_service.gate import Caller
from shoal_service.services import Deps

router = APIRouter()


class _Found(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@router.get("/metrics", response_class=Response)
async def get_metrics(deps: Deps, caller: Caller) -> Response:
    """Tokens with the role `metrics` and administrators see all of it, others what their projects have. While the
    database is away, what this process counts is all there is."""
    everything = caller.kind is Kind.METRICS or caller.server_admin
    families: Sequence[Metric] = ()
    away = GaugeMetricFamily("shoal_database_up", "1 if the database answered this scrape.", value=1)
    try:
        async with deps.database.read() as session:
            projects = None if everything else caller.projects()
            settings = deps.settings
            families = await watching.families(
                session, projects, most_jobs=settings.metrics_jobs, no_progress_s=settings.no_progress_s
            )
    except DatabaseAway:
        if not everything:
            raise
        away = GaugeMetricFamily("shoal_database_up", "1 if the database answered this scrape.", value=0)
    own = [*deps.meters.registry.collect(), away] if everything else []
    text = await asyncio.to_thread(generate_latest, _Found([*own, *families]))
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
