"""Brings what stands in the outbox to webhooks, beside everything else. A replica reserves a delivery before it makes
it, and notes it as made after its receiver has answered: where one is killed in between, another makes it once more,
under the same id. Whoever does not answer is tried again, ever less often, and holds nobody else up."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import structlog
from sqlalchemy import bindparam, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import mail, signing, webhooks
from shoal_service.database import Database
from shoal_service.guarded_http import Poster, Refused, Unreachable
from shoal_service.mail import MailFailed, MailServer, address_of, check_mail_url
from shoal_service.meters import Meters
from shoal_service.models_webhooks import DeliveryRow, WebhookRow
from shoal_service.outbox import DELIVERED, FAILED, PENDING
from shoal_service.told_words import Form, slack_body, words
from shoal_service.turns import Turns

log = structlog.get_logger()

# After each attempt, how long until the next one: two days in all.
PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 43200.0, 86400.0)
_RESERVED_S = 60.0
_LOOK_S = 1.0
_STOP_S = 2.0
_TIMEOUT_S = 10.0
_AT_ONCE = 20
_OF_ONE = 2  # at once: a receiver that hangs leaves room for others
_KEPT_S = 30 * 86400.0
_GONE = 410  # the receiver wants nothing more, as Standard Webhooks has it


def pause_s(num_attempts: int, luck: float) -> float | None:
    """How long to wait after so many attempts in vain; None: no more. `luck` is in [0, 1): receivers that were away are
    not asked by all at the same moment."""
    if num_attempts > len(PAUSES_S):
        return None
    return PAUSES_S[num_attempts - 1] * (0.9 + 0.2 * luck)


# Each replica asks every second, and to build it takes longer than to ask.
_DUE = (
    select(DeliveryRow)
    .where(DeliveryRow.state == PENDING, DeliveryRow.next_at_s <= bindparam("now_s"))
    .where(DeliveryRow.id.not_in(bindparam("under_way", expanding=True)))
    .where(DeliveryRow.webhook_id.not_in(bindparam("busy", expanding=True)))
    .order_by(DeliveryRow.next_at_s)
    .limit(_AT_ONCE)
)


class Couriers:
    """`start` in a running event loop. `key` is what secrets are made of; `mail` takes letters, None: nobody does.
    `public_url` is where this server is reached, for words that people read."""

    def __init__(
        self,
        database: Database,
        meters: Meters,
        key: str,
        *,
        allow_private: bool,
        mail: MailServer | None = None,
        public_url: str | None = None,
    ) -> None:
        self._database = database
        self._meters = meters
        self._key = key
        self._mail = mail
        self._public_url = public_url
        self._poster = Poster(allow_private=allow_private, timeout_s=_TIMEOUT_S)
        self._forgot_at_s = 0.0
        self._under_way: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._turns = Turns("webhooks", self._turn, _LOOK_S)

    def start(self) -> None:
        self._turns.start()

    async def close(self) -> None:
        """Receivers that answer soon are still heard; what others are told they are told again later."""
        await self._turns.close()
        tasks = [task for _, task in self._under_way.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._poster.close()

    async def _turn(self) -> None:
        now_s = time.time()
        async with self._database.read() as session:
            rows = await _due(session, now_s, [*self._under_way], self._busy())
        chosen = _chosen(rows, [webhook for webhook, _ in self._under_way.values()])
        if not chosen:
            return
        for row in await self._reserved(chosen, now_s):
            task = asyncio.create_task(self._deliver(row), name=row.id)
            self._under_way[row.id] = row.webhook_id, task
            task.add_done_callback(self._ended)
        await self._forget(now_s)

    def _busy(self) -> list[str]:
        theirs = [webhook for webhook, _ in self._under_way.values()]
        return [webhook for webhook in {*theirs} if theirs.count(webhook) >= _OF_ONE]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task.get_name(), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a delivery broke off; it is made again", delivery=task.get_name(), exc_info=error)

    async def _reserved(self, rows: Sequence[DeliveryRow], now_s: float) -> list[DeliveryRow]:
        """Those of them that no other replica makes meanwhile."""
        mine = []
        async with self._database.write() as session:
            for row in sorted(rows, key=lambda row: row.id):  # in one order: replicas wait for each other's rows
                still = (DeliveryRow.id == row.id, DeliveryRow.state == PENDING, DeliveryRow.next_at_s <= now_s)
                values = {"next_at_s": now_s + _RESERVED_S}
                changed = await session.execute(update(DeliveryRow).where(*still).values(values))
                if changed.rowcount:  # type: ignore[attr-defined]
                    mine.append(row)
        return mine

    async def _deliver(self, row: DeliveryRow) -> None:
        async with self._database.read() as session:
            webhook = await session.get(WebhookRow, row.webhook_id)
        if webhook is None:
            return
        secret = signing.secret_of(self._key, webhook.id, webhook.nonce)
        if signing.hash_of(secret) != webhook.secret_hash:
            why = "its secret cannot be made any more, as the administrator's token is another one: renew it"
            await self._note(row, None, why, webhook_problem=why)
            return
        now_s, secrets = time.time(), [secret]
        if webhook.old_nonce is not None and now_s < (webhook.old_until_s or 0.0):
            secrets.append(signing.secret_of(self._key, webhook.id, webhook.old_nonce))
        status, problem = None, None
        try:
            if webhook.form == Form.EMAIL:
                await self._write(webhook, row)
            else:
                status = await self._post(webhook, row, secrets)
                problem = None if 200 <= status < 300 else f"answered {status}"
        except Refused as error:
            problem = f"not sent: {error}"
        except (Unreachable, MailFailed) as error:
            problem = str(error)
        await self._note(row, status, problem)

    async def _post(self, webhook: WebhookRow, row: DeliveryRow, secrets: Sequence[str]) -> int:
        body = slack_body(row.body, self._public_url) if webhook.form == Form.SLACK else row.body
        headers = signing.headers(secrets, row.id, int(time.time()), body)
        headers |= {"content-type": "application/json", "user-agent": "shoal-webhooks"}
        return await self._poster.post(webhook.url, headers, body.encode())

    async def _write(self, webhook: WebhookRow, row: DeliveryRow) -> None:
        """The operator may have changed since then what letters are sent, and to whom."""
        try:
            check_mail_url(webhook.url, self._mail)
        except ValueError as error:
            raise Refused(str(error)) from error
        address = address_of(webhook.url)
        assert self._mail is not None and address is not None
        title, text = words(row.body, self._public_url)
        await mail.send(self._mail, address, title, text, row.id)

    async def _note(
        self, row: DeliveryRow, status: int | None, problem: str | None, webhook_problem: str | None = None
    ) -> None:
        now_s, attempts = time.time(), row.num_attempts + 1
        values = {"num_attempts": attempts, "last_at_s": now_s, "status": status, "problem": problem}
        again_s = pause_s(attempts, random.random())
        state = DELIVERED if problem is None else FAILED if again_s is None or status == _GONE else PENDING
        if state == PENDING and again_s is not None:
            values["next_at_s"] = now_s + again_s
        async with self._database.write() as session:
            mine = (DeliveryRow.id == row.id, DeliveryRow.state == PENDING)  # nobody has given it up meanwhile
            await session.execute(update(DeliveryRow).where(*mine).values(state=state, **values))
            if problem is None or webhook_problem is not None:
                theirs = (WebhookRow.id == row.webhook_id, WebhookRow.problem.is_distinct_from(webhook_problem))
                await session.execute(update(WebhookRow).where(*theirs).values(problem=webhook_problem))
            if status == _GONE:
                why = "its receiver answered 410: it is told nothing any more"
                values = {"enabled": False, "problem": why}
                await session.execute(update(WebhookRow).where(WebhookRow.id == row.webhook_id).values(values))
                await webhooks.end_pending(session, row.webhook_id, why)
        self._meters.deliveries.labels("delivered" if problem is None else "failed").inc()
        log.info("webhook told", webhook=row.webhook_id, delivery=row.id, status=status, problem=problem)

    async def _forget(self, now_s: float) -> None:
        if now_s - self._forgot_at_s < 3600.0:
            return
        self._forgot_at_s = now_s
        async with self._database.write() as session:
            old = (DeliveryRow.state != PENDING, DeliveryRow.created_at_s < now_s - _KEPT_S)
            await session.execute(delete(DeliveryRow).where(*old))


def _chosen(rows: Sequence[DeliveryRow], under_way: Sequence[str]) -> list[DeliveryRow]:
    """As many as may be made at once, beside those to these webhooks."""
    theirs, found = list(under_way), []
    for row in rows:
        if len(theirs) < _AT_ONCE and theirs.count(row.webhook_id) < _OF_ONE:
            theirs.append(row.webhook_id)
            found.append(row)
    return found


async def _due(
    session: AsyncSession, now_s: float, under_way: Sequence[str], busy: Sequence[str]
) -> Sequence[DeliveryRow]:
    given = {"now_s": now_s, "under_way": under_way, "busy": busy}
    return (await session.scalars(_DUE, given)).all()
