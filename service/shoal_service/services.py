"""What every route works with, made once per application and handed to routes by FastAPI."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from shoal_service.auth import Auth
from shoal_service.awake import Awake
from shoal_service.bell import Bell
from shoal_service.database import Database
from shoal_service.enforcement import Enforcement
from shoal_service.fleet_records import FleetRecords
from shoal_service.followers import Followers
from shoal_service.job_history import Histories
from shoal_service.ledger import Ledger
from shoal_service.lost_clusters import LostClusters
from shoal_service.meters import Meters
from shoal_service.moving import Moving
from shoal_service.open_streams import OpenStreams
from shoal_service.planning import Planner
from shoal_service.renting import Renting
from shoal_service.scheduler import Scheduler
from shoal_service.settings import Settings
from shoal_service.store_looks import StoreLooks
from shoal_service.tails import Tails
from shoal_service.takeover import Takeover


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    settings: Settings
    database: Database
    auth: Auth
    bell: Bell
    planner: Planner
    awake: Awake
    takeover: Takeover
    lost_clusters: LostClusters
    moving: Moving
    followers: Followers
    tails: Tails
    histories: Histories
    ledger: Ledger
    fleet_records: FleetRecords
    stores: StoreLooks
    renting: Renting
    scheduler: Scheduler
    enforcement: Enforcement
    meters: Meters
    streams: OpenStreams
    webhook_key: str = field(repr=False)


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Deps = Annotated[Services, Depends(_services)]
