"""What answers about clusters, their nodes and their connectors look like."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from shoal_service.shapes import At, Profile, document

NodeOfCluster = Annotated[dict[str, Any], document("NodeOfCluster")]


class Nodes(TypedDict):
    """A page; `next_cursor` is null on the last one."""

    items: list[NodeOfCluster]
    next_cursor: str | None


class Cluster(TypedDict):
    """`holder` names the process that speaks for it."""

    id: str
    holder: str
    connected: bool
    lease_until: At
    updated_at: At
    fault_tolerant_head: bool | None
    if_head_dies: str
    num_nodes: int
    num_devices: int


class ClusterInFull(Cluster):
    """`snapshot` is what the cluster says beside its nodes."""

    snapshot: Annotated[dict[str, Any], document("SnapshotBesideNodes")]
    profile: Profile


class Lease(TypedDict):
    cluster_id: str
    lease_until: At
    lease_s: float


class Price(TypedDict):
    """Of nodes of one type, zone and market, or of one more node of a `pool`; null where nobody stated a price."""

    cluster_id: str
    pool: str | None
    connected: bool
    device: str
    devices: int
    zone: str
    spot: bool
    num_nodes: int
    price_per_hour: float | None
    price_per_device_hour: float | None
    source: str
    stated_at: At


class Drill(TypedDict):
    """A notice that a user had given to a node."""

    id: str
    cluster_id: str
    node: str
    notice_s: float
    ends_at: At


class KeptDrill(Drill):
    """One that was asked for, maybe long ago; `over`: its time has come."""

    at: At
    created_by: str
    over: bool


class Journaled(TypedDict):
    last_seq: Annotated[int, Field(description="The last entry that is recorded.")]


class Printed(TypedDict):
    fresh: Annotated[bool, Field(description="Whether any of the lines was not known yet.")]
