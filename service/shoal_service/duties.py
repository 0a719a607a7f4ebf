"""What one replica of this server does for all, by leases in the database: who claims a duty has it until the lease
ends, and whoever comes next takes it over. A lease keeps work from being done twice for nothing; that it does no harm
if it is, every duty sees to itself.
"""

from __future__ import annotations

import os
import secrets
import socket
import time

from sqlalchemy import or_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service.models import DutyRow


def new_holder() -> str:
    """Names this process, and no other one that ever was."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


async def claim(session: AsyncSession, name: str, holder: str, lease_s: float) -> bool:
    """Whether the duty is the holder's from now on, for `lease_s` or until it claims it again."""
    now_s = time.time()
    free = or_(DutyRow.holder.is_(None), DutyRow.holder == holder, DutyRow.lease_until_s < now_s)
    values = {"holder": holder, "lease_until_s": now_s + lease_s}
    changed = await session.execute(update(DutyRow).where(DutyRow.name == name, free).values(values))
    if changed.rowcount:  # type: ignore[attr-defined]
        return True
    if await session.get(DutyRow, name) is not None:
        return False
    try:
        async with session.begin_nested():
            session.add(DutyRow(name=name, **values))
    except IntegrityError:  # another one was first
        return False
    return True


async def release(session: AsyncSession, holder: str) -> None:
    """All that it has."""
    await session.execute(update(DutyRow).where(DutyRow.holder == holder).values(holder=None, lease_until_s=0.0))
