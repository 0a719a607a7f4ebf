"""What requests to the API carry, as pydantic models (for checking and for OpenAPI), and reading a JOB body."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Annotated, Any, Literal

from fastapi.routing import APIRoute
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request

from shoal_planner.documents import MalformedDocument, read_document
from shoal_service.errors import BadInput
from shoal_service.shapes import document

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,78}$")]
_Number = Annotated[int, Field(ge=1, lt=2**53)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Moment = Annotated[float, Field(ge=0, lt=1e11)]
_PRINTABLE = r"^[^\x00-\x1f]+$"
_Text = Annotated[str, Field(max_length=20_000)]
MOST_JOB_TEXT_BYTES = 262_144  # four times what a job may have without spaces, comments and what Shoal says in it
_MOST_JOB_NODES = 10_000
_YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


def _written(value: Any) -> Any:
    """Of text alone: seconds since 1970 are taken for moments, too, unless somebody says no."""
    if isinstance(value, str) and "T" not in value.upper():
        raise ValueError("must be a time as RFC 3339 writes it, such as 2026-01-31T12:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_written)]


class Body(BaseModel):
    """What is sent is what was meant: no text for a number, no number for a yes. Values of JSON that Python has other
    types for (names of roles, lists of fixed length) are marked `FromJson`."""

    model_config = ConfigDict(extra="forbid", strict=True)


FromJson = Field(strict=False)


class PlanRequest(Body):
    """A JOB and, unless the connected cluster is meant, a CLUSTER to plan it for."""

    job: Annotated[dict[str, Any], document("TrainJob")]
    cluster: Annotated[dict[str, Any], document("ClusterDocument")] | None = None
    seed: int = Field(default=0, ge=0)


class PoolReport(Body):
    """What a connector sees of a pool that nodes can be had of."""

    pool: Annotated[dict[str, Any], document("PoolDocument")] = Field(description="Its entry in the POOLS file.")
    nodes: list[Annotated[str, Field(max_length=80)]] = Field(description="The ids of its nodes that have joined.")
    starting: _Count = Field(default=0, description="How many the cloud has given that have not joined yet.")
    problem: str | None = Field(default=None, max_length=2000, description="Why it gives no more.")
    said: str | None = Field(default=None, max_length=2000, description="What is heard while it may still give more.")
    unreached: str | None = Field(
        default=None, max_length=2000, description="Why nobody can ask it now: the three before are of when one could."
    )


class SignOfLife(Body):
    """For how long nothing was heard of a node: by the supervisors of jobs, who listen to its processes, or by Ray,
    which lists it."""

    node: str = Field(min_length=1, max_length=200)
    age_s: float = Field(ge=0, lt=1e9)
    by: Literal["processes", "ray"]


class ClusterReport(Body):
    """What a connector says of its cluster when it takes or renews its lease."""

    holder: str = Field(min_length=1, max_length=200, description="Names the process that speaks for the cluster.")
    snapshot: Annotated[dict[str, Any], document("ClusterSnapshot")]
    profile: Annotated[dict[str, Any], document("Profile")] = Field(
        default_factory=dict, description="What was measured there."
    )
    fault_tolerant_head: bool | None = Field(
        default=None, description="Whether training goes on when the cluster's head dies and comes back."
    )
    lease_s: float = Field(gt=0, description="How long the lease is wanted for, in seconds.")
    pools: list[PoolReport] | None = Field(
        default=None, max_length=64, description="Pools that nodes can be had of; null: not known, or none."
    )
    signs: list[SignOfLife] | None = Field(
        default=None, max_length=16384, description="When its nodes were last heard; null: not told."
    )


class Preemption(Body):
    """A drill: the notice that a node gets."""

    notice_s: float = Field(default=120.0, ge=0, le=86400, description="How long before the node goes away.")
    cluster_id: Identifier | None = Field(default=None, description="Which cluster's, where several have such a node.")


class Overrides(Body):
    """What of a job is to be another in its clone."""

    overrides: Annotated[dict[str, Any], document("JobChanges")] = Field(
        default_factory=dict, description="Merged into the spec; null takes away."
    )
    dry_run: bool = False


# Told to clients; what is wrong with one is said by the words of a JOB.
_Dollars = Annotated[float, Field(json_schema_extra={"exclusiveMinimum": 0})]
_Devices = Annotated[int, Field(json_schema_extra={"minimum": 1})]


class NewLimits(Body):
    """What is to change of a job's `limits` and `priority`, as in a JOB; null takes a limit away."""

    budget_usd: _Dollars | None = Field(default=None, description="All that its nodes may cost, in dollars.")
    max_price_per_hour: _Dollars | None = Field(default=None, description="Of all nodes that it has at one time.")
    max_devices: _Devices | None = Field(default=None, description="At most so many devices at one time.")
    rent: bool = Field(default=False, description="Whether more nodes may be rented for it.")
    deadline: str | None = Field(default=None, description="When it rests, done or not (RFC 3339).")
    max_duration: str | None = Field(default=None, description="How long after it began it rests, as in 12h.")
    priority: int | str = Field(default="normal", description="A whole number, or low, normal or high.")


class NewSize(Body):
    """How many devices a job is to have, as in the `limits` of a JOB; what is left out stays."""

    min_devices: _Devices = Field(default=1, description="It begins with so many, or not at all; not while it runs.")
    max_devices: _Devices | None = Field(
        default=None, description="At most so many at one time; null: all that there are."
    )


class JournalBatch(Body):
    """Entries of a job's journal, in order; those that are known already are skipped."""

    cluster_id: Identifier
    holder: str = Field(min_length=1, max_length=200)
    entries: list[Annotated[dict[str, Any], document("JournalEntry")]]


_Line = tuple[_Number, _Moment, Literal["debug", "info", "warning", "error"], _Count, _Count | None, _Text]


class LogSource(Body):
    """Lines that processes of one node printed, as one life of its agent has numbered them."""

    node: str = Field(min_length=1, max_length=80, pattern=_PRINTABLE)
    life: str = Field(min_length=1, max_length=32, pattern=_PRINTABLE)
    lines: list[Annotated[_Line, FromJson]]


class LogBatch(Body):
    """Printed lines of a job: number, time of day in seconds, level, epoch, rank, text."""

    cluster_id: Identifier
    holder: str = Field(min_length=1, max_length=200)
    sources: list[LogSource]


async def read_body(request: Request) -> object:
    """The JOB document in the body, JSON or YAML by its content type, as plain values. Raises BadInput."""
    raw = await request.body()
    _check_text_size(len(raw))  # before anything is made of it
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    try:
        text = raw.decode("utf-8")
        if content_type in _YAML_TYPES:
            return await read_yaml(text, "body")
        if content_type == "application/json":
            return _read_json(text)
    except UnicodeDecodeError as error:
        raise BadInput("malformed_body", f"body: is not UTF-8: {error.reason}", "body", status=400) from error
    except json.JSONDecodeError as error:
        detail = f"body, line {error.lineno}: is not valid JSON: {error.msg}"
        raise BadInput("malformed_body", detail, "body", status=400) from error
    except ValueError as error:  # as of a whole number of thousands of digits, which Python refuses to read
        raise BadInput("malformed_body", f"body: is not valid JSON: {error}", "body", status=400) from error
    except RecursionError as error:
        raise BadInput("malformed_body", "body: is nested too deeply", "body", status=400) from error
    raise BadInput(
        "unsupported_media_type",
        f"Content-Type = {content_type!r}: send application/json or application/yaml",
        "Content-Type",
        status=415,
    )


async def distinct_keys(request: Request) -> None:
    """Runs before every route; JSON for one without a model is refused by `read_body`. Raises BadInput for a key that
    stands twice in one object, of which the model sees only the last. Connectors are programs, with much to bring."""
    route: APIRoute = request.scope["route"]
    if not (route.body_field and "json" in request.headers.get("content-type", "json")) or "connectors" in route.tags:
        return
    try:
        _read_json(await request.body())
    except (ValueError, RecursionError):  # said by whoever reads it
        return


async def no_stray_body(request: Request) -> None:
    """Runs before every route. Raises BadInput for what is sent to a verb of the API's that takes nothing: whoever sent
    it meant something. An empty object means nothing, and many clients send one."""
    route: APIRoute = request.scope["route"]
    takes_some = route.body_field or (route.openapi_extra or {}).get("requestBody")
    if takes_some or request.method in ("GET", "HEAD") or not route.path.startswith("/v1/"):
        return
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise BadInput("invalid_field", f"body: {request.method} {route.path} takes none", "body")


def _read_json(text: str | bytes) -> object:
    found: object = json.loads(text, object_pairs_hook=_distinct)
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise BadInput("malformed_body", f"body: the key {twice[:80]!r} stands twice in one object", "body", status=400)
    return found


async def read_yaml(text: str, source: str) -> object:
    """The JOB document in `text`, as plain values; `source` is what the text is called. Raises BadInput."""
    _check_text_size(len(text.encode(errors="replace")))
    try:  # in a thread: it may take a tenth of a second, in which others are answered
        return await asyncio.to_thread(read_document, text, source, most_nodes=_MOST_JOB_NODES)
    except MalformedDocument as error:
        raise BadInput("malformed_body", str(error), source, status=400) from error


def _check_text_size(size: int) -> None:
    if size > MOST_JOB_TEXT_BYTES:
        detail = f"the job's text has {size} bytes; at most {MOST_JOB_TEXT_BYTES} are read: more belongs into files"
        raise BadInput("job_too_large", detail, status=413)
