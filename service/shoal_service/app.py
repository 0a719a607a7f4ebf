"""Puts the control plane together: `create_app(settings)`. Owns the order of start and stop; nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from shoal_service import (
    api_attempts,
    api_clusters,
    api_debug,
    api_history,
    api_jobs,
    api_limits,
    api_logs,
    api_metrics,
    api_nodes,
    api_people,
    api_plans,
    api_pools,
    api_schemas,
    api_storages,
    api_verbs,
    api_webhooks,
    openapi,
    pages,
    pages_fleet,
    pages_job,
    pages_people,
    pages_submit,
    problems,
    sign_in,
    streams,
)
from shoal_service.auth import Auth, admin_token
from shoal_service.awake import Awake
from shoal_service.bell import Bell
from shoal_service.bodies import distinct_keys, no_stray_body
from shoal_service.comparison import Comparisons
from shoal_service.couriers import Couriers
from shoal_service.database import Database
from shoal_service.enforcement import Enforcement
from shoal_service.errors import Problem
from shoal_service.exposure import check_exposure
from shoal_service.fleet_records import FleetRecords
from shoal_service.followers import Followers
from shoal_service.gate import Gate, authorize, refused
from shoal_service.given_tokens import given_principals
from shoal_service.heads import Heads
from shoal_service.identity import Identity
from shoal_service.job_history import Histories
from shoal_service.ledger import Ledger
from shoal_service.limits import Limits
from shoal_service.log_retention import keep_forgetting
from shoal_service.lookout import Lookout
from shoal_service.lost_clusters import LostClusters
from shoal_service.metered import Metered
from shoal_service.meters import Meters
from shoal_service.migrating import bring_up
from shoal_service.moving import Moving
from shoal_service.open_streams import OpenStreams
from shoal_service.parameters import known_parameters
from shoal_service.planning import Planner
from shoal_service.pool_prices import PoolPrices
from shoal_service.providers import open_provider
from shoal_service.relay import Relay
from shoal_service.renting import Renting, patience_of
from shoal_service.request_ids import RequestIds
from shoal_service.retention import Retention
from shoal_service.scheduler import Scheduler
from shoal_service.services import Services
from shoal_service.settings import Settings
from shoal_service.store_looks import StoreLooks
from shoal_service.tails import Tails
from shoal_service.takeover import Takeover
from shoal_service.traces import Traces, open_export
from shoal_service.unkept import Unkept

_STATIC = Path(__file__).parent / "static"


def create_app(settings: Settings) -> FastAPI:
    """The application. Makes the data folder and the administrator's token; the database opens when it starts."""
    token = admin_token(settings.data_path)
    check_exposure(settings, token)
    bell, awake, meters = Bell(), Awake(), Meters()
    planner = Planner(settings.plan_time_limit_s, meters.searches.observe)

    def away() -> None:
        awake.interrupted()
        meters.database_away.inc()

    database = Database(settings.resolved_database_url, timeout_s=settings.database_timeout_s, on_away=away)
    meters.watch(database.engine.pool)
    histories = Histories()
    services = Services(
        settings=settings,
        database=database,
        auth=Auth(
            database,
            Identity(
                database,
                token,
                open_provider(settings),
                settings.admin_addresses,
                given_principals(settings.tokens_path),
            ),
            session_s=settings.session_s,
            login_code_s=settings.login_code_s,
        ),
        bell=bell,
        planner=planner,
        awake=awake,
        moving=Moving(database, bell, settings.plan_time_limit_s),
        takeover=Takeover(database, planner, bell, settings.cluster_lost_s, settings.standing_cluster_lost_s, awake),
        lost_clusters=LostClusters(database, bell, settings.cluster_lost_s, awake),
        followers=Followers(database, bell, settings),
        tails=Tails(database),
        histories=histories,
        ledger=Ledger(histories),
        fleet_records=FleetRecords(histories),
        stores=StoreLooks(settings.store_check_s),
        enforcement=Enforcement(database, bell),
        renting=Renting(database, bell, patience_of(settings), settings.plan_time_limit_s),
        scheduler=Scheduler(database, bell, settings.plan_time_limit_s, meters.decisions.observe),
        meters=meters,
        streams=OpenStreams(each=settings.max_streams_each, in_all=settings.max_streams),
        webhook_key=token,
    )
    # No documentation page of FastAPI's: it would load scripts from elsewhere.
    app = FastAPI(
        title="Shoal",
        version="1",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # such a redirect leads to whatever host the request names
        dependencies=[Depends(authorize), Depends(known_parameters), Depends(distinct_keys), Depends(no_stray_body)],
    )
    app.state.services = services
    app.state.trace_export = open_export(settings)
    jobs_apis = (api_jobs, api_verbs, api_limits, api_history, api_attempts, api_logs, api_debug)
    others = (api_clusters, api_nodes, api_pools, api_plans, api_people, api_storages, api_webhooks, api_schemas)
    for module in (*jobs_apis, *others):
        app.include_router(module.router)
    for module in (api_metrics, pages, pages_job, pages_fleet, pages_people, pages_submit, streams, sign_in):
        app.include_router(module.router, include_in_schema=False)
    # Pages themselves are not compressed: what they echo stands beside the tokens of their forms.
    app.mount("/static", GZipMiddleware(StaticFiles(directory=_STATIC)), name="static")
    problems.install(app, _refuse)
    # Within the gate: who may not ask sends no body.
    app.add_middleware(
        Limits, refuse=_refuse, max_body_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
    )
    openapi.describe(app)
    app.add_middleware(Gate, refuse=_refuse, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(Heads)
    app.add_middleware(Unkept)
    app.add_middleware(Metered, meters=meters)
    app.add_middleware(RequestIds)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    await bring_up(services.database, given_up=lambda: services.bell.closed)
    relay = Relay(services.database.engine, services.bell) if services.database.is_postgres else None
    if relay is not None:
        relay.start()
    services.bell.hears_others = relay is None  # SQLite has no other replica: nothing changes that is not rung for here
    beat = asyncio.create_task(services.awake.beat(), name="awake")
    forgetting = asyncio.create_task(
        keep_forgetting(services.database, services.settings.log_kept_s), name="log-retention"
    )
    services.followers.start()
    settings = services.settings
    retention = Retention(services.database, events_kept_s=settings.events_kept_s, points_kept_s=settings.points_kept_s)
    retention.start()
    services.enforcement.start()
    services.lost_clusters.start()
    services.renting.start()
    prices = PoolPrices(services.database)
    if services.settings.cloud_prices == "aws":
        prices.start()
    couriers = Couriers(
        services.database,
        services.meters,
        services.webhook_key,
        allow_private=settings.webhook_private,
        mail=settings.mail,
        public_url=settings.public_url,
    )
    couriers.start()
    lookout = Lookout(services.database, services.awake, settings.no_progress_s)
    lookout.start()
    comparisons = Comparisons(services.database, services.planner, services.bell)
    comparisons.start()
    traces = Traces(services.database, app.state.trace_export)
    traces.start()
    yield
    beat.cancel()
    forgetting.cancel()
    services.bell.close()
    await services.stores.close()
    await traces.close()
    await comparisons.close()
    await lookout.close()
    await couriers.close()
    await prices.close()
    await services.renting.close()
    await services.lost_clusters.close()
    await services.enforcement.close()
    await services.followers.close()
    await services.takeover.close()
    await services.moving.close()
    await retention.close()
    if relay is not None:
        await relay.close()
    await services.database.close()


def _refuse(request: Request, problem: Problem) -> Response:
    refused(request, problem)
    if request.url.path.startswith("/v1") or "text/html" not in request.headers.get("accept", ""):
        return problems.response(problem)
    if problem.status == 401:
        return sign_in.form(request, request.app.state.services, sign_in.way_back_to(request), problem)
    return pages.refused(request, problem)
