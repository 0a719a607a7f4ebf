"""On whose account each machine of a pool is, and at what price, from when it starts until it goes.

A machine is on the account of the job that it was asked for, then of the one whose plan stands on it. Where that job
wants none any more, it goes over to one that still lacks a node of the pool. The oldest `min` machines of a pool are
its operator's, and on nobody's. What a job pays follows in `spending`, which counts no hour twice that a plan has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.cluster import Node
from shoal_planner.provisioning import PoolSeen
from shoal_service.models_pools import RentalRow
from shoal_service.spending import Rented

Mark = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """One that goes on; `id` is None before it is written down, and `node` before the machine has joined."""

    id: int | None = None
    pool: str
    node: str | None
    job: str | None
    price_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Of a pool: how many nodes the fleet of each job has of it, in turn, and which node a job's plan stands on (None:
    that of a job that may not rent)."""

    wanted: Mapping[str, int]
    users: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnover:
    """What changes: `over` are the ids of those that end, `begun` begin, and in `joined` machines have got the names of
    nodes."""

    over: tuple[int, ...] = ()
    begun: tuple[Rental, ...] = ()
    joined: tuple[Rental, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.over or self.begun or self.joined)


def turned_over(pool: PoolSeen, rentals: Sequence[Rental], claims: Claims) -> Turnover:
    """`rentals` are those of the pool that go on, the oldest first. Pure."""
    there = _there(pool, rentals)
    after = _on_account(pool, there, claims)
    before = {each.id: each for each in rentals}
    same_bill = [each for each in after if each.id in before and _bill(each) == _bill(before[each.id])]
    kept = {each.id for each in same_bill}
    return Turnover(
        over=tuple(each.id for each in rentals if each.id is not None and each.id not in kept),
        begun=tuple(replace(each, id=None) for each in after if each.id not in kept),
        joined=tuple(each for each in same_bill if each != before[each.id]),
    )


def _bill(rental: Rental) -> tuple[str | None, float]:
    return rental.job, rental.price_per_hour


def _there(pool: PoolSeen, rentals: Sequence[Rental]) -> list[Rental]:
    """Those of machines that are there, or start, the oldest first; who joins is the one that has started longest. What
    starts is of before while the pool cannot be reached."""
    away = pool.unreached is not None
    known = {each.node: each for each in reversed(rentals) if each.node is not None}
    starting = [each for each in rentals if each.node is None]
    new = sorted(set(pool.nodes) - known.keys())
    joined = [replace(each, node=node) for each, node in zip(starting, new, strict=False)]
    still = starting[len(joined) :]
    still = still if away else still[: pool.starting]
    stay = [*(known[node] for node in pool.nodes if node in known), *joined, *still]
    order = {each.id: index for index, each in enumerate(rentals)}
    num_new = 0 if away else max(0, pool.starting - len(still))
    begun = [*new[len(joined) :], *([None] * num_new)]
    first = Rental(pool=pool.name, node=None, job=None, price_per_hour=pool.price_per_hour)
    return [*sorted(stay, key=lambda each: order[each.id]), *(replace(first, node=node) for node in begun)]


def _on_account(pool: PoolSeen, there: Sequence[Rental], claims: Claims) -> list[Rental]:
    """On whose account each is now, at the price of now."""
    used = {each.node: claims.users[each.node] for each in there if each.node is not None and each.node in claims.users}
    lacking = Counter(claims.wanted)
    lacking.subtract(job for job in used.values() if job is not None)
    owners: list[str | None] = []
    free: list[int] = []
    for index, each in enumerate(there):
        if index < pool.least:
            owners.append(None)
        elif each.node is not None and each.node in used:
            owners.append(used[each.node])
        else:
            owners.append(each.job)
            if each.job is not None and lacking[each.job] > 0:
                lacking[each.job] -= 1
            else:
                free.append(index)
    takers = [job for job in claims.wanted for _ in range(lacking[job])]
    num_of_operator = sum(each.node not in used for each in there[: pool.least])
    for index, job in zip(free, takers[num_of_operator:], strict=False):
        owners[index] = job
    return [
        replace(each, job=owner, price_per_hour=pool.price_per_hour) for each, owner in zip(there, owners, strict=True)
    ]


async def going_on(session: AsyncSession, cluster_id: str) -> Mapping[str, Sequence[Rental]]:
    """By pool, the oldest first."""
    query = select(RentalRow).where(RentalRow.cluster_id == cluster_id, RentalRow.until_at_s.is_(None))
    found: dict[str, list[Rental]] = {}
    for row in await session.scalars(query.order_by(RentalRow.since_at_s, RentalRow.id)):
        rental = Rental(id=row.id, pool=row.pool, node=row.node, job=row.job_id, price_per_hour=row.price_per_hour)
        found.setdefault(row.pool, []).append(rental)
    return found


async def write_down(
    session: AsyncSession, cluster_id: str, nodes: Mapping[str, Node], changes: Sequence[Turnover], now_s: float
) -> None:
    """`nodes` are what each of a pool is like."""
    for change in changes:
        ended = update(RentalRow).where(RentalRow.id.in_(change.over), RentalRow.until_at_s.is_(None))
        await session.execute(ended.values(until_at_s=now_s))
        for each in change.joined:
            await session.execute(update(RentalRow).where(RentalRow.id == each.id).values(node=each.node))
        session.add_all(_row(cluster_id, nodes[each.pool], each, now_s) for each in change.begun)


def _row(cluster_id: str, node: Node, rental: Rental, now_s: float) -> RentalRow:
    return RentalRow(
        cluster_id=cluster_id,
        pool=rental.pool,
        node=rental.node,
        job_id=rental.job,
        device=node.device,
        devices=node.devices,
        spot=node.spot,
        price_per_hour=rental.price_per_hour,
        since_at_s=now_s,
    )


async def end_of(session: AsyncSession, cluster_id: str, pool: str, now_s: float) -> None:
    """The pool is none any more: what machines of it there are cost no request."""
    mine = (RentalRow.cluster_id == cluster_id, RentalRow.pool == pool, RentalRow.until_at_s.is_(None))
    await session.execute(update(RentalRow).where(*mine).values(until_at_s=now_s))


async def forget_nobodys(session: AsyncSession, before_s: float) -> None:
    """Those of jobs go with their journals."""
    mine = (RentalRow.job_id.is_(None), RentalRow.until_at_s < before_s)
    await session.execute(delete(RentalRow).where(*mine))


async def forget_job(session: AsyncSession, job_id: str) -> None:
    await session.execute(delete(RentalRow).where(RentalRow.job_id == job_id))


async def of_job(session: AsyncSession, job_id: str) -> tuple[Rented, ...]:
    """All that was ever on its account, the oldest first."""
    query = select(RentalRow).where(RentalRow.job_id == job_id).order_by(RentalRow.since_at_s, RentalRow.id)
    return tuple(map(_rented, await session.scalars(query)))


def _rented(row: RentalRow) -> Rented:
    return Rented(
        id=row.id,
        node=row.node,
        device=row.device,
        devices=row.devices,
        spot=row.spot,
        price_per_hour=row.price_per_hour,
        since_at_s=row.since_at_s,
        until_at_s=row.until_at_s,
    )


async def marks(session: AsyncSession, job_ids: Collection[str]) -> dict[str, Mark]:
    """By job, of those that have had any: the same as long as nothing has changed about them."""
    counts = func.count(), func.count(RentalRow.until_at_s), func.count(RentalRow.node)
    query = select(RentalRow.job_id, *counts).where(RentalRow.job_id.in_(job_ids)).group_by(RentalRow.job_id)
    return {str(job_id): (most, over, named) for job_id, most, over, named in await session.execute(query)}
