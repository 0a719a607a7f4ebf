"""What answers about pools look like, of which clusters can get nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from shoal_service.shapes import At


class WishedPool(TypedDict):
    """As a connector hears of it: how many nodes there are to be, and which are to go."""

    name: str
    target: int
    release: list[str]


class PoolCounts(TypedDict):
    """Nodes since the pool is known."""

    num_asked: int
    num_came: int
    num_short: int
    num_released: int


class PoolPrice(TypedDict):
    """Of one more node, and who says so."""

    price_per_hour: float
    source: str
    stated_at: At


class Pool(PoolPrice):
    """`nodes` are there, `leaving` among them are given back, `starting` are on their way. `problem` is why it gives no
    more now, or why it cannot be asked; what is `starting` is then of before."""

    cluster_id: str
    name: str
    device: str
    devices: int
    spot: bool
    zones: list[str]
    instance_type: str | None
    min: int
    max: int
    nodes: list[str]
    leaving: list[str]
    starting: int
    target: int
    problem: str | None
    asked_again_at: Annotated[At | None, Field(description="When it is asked again, where it was short.")]
    counts: PoolCounts
    seen_at: At


class PoolEvent(TypedDict):
    """`job_id` is null where it was for none, or for one of a project of others."""

    id: int
    at: At
    at_s: float
    cluster_id: str
    job_id: str | None
    pool: str
    kind: str
    count: int
    reason: str
    nodes: list[str]


class PoolEvents(TypedDict):
    """The next page is asked for with `after` = `next_after`."""

    items: list[PoolEvent]
    next_after: int
    more: bool
