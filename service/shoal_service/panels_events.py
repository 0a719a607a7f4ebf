"""Which entries of a job's journal its page lists: the newest, or those up to one that the reader chose."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import journal, views
from shoal_service.models import JournalRow

_LARGEST = 2**31


async def events_shown(
    session: AsyncSession, job_id: str, chosen: str, kinds: Sequence[str]
) -> tuple[Sequence[JournalRow], int | None]:
    """Newest first, and the number of the chosen one if it is among them. An entry of any kind may be chosen; beside
    it stand those of `kinds`. What is not the number of an entry chooses nothing."""
    newest = await journal.newest(session, job_id, views.MAX_EVENTS, kinds)
    text = chosen.strip()
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < _LARGEST:
        return newest, None
    seq = int(text)
    if any(entry.seq == seq for entry in newest):
        return newest, seq
    entry = await session.get(JournalRow, (job_id, seq))
    if entry is None:
        return newest, None
    return [entry, *await journal.newest(session, job_id, views.MAX_EVENTS - 1, kinds, before=seq)], seq
