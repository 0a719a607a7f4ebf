"""What jobs have cost, summed up by project and by person. What a job cost that has ended is computed once, that of
others whenever something happens to them, and a page never computes more than a few anew of those that have ended: it
says of how many jobs its sums are."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import jobs, journal, rentals
from shoal_service.job_filter import JobFilter
from shoal_service.job_history import Histories, newest_seqs
from shoal_service.models import JobRow
from shoal_service.spending import Spending, spending, spending_of

MAX_JOBS = 200  # the newest
_NEW_AT_ONCE = 40
_KEPT = 5000
_HOUR_S = 3600.0

Mark = tuple[int, rentals.Mark | None]
"""Of a job: its newest entry but for steps, and what has become of what is rented for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """`usd` is None where no node of the job has had a price; `usd_per_hour` is what its nodes cost now."""

    job_id: str
    project: str
    usd: float | None
    usd_per_hour: float
    unpriced_node_hours: float
    created_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Sums of the `num_jobs` that were looked at of a project, or of a person (`admin`, or a user's id; empty: nobody
    knows whose); `usd` without what nobody knows the price of."""

    of: str
    num_jobs: int
    usd: float
    usd_per_hour: float
    unpriced_node_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBill:
    """The bill of a job that goes on, as it was at `at_s`. As long as its `mark` is the same it grows by what nodes of
    the job cost, and by the hours of those without a price: so many are there."""

    mark: Mark
    at_s: float
    bill: Bill
    unpriced_nodes: int

    def until(self, now_s: float) -> Bill:
        hours = max(0.0, now_s - self.at_s) / _HOUR_S
        bill = self.bill
        usd = None if bill.usd is None else bill.usd + bill.usd_per_hour * hours
        unpriced_node_hours = bill.unpriced_node_hours + self.unpriced_nodes * hours
        return dataclasses.replace(bill, usd=usd, unpriced_node_hours=unpriced_node_hours)


class Ledger:
    """Use from one event loop."""

    def __init__(self, histories: Histories) -> None:
        self._histories = histories
        self._kept: OrderedDict[str, Bill] = OrderedDict()
        self._open: OrderedDict[str, OpenBill] = OrderedDict()

    async def newest(self, session: AsyncSession, projects: frozenset[str] | None) -> tuple[tuple[Bill, ...], int]:
        """Of the MAX_JOBS newest jobs of these projects (None: all), and how many of them are not in it: the next look
        has them."""
        seen = JobFilter(projects=projects).conditions()
        query = select(JobRow).where(*seen).order_by(JobRow.id.desc()).limit(MAX_JOBS)
        return await self.of(session, (await session.scalars(query)).all())

    async def of(self, session: AsyncSession, rows: Sequence[JobRow]) -> tuple[tuple[Bill, ...], int]:
        """Of these jobs, likewise."""
        left, found, missing = _NEW_AT_ONCE, [], 0
        going_on = [row.id for row in rows if not jobs.ended(row)]
        newest, rented = await newest_seqs(session, going_on), await rentals.marks(session, going_on)
        for row in rows:
            if not jobs.ended(row):
                found.append(await self._so_far(session, row, (newest.get(row.id, 0), rented.get(row.id))))
            elif row.id in self._kept:
                self._kept.move_to_end(row.id)
                found.append(self._kept[row.id])
            elif left:
                left -= 1
                found.append(await self._keep(session, row))
            else:
                missing += 1
        return tuple(found), missing

    async def _so_far(self, session: AsyncSession, row: JobRow, mark: Mark) -> Bill:
        """Of a job that goes on."""
        now_s, known = time.time(), self._open.get(row.id)
        if known is None or known.mark != mark:
            events, rented = await self._histories.of(session, row.id), await rentals.of_job(session, row.id)
            spent = spending(events, end_at_s=now_s, ended=False, tokens=jobs.num_tokens(row), rented=rented)
            bill, unpriced = bill_of(row, spent), spent.unpriced_nodes_now
            known = OpenBill(mark=mark, at_s=now_s, bill=bill, unpriced_nodes=unpriced)
        self._open[row.id] = known
        self._open.move_to_end(row.id)
        while len(self._open) > _KEPT:
            self._open.popitem(last=False)
        return known.until(now_s)

    async def _keep(self, session: AsyncSession, row: JobRow) -> Bill:
        history, rented = await journal.history(session, row.id), await rentals.of_job(session, row.id)
        bill = self._kept[row.id] = bill_of(row, spending_of(row, history, rented))
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return bill


def bill_of(row: JobRow, spent: Spending) -> Bill:
    return Bill(
        job_id=row.id,
        project=row.project_id,
        usd=spent.usd if spent.charges else 0.0,
        usd_per_hour=spent.usd_per_hour or 0.0,
        unpriced_node_hours=spent.unpriced_node_hours,
        created_by=row.created_by,
    )


def by_project(bills: Iterable[Bill]) -> tuple[Spent, ...]:
    """The one that has cost most first. Pure."""
    return _sums(bills, lambda bill: bill.project)


def by_person(bills: Iterable[Bill]) -> tuple[Spent, ...]:
    """Likewise, of whoever created the jobs."""
    return _sums(bills, lambda bill: bill.created_by or "")


def _sums(bills: Iterable[Bill], whose: Callable[[Bill], str]) -> tuple[Spent, ...]:
    sums: defaultdict[str, list[Bill]] = defaultdict(list)
    for bill in bills:
        sums[whose(bill)].append(bill)
    found = [_sum(of, members) for of, members in sums.items()]
    return tuple(sorted(found, key=lambda each: (-each.usd, each.of)))


def _sum(of: str, bills: Sequence[Bill]) -> Spent:
    return Spent(
        of=of,
        num_jobs=len(bills),
        usd=sum(bill.usd or 0.0 for bill in bills),
        usd_per_hour=sum(bill.usd_per_hour for bill in bills),
        unpriced_node_hours=sum(bill.unpriced_node_hours for bill in bills),
    )
