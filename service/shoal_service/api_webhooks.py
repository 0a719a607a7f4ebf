"""REST: webhooks of projects and of the whole server, and what they were told."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from shoal_planner.errors import InvalidField
from shoal_service import webhooks
from shoal_service.access import default_project
from shoal_service.api_people import ProjectId
from shoal_service.bodies import Body, FromJson
from shoal_service.cursors import cursor_of
from shoal_service.errors import invalid_field
from shoal_service.gate import Caller, did
from shoal_service.guarded_http import check_url
from shoal_service.mail import check_mail_url
from shoal_service.once import Repeatable
from shoal_service.outbox import Told
from shoal_service.preconditions import IfMatch, tagged
from shoal_service.problems import documented
from shoal_service.services import Deps, Services
from shoal_service.shapes import Page
from shoal_service.shapes_people import Delivery, Webhook, WebhookWithSecret
from shoal_service.told_words import Form

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])
WebhookId = Annotated[str, Path(pattern=r"^hook_[0-9A-Z]{26}$")]
DeliveryId = Annotated[str, Path(pattern=r"^msg_[0-9A-Z]{26}$")]
Limit = Annotated[int, Query(ge=1, le=50)]  # urls may be long, and an answer must not be
Url = Annotated[str, Field(max_length=2000)]
Events = Annotated[list[Annotated[Told, FromJson]], Field(min_length=1, max_length=len(Told))]


class NewWebhook(Body):
    """Of a `project` (without one, the project that you have); with null, of all jobs of this server."""

    url: Url = Field(description="Where to post to: https://...; of the form email, mailto:ADDRESS.")
    form: Annotated[Form, FromJson] = Field(
        default=Form.JSON,
        description="json: signed, for programs; slack: a line of text as incoming webhooks of chats take it; email: a "
        "letter.",
    )
    events: Events = Field(default_factory=lambda: list(Told), description="What to tell; all of it by default.")
    project: ProjectId | None = None


class NewSecret(Body):
    """How the secret before ends."""

    overlap_s: Annotated[float, Field(ge=0, le=7 * 86400)] = Field(
        default=86400.0, description="For so long it signs as well; 0: it is of no use at once."
    )


class WebhookChange(Body):
    """What is given is changed."""

    url: Url | None = None
    form: Annotated[Form, FromJson] | None = None
    events: Events | None = None
    enabled: bool | None = None


def _checked(deps: Services, url: str, form: Form) -> str:
    try:
        if form is Form.EMAIL:
            check_mail_url(url, deps.settings.mail)
        else:
            check_url(url, allow_private=deps.settings.webhook_private)
    except ValueError as error:
        raise invalid_field(InvalidField("url", url, str(error))) from error
    return url


@router.get("", responses=documented(ok=Page[Webhook]), response_model=None)
async def list_webhooks(
    deps: Deps, caller: Caller, limit: Limit = 20, cursor: Annotated[str | None, cursor_of("hook")] = None
) -> Page[Webhook]:
    """Those of projects that you administer, or, for administrators of this server, all, oldest first. Secrets are not
    in it."""
    async with deps.database.read() as session:
        rows, following = await webhooks.page(session, caller, limit=limit, after=cursor)
    return {"items": [webhooks.resource(row) for row in rows], "next_cursor": following}


@router.post("", status_code=201, responses=documented(404, 409, created=WebhookWithSecret))
async def create_webhook(request: Request, deps: Deps, caller: Caller, once: Repeatable, body: NewWebhook) -> Response:
    """The answer has the `secret` with which deliveries are signed: it is told this once; the same Idempotency-Key once
    more is answered with 409 `secret_told_before`."""
    project = body.project if "project" in body.model_fields_set else default_project(caller)
    url = _checked(deps, body.url, body.form)
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        row, secret = await webhooks.create(
            session, caller, deps.webhook_key, project=project, url=url, form=body.form, events=body.events
        )
        did(request, row.id, project)
        return await once.end(session, row.id, webhooks.resource(row), 201, secret=secret)


@router.get("/{webhook_id}", responses=documented(404, ok=Webhook))
async def get_webhook(deps: Deps, caller: Caller, webhook_id: WebhookId) -> Response:
    async with deps.database.read() as session:
        return tagged(webhooks.resource(await webhooks.get(session, caller, webhook_id)))


@router.patch("/{webhook_id}", responses=documented(404, 412, ok=Webhook))
async def change_webhook(
    request: Request, deps: Deps, caller: Caller, webhook_id: WebhookId, body: WebhookChange, if_match: IfMatch = None
) -> Response:
    """One that is not `enabled` is told nothing, also not what happened meanwhile."""
    async with deps.database.write() as session:
        row = await webhooks.get(session, caller, webhook_id, to_change=True, if_match=if_match)
        form = Form(row.form) if body.form is None else body.form
        if body.url is not None or form != row.form:
            row.url, row.form = _checked(deps, body.url or row.url, form), form
        row.events = row.events if body.events is None else [event.value for event in body.events]
        if body.enabled is not None and body.enabled != row.enabled:
            row.enabled, row.problem = body.enabled, None
            if not body.enabled:
                await webhooks.end_pending(session, row.id, "the webhook was disabled")
    did(request, row.id, row.project_id)
    return tagged(webhooks.resource(row))


@router.delete("/{webhook_id}", status_code=204, responses=documented(404, 412))
async def delete_webhook(
    request: Request, deps: Deps, caller: Caller, webhook_id: WebhookId, if_match: IfMatch = None
) -> Response:
    """With the record of its deliveries."""
    async with deps.database.write() as session:
        row = await webhooks.get(session, caller, webhook_id, to_change=True, if_match=if_match)
        did(request, row.id, row.project_id)
        await webhooks.remove(session, row)
    return Response(status_code=204)


@router.post("/{webhook_id}/secret", responses=documented(404, 409, 412, ok=WebhookWithSecret))
async def renew_secret(
    request: Request,
    deps: Deps,
    caller: Caller,
    once: Repeatable,
    webhook_id: WebhookId,
    wanted: NewSecret | None = None,
    if_match: IfMatch = None,
) -> Response:
    """Another secret, told this once. For a day, or as long as is said, deliveries are signed with the one before, too:
    receivers have time to take the new one."""
    overlap_s = (wanted or NewSecret()).overlap_s
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        row = await webhooks.get(session, caller, webhook_id, to_change=True, if_match=if_match)
        secret = webhooks.renew_secret(row, deps.webhook_key, overlap_s)
        did(request, row.id, row.project_id)
        return await once.end(session, row.id, webhooks.resource(row), 200, secret=secret)


@router.post("/{webhook_id}/ping", status_code=202, responses=documented(404, 409, accepted=Delivery))
async def ping_webhook(
    request: Request, deps: Deps, caller: Caller, once: Repeatable, webhook_id: WebhookId
) -> Response:
    """Tells it something (`ping`), whatever it asked to be told: to see whether it hears."""
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        row = await webhooks.get(session, caller, webhook_id)
        found = webhooks.ping(session, row)
        did(request, row.id, row.project_id)
        return await once.end(session, found.id, webhooks.delivery_resource(found), 202)


@router.get("/{webhook_id}/deliveries", responses=documented(404, ok=Page[Delivery]), response_model=None)
async def list_deliveries(
    deps: Deps,
    caller: Caller,
    webhook_id: WebhookId,
    state: Annotated[Literal["pending", "delivered", "failed"] | None, Query()] = None,
    limit: Limit = 20,
    cursor: Annotated[str | None, cursor_of("msg")] = None,
) -> Page[Delivery]:
    """What it was told, or is to be, newest first. Those that are made or failed are kept for 30 days."""
    async with deps.database.read() as session:
        row = await webhooks.get(session, caller, webhook_id)
        rows, following = await webhooks.deliveries(session, row.id, state=state, limit=limit, before=cursor)
    return {"items": [webhooks.delivery_resource(each) for each in rows], "next_cursor": following}


@router.post(
    "/{webhook_id}/deliveries/{delivery_id}/retry",
    status_code=202,
    responses=documented(404, 409, accepted=Delivery),
)
async def retry_delivery(
    request: Request, deps: Deps, caller: Caller, once: Repeatable, webhook_id: WebhookId, delivery_id: DeliveryId
) -> Response:
    """Makes it again, from the first attempt on, under the same id."""
    async with deps.database.write() as session:
        if (earlier := await once.begin(session)) is not None:
            return earlier
        row = await webhooks.get(session, caller, webhook_id)
        found = await webhooks.redeliver(session, row.id, delivery_id)
        did(request, f"{row.id}/{found.id}", row.project_id)
        return await once.end(session, found.id, webhooks.delivery_resource(found), 202)
