"""What is new in a journal, read once for all streams that ask for the same at the same moment, as the watchers of one
job do whenever it goes on. Keeps nothing: a stream that lags behind reads for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service import jobs, journal
from shoal_service.answers import encoded
from shoal_service.database import Database

MOST_ENTRIES = 100  # what a slow reader of a stream keeps in memory here
_Key = tuple[str, int, tuple[str, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Entries (number, kind, JSON) in order, whether there may be more already, and how the job has ended, if it has:
    nothing comes after these then unless there is more."""

    entries: tuple[tuple[int, str, str], ...]
    more: bool
    end: str | None


class Tails:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._reading: dict[_Key, asyncio.Task[Piece]] = {}

    async def read(self, job_id: str, after: int, kinds: Sequence[str], count: int) -> Piece:
        """As it is now or later than the bell was heard `count` times. Raises NotFound, DatabaseAway."""
        key = (job_id, after, tuple(kinds), count)
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.create_task(self._read(job_id, after, kinds))
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        # Whoever stops waiting does not take it from the others.
        return await asyncio.shield(task)

    async def _read(self, job_id: str, after: int, kinds: Sequence[str]) -> Piece:
        async with self._database.read() as session:
            row = await jobs.get(session, job_id)
            rows = await journal.entries_after(session, job_id, after, MOST_ENTRIES, kinds)
        end = {"state": row.state, "code": row.state_code, "reason": row.reason} if jobs.ended(row) else None
        return Piece(
            entries=tuple((each.seq, each.kind, encoded(journal.event_resource(each)).decode()) for each in rows),
            more=len(rows) == MOST_ENTRIES,
            end=None if end is None else encoded(end).decode(),
        )
