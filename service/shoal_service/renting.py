"""Has pools asked for the nodes that jobs may rent, and for no others: looks every few seconds, lets `wish_for` choose
the fleets and `decide_pools` what to ask, and writes down what connectors are told. One replica does so for all.

Owns no rule of what is asked for. A fleet is chosen anew only when something has changed that it depends on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.cluster import ClusterSnapshot, snapshot_from_mapping
from shoal_planner.fleet_wish import FleetWish, Stock, hourly_budget, wish_for
from shoal_planner.job import JobSpec
from shoal_planner.limits import deadline_at_s
from shoal_planner.profile import profile_from_mapping
from shoal_planner.provisioning import Act, Patience, PoolMemory, Provision, available, decide_pools
from shoal_planner.script_spec import parse_any_job
from shoal_recovery.journal import AT_REST, JobState
from shoal_service import clusters, duties, jobs, journal, pools, queueing, rentals, shares
from shoal_service.bell import CLUSTERS, Bell
from shoal_service.database import Database
from shoal_service.models import ClusterRow, JobRow, ShareRow
from shoal_service.models_pools import PoolRow
from shoal_service.rentals import Claims, Rental, Turnover, turned_over
from shoal_service.scheduler import planned_nodes
from shoal_service.settings import Settings
from shoal_service.spending import spending_of
from shoal_service.turns import Turns

log = structlog.get_logger()

_LOOK_S = 2.0
_FORGET_S = 3600.0
_DUTY = "pools"
_LEASE_S = 60.0  # a fleet may take a while to choose
_TRAINS = (JobState.RUNNING.value, JobState.DRAINING.value)


def patience_of(settings: Settings) -> Patience:
    return Patience(
        wait_s=settings.pool_wait_s,
        start_s=settings.pool_start_s,
        back_off_s=settings.pool_back_off_s,
        most_back_off_s=max(3600.0, settings.pool_back_off_s),
        idle_s=settings.pool_idle_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant:
    """A job that may rent, and the nodes that it has."""

    id: str
    spec: JobSpec
    nodes: frozenset[str]
    done_steps: int
    budget_per_hour: float
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """How a cluster and its pools stand. `used` nodes are those that a plan stands on, or may before long; `others` are
    those that jobs have who may not rent. `users` are the jobs whose plans stand on nodes (None: one that may not
    rent), and `rented` is what goes on of each pool."""

    cluster: ClusterRow
    rows: Sequence[PoolRow]
    tenants: Sequence[_Tenant]
    used: frozenset[str]
    others: frozenset[str]
    users: Mapping[str, str | None]
    rented: Mapping[str, Sequence[Rental]]


@dataclass(slots=True)
class _Chosen:
    """The fleets of a cluster's jobs, by pool: `first` is the job that it is for, `fleets` are those of each job, in
    turn, and `awaited` is what jobs that do not train wait for."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    fleets: dict[str, dict[str, int]] = field(default_factory=dict)
    awaited: dict[str, int] = field(default_factory=dict)
    budget_per_hour: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)


class Renting:
    """`start` in a running event loop."""

    def __init__(self, database: Database, bell: Bell, patience: Patience, time_limit_s: float) -> None:
        self._database = database
        self._bell = bell
        self._patience = patience
        self._limit_s = time_limit_s
        self._holder = duties.new_holder()
        self._wishes: dict[str, tuple[object, FleetWish]] = {}
        self._refused: dict[str, str] = {}
        self._forgot_at_s = -_FORGET_S
        self._turns = Turns("pools", self.look, _LOOK_S)

    def start(self) -> None:
        self._turns.start()

    async def close(self) -> None:
        await self._turns.close()

    async def look(self) -> None:
        async with self._database.read() as session:
            if not any(pools.is_fresh(row) for row in await pools.every(session)):
                return
        async with self._database.write() as session:
            if not await duties.claim(session, _DUTY, self._holder, _LEASE_S):
                return
            if time.monotonic() - self._forgot_at_s > _FORGET_S:
                await pools.forget_old(session)
                self._forgot_at_s = time.monotonic()
            known = [row.id for row in await clusters.all_clusters(session) if clusters.connected(row)]
        for cluster_id in known:
            await self._look_at(cluster_id)

    async def _look_at(self, cluster_id: str) -> None:
        async with self._database.read() as session:
            look = await _look(session, await clusters.get(session, cluster_id))
        if not look.rows:
            return
        chosen = await asyncio.to_thread(self._choose, look)
        found = _decided(look, chosen, self._patience)
        before = {row.name: pools.memory(row) for row in look.rows}
        turnovers = [each for row in look.rows if (each := _turned_over(look, row, chosen))]
        same = found.memories == before and chosen.refused.items() <= self._refused.items()
        if same and not found.acts and not turnovers:
            return
        async with self._database.write() as session:
            news = await self._write(session, cluster_id, chosen, found)
            nodes = {row.name: pools.pool(row).node for row in look.rows}
            await rentals.write_down(session, cluster_id, nodes, turnovers, time.time())
        if news:
            self._bell.ring(CLUSTERS)

    def _choose(self, look: _Look) -> _Chosen:
        """In a thread: plans are searched for. Who is first in turn chooses first."""
        chosen, now_s = _Chosen(), time.time()
        left = {row.name: available(pools.seen(row), pools.memory(row), now_s) for row in look.rows}
        for row in look.rows:  # what other jobs stand on is not to be had
            left[row.name] -= len(look.others.intersection(row.about["nodes"]))
        taken = set(look.others)
        for tenant in look.tenants:
            wish = self._wish(look, tenant, left, frozenset(taken))
            chosen.budget_per_hour += tenant.budget_per_hour
            if not wish.counts and wish.reason:
                chosen.refused[tenant.id] = wish.reason
            chosen.fleets[tenant.id] = dict(wish.counts)
            for name, count in wish.counts.items():
                left[name] -= count
                chosen.counts[name] = chosen.counts.get(name, 0) + count
                chosen.first.setdefault(name, tenant.id)
                if not tenant.trains:
                    chosen.awaited[name] = chosen.awaited.get(name, 0) + count
                if why := _unheard(look, name, chosen.counts[name]):
                    chosen.refused[tenant.id] = why
            taken |= tenant.nodes
        for row in look.rows:  # nodes of pools under jobs that may not rent count as wanted: they stay
            chosen.counts[row.name] = chosen.counts.get(row.name, 0) + len(look.others.intersection(row.about["nodes"]))
        return chosen

    def _wish(self, look: _Look, tenant: _Tenant, left: Mapping[str, int], taken: frozenset[str]) -> FleetWish:
        if not tenant.spec.model.is_known:
            return FleetWish(counts={}, reason="")  # that takes a node first
        stocks = tuple(
            Stock(
                pool=pools.pool(row),
                available=max(0, left[row.name]),
                price_per_hour=pools.price(row),
                held=len(set(row.about["nodes"]) - taken - set((pools.memory(row) or PoolMemory()).leaving)),
            )
            for row in look.rows
        )
        here = _here(look, taken)
        depends_on = (tenant.spec, stocks, here, round(tenant.budget_per_hour, 2))
        known = self._wishes.get(tenant.id)
        if known is not None and known[0] == depends_on:
            return known[1]
        found = wish_for(
            tenant.spec,
            stocks,
            here,
            budget_per_hour=tenant.budget_per_hour,
            done_steps=tenant.done_steps,
            profile=profile_from_mapping(look.cluster.profile),
            time_limit_s=self._limit_s,
        )
        self._wishes[tenant.id] = depends_on, found
        log.info("fleet chosen", job=tenant.id, counts=dict(found.counts), reason=found.reason)
        return found

    async def _write(self, session: AsyncSession, cluster_id: str, chosen: _Chosen, found: Provision) -> bool:
        rows = {row.name: row for row in await pools.of_cluster(session, cluster_id)}
        news = False
        for name, memory in found.memories.items():
            if name in rows:
                news |= pools.remember(rows[name], memory)
        for act in found.acts:
            if act.pool in rows:
                log.info(act.kind, cluster=cluster_id, pool=act.pool, count=act.count, reason=act.reason)
                pools.tell(session, rows[act.pool], act, chosen.first.get(act.pool))
        for job, reason in chosen.refused.items():
            if self._refused.get(job) != reason:
                none = Act(kind="nothing_rented", pool="", count=0, reason=f"nothing is rented: {reason}")
                pools.note(session, cluster_id, job, none)
        self._refused = {**self._refused, **chosen.refused}
        return news


def _unheard(look: _Look, pool: str, count: int) -> str | None:
    """Why so many nodes of this pool cannot even be asked for now."""
    (row,) = (row for row in look.rows if row.name == pool)
    why, memory = pools.unreached(row), pools.memory(row) or PoolMemory()
    return f"pool {pool} cannot be reached now: {why}" if why and count > memory.target else None


def _turned_over(look: _Look, row: PoolRow, chosen: _Chosen) -> Turnover:
    wanted = {job: fleet.get(row.name, 0) for job, fleet in chosen.fleets.items()}
    claims = Claims(wanted=wanted, users=look.users)
    return turned_over(pools.seen(row), look.rented.get(row.name, ()), claims)


def _decided(look: _Look, chosen: _Chosen, patience: Patience) -> Provision:
    elsewhere = sum(pools.price(row) * len(look.others.intersection(row.about["nodes"])) for row in look.rows)
    return decide_pools(
        [pools.seen(row) for row in look.rows],
        {row.name: kept for row in look.rows if (kept := pools.memory(row)) is not None},
        chosen.counts,
        used=look.used,
        budget_per_hour=chosen.budget_per_hour + elsewhere,
        patience=patience,
        now_s=time.time(),
        awaited=chosen.awaited,
    )


def _here(look: _Look, taken: Collection[str]) -> ClusterSnapshot:
    """The nodes of no pool that nobody else has."""
    snapshot = snapshot_from_mapping(look.cluster.snapshot)
    of_pools = {node for row in look.rows for node in row.about["nodes"]}
    nodes = tuple(
        dataclasses.replace(node, reclaim_at_s=None)
        for node in snapshot.nodes
        if node.id not in of_pools and node.id not in taken and node.reclaim_at_s is None
    )
    return dataclasses.replace(snapshot, nodes=nodes)


async def _look(session: AsyncSession, cluster: ClusterRow) -> _Look:
    rows = [row for row in await pools.of_cluster(session, cluster.id) if pools.is_fresh(row)]
    everything = frozenset(node["id"] for node in cluster.snapshot["nodes"])
    used: set[str] = set()
    others: set[str] = set()
    users: dict[str, str | None] = {}
    tenants = []
    found = await clusters.scheduled(session, cluster.id, queueing.that_may_rent(cluster.id)) if rows else []
    told = await shares.of_jobs(session, [row.id for row in found])
    for row in sorted(found, key=lambda row: (-told[row.id].priority, row.created_at_s, row.id)):
        mine = await _nodes(session, row, told[row.id], everything)
        used |= mine
        spec = parse_any_job(row.spec)
        may_rent = isinstance(spec, JobSpec) and spec.limits.rent
        if row.state in _TRAINS:
            users |= dict.fromkeys(mine, row.id if may_rent else None)
        if isinstance(spec, JobSpec) and may_rent and _wants(row):
            tenants.append(await _tenant(session, row, spec, mine))
        else:
            others |= mine
    return _Look(
        cluster=cluster,
        rows=rows,
        tenants=tenants,
        used=frozenset(used),
        others=frozenset(others),
        users=users,
        rented=await rentals.going_on(session, cluster.id) if rows else {},
    )


def _wants(row: JobRow) -> bool:
    resting = (*AT_REST, JobState.CANCELLING)
    return row.wish == jobs.WISH_RUN and row.state not in resting


async def _nodes(session: AsyncSession, row: JobRow, share: ShareRow, everything: frozenset[str]) -> frozenset[str]:
    """What its plan stands on; of a job that is about to have another plan, all that it may use."""
    if row.state in _TRAINS:
        return await planned_nodes(session, row) & everything
    if row.state == JobState.QUEUED and share.nodes is None:
        return frozenset()
    return everything if share.nodes is None else everything.intersection(share.nodes)


async def _tenant(session: AsyncSession, row: JobRow, spec: JobSpec, nodes: frozenset[str]) -> _Tenant:
    limits = spec.limits
    left_h = None if limits.deadline is None else (deadline_at_s(limits.deadline) - time.time()) / 3600.0
    spent_usd = 0.0
    if limits.budget_usd is not None:
        spent_usd = (
            spending_of(row, await journal.history(session, row.id), await rentals.of_job(session, row.id)).usd or 0.0
        )
    return _Tenant(
        id=row.id,
        spec=spec,
        nodes=nodes,
        done_steps=row.step,
        budget_per_hour=hourly_budget(spec, spent_usd, left_h),
        trains=row.state in _TRAINS,
    )
