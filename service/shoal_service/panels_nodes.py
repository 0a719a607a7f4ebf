"""What the nodes panel of a job shows: its nodes by kind, then each with what is the matter with it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_recovery.journal import NodeJoined, NodeNoticed, NodeRecovered, NodeSlowed, NoticeEnded, PlanAdopted
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_service.signs import Kept, Sign, sign
from shoal_service.timeline import Event, node_spans

MAX_NODES = 24  # that are listed one by one; what something is the matter with goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNode:
    """`leaves_at_s`: when it goes away, as somebody has told; `since_s`: since when the job has had it."""

    id: str
    device: str
    devices: int
    spot: bool
    zone: str
    price_per_hour: float | None
    since_s: float | None
    works: bool
    leaves_at_s: float | None
    told_by: str
    slowdown: float | None
    sign: Sign | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one type, market, zone and price. `longest`: the last sign of life of the one that is silent for the
    longest time, of those of which any was told."""

    name: str
    market: str
    zone: str
    num_nodes: int
    num_working: int
    num_leaving: int
    num_slow: int
    price_per_hour: float | None
    longest: Sign | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPanel:
    groups: tuple[NodeGroup, ...]
    nodes: tuple[JobNode, ...]
    hidden: int


def nodes_panel(
    events: Sequence[Event], end_at_s: float, drills: Mapping[str, float] | None = None, heard: Kept = None
) -> NodesPanel:
    """Of the nodes that the job has now. `drills`: by node, until when one says that it goes away, before the job's
    journal tells of it. `heard`: their signs of life, as their cluster keeps them."""
    known: dict[str, Mapping[str, Any]] = {}
    working: frozenset[str] = frozenset()
    leaving: dict[str, tuple[float, str]] = {name: (at_s, "drill") for name, at_s in (drills or {}).items()}
    slow: dict[str, float] = {}
    for event in events:
        match event.kind:
            case PlanAdopted.kind:
                known |= {node["id"]: node for node in event.payload["snapshot"]["nodes"]}
                working = frozenset(
                    replica["node"]
                    for pipeline in event.payload["plan"]["pipelines"]
                    for stage in pipeline["stages"]
                    for replica in stage["replicas"]
                )
            case NodeJoined.kind:
                said = event.payload
                known.setdefault(said["node"], {"device": said["device"], "devices": said["devices"]})
            case WorkersStarted.kind:
                known |= {node["id"]: node for node in event.payload["snapshot"]["nodes"]}
                working = frozenset(event.payload["nodes"])
            case NodeNoticed.kind:
                leaving[event.payload["node"]] = (event.at_s + event.payload["lead_s"], event.payload["source"])
            case NoticeEnded.kind:
                leaving.pop(event.payload["node"], None)
            case NodeSlowed.kind:
                slow[event.payload["node"]] = float(event.payload["slowdown"])
            case NodeRecovered.kind:
                slow.pop(event.payload["node"], None)
            case _:
                pass
    here = {name: spans[-1][0] for name, spans in node_spans(events, end_at_s).items() if spans[-1][2] is None}
    found = [
        _node(name, known.get(name), since_s, name in working, leaving.get(name), slow.get(name), sign(heard, name))
        for name, since_s in here.items()
    ]
    found.sort(key=lambda node: (node.leaves_at_s is None, node.slowdown is None, node.works, node.id))
    return NodesPanel(groups=_groups(found), nodes=tuple(found[:MAX_NODES]), hidden=max(0, len(found) - MAX_NODES))


def _node(
    name: str,
    node: Mapping[str, Any] | None,
    since_s: float,
    works: bool,
    leaving: tuple[float, str] | None,
    slowdown: float | None,
    last: Sign | None,
) -> JobNode:
    """Of one that joined after the newest plan, its devices alone are known."""
    node = node or {}
    return JobNode(
        id=name,
        device=str(node.get("device", "not told yet")),
        devices=int(node.get("devices", 0)),
        spot=bool(node.get("spot")),
        zone=str(node.get("zone", "")),
        price_per_hour=float(node.get("price_per_hour", 0.0)) or None,
        since_s=since_s,
        works=works,
        leaves_at_s=None if leaving is None else leaving[0],
        told_by="" if leaving is None else leaving[1],
        slowdown=slowdown,
        sign=last,
    )


def _groups(nodes: Sequence[JobNode]) -> tuple[NodeGroup, ...]:
    found: defaultdict[tuple[str, bool, str, float | None], list[JobNode]] = defaultdict(list)
    for node in nodes:
        kind = f"{node.devices} x {node.device}" if node.devices else node.device
        found[kind, node.spot, node.zone, node.price_per_hour].append(node)
    return tuple(
        NodeGroup(
            name=name,
            market="spot" if spot else "on demand",
            zone=zone,
            num_nodes=len(members),
            num_working=sum(node.works for node in members),
            num_leaving=sum(node.leaves_at_s is not None for node in members),
            num_slow=sum(node.slowdown is not None for node in members),
            price_per_hour=price,
            longest=min((node.sign for node in members if node.sign), key=lambda last: last.at_s, default=None),
        )
        for (name, spot, zone, price), members in sorted(found.items(), key=lambda item: (-len(item[1]), item[0][0]))
    )
