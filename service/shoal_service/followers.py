"""Jobs' metrics on their way to trackers: one task for each tracker of a job that has not ended, beside all requests.

The database says how far each tracker is, and which replica of this server follows it (a lease); a writer's process
does the writing. A batch is written first and noted then, and whoever is killed in between leaves a successor that
writes it again, which sinks make one. A tracker that fails is tried again, ever less often, and says so on the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

import structlog
from sqlalchemy.exc import SQLAlchemyError

from shoal_planner.track_spec import Tool
from shoal_recovery.journal import JobState
from shoal_service import duties, trackers
from shoal_service.bell import JOBS, Bell, job_topic
from shoal_service.database import Database
from shoal_service.errors import DatabaseAway
from shoal_service.models import JobRow, TrackerRow
from shoal_service.settings import Settings
from shoal_service.sinks import Lost, Opened, Order, SinkFailed
from shoal_service.track_child import Child
from shoal_service.track_feed import Cursor, Feed, cursor_at, read_feed

log = structlog.get_logger()

_PAUSE_S = 1.0  # between two batches, and between two looks for work
_RETRY_S = (1.0, 60.0)  # the first pause after a failure, and the longest
_FINISH_S = 30.0  # that a writer has to finish what it has
_STOP_S = 2.0  # the same when the server stops


class Followers:
    """`start` in a running event loop; `close` ends all writers."""

    def __init__(self, database: Database, bell: Bell, settings: Settings) -> None:
        self._database = database
        self._bell = bell
        self._settings = settings
        self._holder = duties.new_holder()
        self._running: dict[trackers.Key, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._surviving(self._look), name="trackers"),
            asyncio.create_task(self._surviving(self._renew), name="tracker-leases"),
        ]

    async def close(self) -> None:
        ending = [*self._tasks, *self._running.values()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._tasks:
            with contextlib.suppress(DatabaseAway):  # the leases end by themselves
                async with self._database.write() as session:
                    await trackers.release(session, self._holder)

    async def _surviving(self, turn: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await turn()
            except (DatabaseAway, SQLAlchemyError, OSError):
                # A database that is away comes back, and nothing else would follow the jobs then.
                log.exception("the trackers' rows cannot be used at present")
            await asyncio.sleep(_PAUSE_S)

    async def _look(self) -> None:
        count = self._bell.count(JOBS)
        async with self._database.read() as session:
            found = await trackers.open_to(session, self._holder)
        for key in found:
            if key not in self._running and await self._claim(key):
                follower = Follower(self._database, self._bell, self._settings, self._holder, key)
                task = asyncio.create_task(follower.run(), name=f"{key[1]}-{key[0]}")
                self._running[key] = task
                task.add_done_callback(self._ended)
        await self._bell.wait(JOBS, count, self._settings.tracker_lease_s / 3)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """One that broke is begun anew with the next look."""
        for key in [key for key, running in self._running.items() if running is task]:
            del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("following a tracker broke off", task=task.get_name(), exc_info=error)

    async def _claim(self, key: trackers.Key) -> bool:
        async with self._database.write() as session:
            return await trackers.claim(session, key, self._holder, self._settings.tracker_lease_s)

    async def _renew(self) -> None:
        if self._running:
            async with self._database.write() as session:
                await trackers.renew(session, self._holder, self._settings.tracker_lease_s)
        await asyncio.sleep(self._settings.tracker_lease_s / 4)


class _Next(Enum):
    AT_ONCE = auto()  # there is more
    LATER = auto()  # when the job has gone on
    NEVER = auto()


class _Taken(Exception):
    """Another replica follows it by now."""


@dataclass(slots=True)
class Follower:
    """Of one tracker of one job, which `holder` has claimed."""

    database: Database
    bell: Bell
    settings: Settings
    holder: str
    key: trackers.Key
    child: Child | None = None

    async def run(self) -> None:
        """Until all is written, somebody else does it, or this task is cancelled."""
        try:
            await self._follow()
        except _Taken:
            log.warning("another replica follows it", job=self.key[0], tracker=self.key[1])
        finally:
            await self._close(_STOP_S)

    async def _follow(self) -> None:
        topic, failures, following = job_topic(self.key[0]), 0, _Next.AT_ONCE
        while following is not _Next.NEVER:
            count = self.bell.count(topic)
            try:
                following = await self._turn()
                failures = 0
            except Lost as lost:
                await self._anew(str(lost))
                following = _Next.AT_ONCE
            except (SinkFailed, DatabaseAway, SQLAlchemyError, OSError) as error:
                await self._fails(error)
                failures += 1
                await asyncio.sleep(min(_RETRY_S[1], _RETRY_S[0] * 2 ** min(failures - 1, 10)))
                continue
            if following is _Next.LATER:
                await asyncio.sleep(_PAUSE_S)
                await self.bell.wait(topic, count, self.settings.tracker_lease_s / 3)

    async def _turn(self) -> _Next:
        row, job, feed = await self._read()
        if feed.rewritten:
            await self._anew("steps that were written were done again")
            return _Next.AT_ONCE
        if not feed.batch:
            if job.state == JobState.PAUSED:
                await self._close(_FINISH_S)
            return _Next.LATER
        if self.child is None:
            return await self._open(row, job)
        position = await self.child.write(feed.batch)
        ended = feed.batch.end is not None
        cleared = row.problem is not None
        await self._put(
            cleared or ended,
            position=dict(position),
            problem=None,
            problem_since_s=None,
            complete=ended,
            **_of(feed.cursor),
        )
        if cleared:
            log.info("tracker works again", job=job.id, tracker=row.tool)
        if ended:
            await self._close(_FINISH_S)
            return _Next.NEVER
        return _Next.AT_ONCE if feed.more else _Next.LATER

    async def _open(self, row: TrackerRow, job: JobRow) -> _Next:
        order = self._order(row, job)
        reach = self.settings.trackers.reach(order.tool, order.settings)
        self.child = await Child.start(self.settings.tracker_timeout_s, reach)
        await self._opened(row, await self.child.open(order))
        return _Next.AT_ONCE

    async def _opened(self, row: TrackerRow, opened: Opened) -> None:
        moved = {}
        if opened.step is not None and opened.step != row.step:
            async with self.database.read() as session:
                moved = _of(await cursor_at(session, row.job_id, opened.step))
        # Before the first word is written, as the writer that comes after a crash must know it.
        await self._put(row.url != opened.url, position=dict(opened.position), url=opened.url, **moved)

    def _order(self, row: TrackerRow, job: JobRow) -> Order:
        public = self.settings.public_url
        return Order(
            tool=cast(Tool, row.tool),
            job_id=job.id,
            name=job.name,
            spec=job.spec,
            created_at_s=job.created_at_s,
            url=None if public is None else f"{public.rstrip('/')}/jobs/{job.id}",
            generation=row.generation,
            position=row.position,
            folder=str(self.settings.data_path / "trackers"),
        )

    async def _read(self) -> tuple[TrackerRow, JobRow, Feed]:
        async with self.database.read() as session:
            found = await trackers.get(session, self.key, self.holder)
            if found is None:
                raise _Taken
            row, job = found
            cursor = Cursor(step=row.step, step_seq=row.step_seq, seq=row.seq)
            return row, job, await read_feed(session, job, cursor)

    async def _anew(self, why: str) -> None:
        log.warning("tracker is written anew", job=self.key[0], tracker=self.key[1], why=why)
        await self._close(_FINISH_S)
        await self._put(True, generation=TrackerRow.generation + 1, **_of(Cursor()))

    async def _fails(self, error: Exception) -> None:
        """A job says it once, with the newest reason; the database's own troubles are not the tracker's."""
        log.warning("tracker fails", job=self.key[0], tracker=self.key[1], why=str(error))
        await self._close(0.0)
        if isinstance(error, DatabaseAway | SQLAlchemyError):
            return
        row, _, _ = await self._read()
        if row.problem != str(error):
            await self._put(True, problem=str(error), problem_since_s=row.problem_since_s or time.time())

    async def _put(self, seen: bool, **values: object) -> None:
        """`seen`: whoever looks at the job is told. Raises _Taken."""
        async with self.database.write() as session:
            if not await trackers.put(session, self.key, self.holder, **values):
                raise _Taken
            if seen:
                await trackers.told(session, self.key[0])
        if seen:
            self.bell.ring(job_topic(self.key[0]))

    async def _close(self, grace_s: float) -> None:
        child, self.child = self.child, None
        if child is not None:
            await child.close(grace_s)


def _of(cursor: Cursor) -> dict[str, int]:
    return {"step": cursor.step, "step_seq": cursor.step_seq, "seq": cursor.seq}
