"""Posts that are answered once: whoever sends one again under the same Idempotency-Key hears what was answered then,
and nothing is made twice. Jobs keep their keys themselves, for ever (jobs.py).

What was told once for all, a secret, is not kept: its repetition is refused, naming what was made.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import JSONResponse

from shoal_service.errors import Conflict
from shoal_service.gate import Caller, did
from shoal_service.jobs import stored_key
from shoal_service.models import KeyRow

IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=200, description="Sent again under the same key, it is done and answered once."),
]
_KEPT_S = 7 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """One request. `begin` and `end` belong into the transaction that does what is asked for, in this order."""

    request: Request
    key: str | None
    stored: str | None
    asked: str

    async def begin(self, session: AsyncSession) -> JSONResponse | None:
        """The answer if it was given before; None: do it now. Raises Conflict for a key that belongs to another
        request, or to one whose answer had a secret."""
        if self.stored is None:
            return None
        now_s = time.time()
        await session.execute(delete(KeyRow).where(KeyRow.created_at_s < now_s - _KEPT_S))
        try:
            async with session.begin_nested():
                session.add(KeyRow(key=self.stored, asked=self.asked, status=0, created_at_s=now_s))
            return None
        except IntegrityError:  # it was sent before
            row = await session.get(KeyRow, self.stored, populate_existing=True)
            assert row is not None
        named = f"Idempotency-Key = {self.key!r}"
        if row.asked != self.asked:
            raise Conflict("idempotency_key_reused", f"{named}: was used for another request", id=row.target)
        did(self.request, row.target or "")
        if row.answer is None:
            problem = f"{named}: was answered before, with a secret that is told once; what came of it is {row.target}"
            raise Conflict("secret_told_before", problem, id=row.target)
        return JSONResponse(row.answer, status_code=row.status)

    async def end(
        self, session: AsyncSession, target: str, answer: Mapping[str, Any], status: int, *, secret: str | None = None
    ) -> JSONResponse:
        """The answer, kept for whoever asks again unless one of its fields is a `secret`. `target` is the id of what
        was made."""
        if self.stored is not None:
            row = await session.get_one(KeyRow, self.stored)
            row.target, row.status, row.answer = target, status, dict(answer) if secret is None else None
        told = {**answer, "secret": secret} if secret is not None else answer
        headers = {"ETag": answer["etag"]} if "etag" in answer else None
        return JSONResponse(told, status_code=status, headers=headers)


async def _once(request: Request, caller: Caller, idempotency_key: IdempotencyKey = None) -> Once:
    body = await request.body()
    try:
        asked = json.dumps(json.loads(body), sort_keys=True).encode() if body else b""
    except (ValueError, RecursionError):  # the route refuses it
        asked = body
    sent = f"{request.method} {request.url.path}\n".encode() + asked
    return Once(
        request=request,
        key=idempotency_key,
        stored=stored_key(caller.subject, idempotency_key),
        asked=hashlib.sha256(sent).hexdigest(),
    )


Repeatable = Annotated[Once, Depends(_once)]
