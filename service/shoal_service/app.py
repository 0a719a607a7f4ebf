"""Puts the control plane together: `create_app(settings)`. Owns the order of start and stop; nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from shoal_service import api_clusters, api_history, api_jobs, api_limits, api_plans, pages, problems
from shoal_service.auth import Auth, Gate, admin_token
from shoal_service.awake import Awake
from shoal_service.bell import Bell
from shoal_service.database import Database
from shoal_service.enforcement import Enforcement
from shoal_service.errors import Problem
from shoal_service.followers import Followers
from shoal_service.planning import Planner
from shoal_service.scheduler import Scheduler
from shoal_service.services import Services
from shoal_service.settings import Settings
from shoal_service.takeover import Takeover

_STATIC = Path(__file__).parent / "static"


def create_app(settings: Settings) -> FastAPI:
    """The application. Makes the data folder and the administrator's token; the database opens when it starts."""
    database = Database(settings.resolved_database_url)
    token = admin_token(settings.data_path)
    bell, planner, awake = Bell(), Planner(settings.plan_time_limit_s), Awake()
    services = Services(
        settings=settings,
        database=database,
        auth=Auth(database, token, session_s=settings.session_s, login_code_s=settings.login_code_s),
        bell=bell,
        planner=planner,
        awake=awake,
        takeover=Takeover(database, planner, bell, settings.cluster_lost_s, awake),
        followers=Followers(database, bell, settings),
        enforcement=Enforcement(database, bell),
        scheduler=Scheduler(database, bell, settings.plan_time_limit_s),
    )
    # No documentation page of FastAPI's: it would load scripts from elsewhere.
    app = FastAPI(title="Shoal", version="1", lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.services = services
    for module in (api_jobs, api_limits, api_history, api_clusters, api_plans):
        app.include_router(module.router)
    app.include_router(pages.router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    problems.install(app, _refuse)
    app.add_middleware(Gate, refuse=_refuse, max_body_bytes=settings.max_body_bytes)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    await services.database.migrate()
    beat = asyncio.create_task(services.awake.beat(), name="awake")
    services.followers.start()
    services.enforcement.start()
    yield
    beat.cancel()
    services.bell.close()
    await services.enforcement.close()
    await services.followers.close()
    await services.takeover.close()
    await services.database.close()


def _refuse(request: Request, problem: Problem) -> Response:
    if request.url.path.startswith("/v1") or "text/html" not in request.headers.get("accept", ""):
        return problems.response(problem)
    return pages.refused(request, problem)
