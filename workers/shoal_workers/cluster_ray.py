"""The cluster as Ray shows it: nodes from labels, actors for agents and ranks, epochs claimed in Ray's key-value store.

The only file besides the actors' own that knows how Shoal's processes are named and placed in Ray. All actors are
detached and named, so whoever comes later finds them; nothing here keeps a handle as the only way in.

Node labels (all optional but the first): shoal.io/device, a type of the catalogue; shoal.io/node, the id (default: the
host's name where shoal.io/pool says which pool the node was made for, as pods and rented machines have names of their
own; else Ray's); and shoal.io/FIELD for the other fields of a Node, with dashes: shoal.io/devices,
shoal.io/price-per-hour. Zone and market are taken from Ray's own labels where ours are absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import structlog
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal_planner.cluster import ClusterSnapshot, Node, snapshot_from_mapping, snapshot_to_mapping
from shoal_planner.code_spec import NO_CODE, CodeSpec
from shoal_planner.datasheets import usual_link_bytes_per_s
from shoal_planner.errors import InvalidField
from shoal_planner.rented_pools import pool_of
from shoal_planner.strict import hints_of
from shoal_recovery.tenure import Life
from shoal_workers import allocator
from shoal_workers.actor import AgentActor, RankActor
from shoal_workers.code_ray import CodeRefused, environment_of
from shoal_workers.greeting import job_pass
from shoal_workers.nodes import NodeSeen, NodeUnreachable
from shoal_workers.provisioner import Member, PoolsUnreachable
from shoal_workers.settings import HeadSettings

log = structlog.get_logger()

Figures = dict[str, Any]

NAMESPACE = "shoal"
_KV_NAMESPACE = b"shoal"
_LEFT = "left/"
_START_TIMEOUT_S = 60.0
_SIGNS_S = 0.5
_DEFAULT_BYTES_PER_S = 1.25e9
_DRAIN_LEAD_S = 30.0  # where nobody says: the default grace of Kubernetes, and of Ray itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """Ray takes this node away in `left_s`."""

    incarnation: str
    left_s: float


class RayCluster:
    """`cluster_id` names folders on the nodes; `figures` (of `figures_of`) is what no node tells of itself; ranks find
    `code` around them."""

    def __init__(self, cluster_id: str, figures: Figures, code: CodeSpec = NO_CODE) -> None:
        self._cluster_id = cluster_id
        self._code = code
        self._known = snapshot_from_mapping({"nodes": [], **figures})
        self._ends_at_s: dict[str, float] = {}  # of incarnations that are drained

    def life(self) -> Life:
        return Life(cluster=self._cluster_id, incarnation=ray._private.worker.global_worker.gcs_client.cluster_id.hex())

    def head_is_fault_tolerant(self) -> bool:
        """Whether what the head knows outlives it: then actors live on while it is away. To be asked on the head, whose
        environment says so where the cluster's own settings do not."""
        given = ray._private.state.state.get_system_config().get("gcs_storage")
        return (given or ("redis" if HeadSettings().redis_address else HeadSettings().gcs_storage)) != "memory"

    def nodes(self) -> tuple[NodeSeen, ...]:
        """But those that Shoal has given back, and that are still there for a while."""
        found = []
        left = _left()
        for entry in ray.nodes():
            labels = entry.get("Labels") or {}
            if entry["Alive"] and _label("device") in labels and entry["NodeID"] not in left:
                try:
                    found.append(NodeSeen(node=node_of(entry, labels), incarnation=entry["NodeID"]))
                except InvalidField as error:  # one node with a wrong label must not hide the others
                    log.warning("node left out", node=entry["NodeID"], error=str(error))
        return distinct(found)

    def snapshot(self) -> ClusterSnapshot:
        """Nodes that Ray drains are marked as going away; jobs that have them hear of it by a notice."""
        found, now_s = {each.incarnation: each.left_s for each in self.draining()}, time.time()
        # What was said once stays, or everything would be decided anew because of it.
        self._ends_at_s = {name: self._ends_at_s.get(name, now_s + left_s) for name, left_s in found.items()}
        nodes = tuple(
            dataclasses.replace(seen.node, reclaim_at_s=self._ends_at_s.get(seen.incarnation, seen.node.reclaim_at_s))
            for seen in self.nodes()
        )
        return dataclasses.replace(self._known, nodes=nodes)

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        name = f"agent-{seen.node.id}-{seen.incarnation[:8]}"
        return self._address(AgentActor, name, seen, (self._cluster_id, seen.node.id))

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        name = f"rank-{job}-{seen.node.id}-{index}-{seen.incarnation[:8]}"
        try:
            environment = environment_of(self._code)
        except CodeRefused as error:
            raise NodeUnreachable(seen.node.id, f"{name} was not started: {error}") from error
        # What this process was started with the others are, too. Where nothing is left to say, Ray starts a rank at
        # once; else it waits for an agent of its own to listen, and has one Python start another: that is a second.
        lacking = {name: value for name, value in allocator.ENVIRONMENT.items() if os.environ.get(name) != value}
        if variables := lacking | environment.get("env_vars", {}):
            environment["env_vars"] = variables
        token = job_pass(job).token
        return self._address(RankActor, name, seen, (self._cluster_id, seen.node.id, job, index, token), environment)

    def end_ranks(self, job: str, nodes: frozenset[str] | None = None) -> None:
        prefix = f"rank-{job}-"
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] != NAMESPACE or not actor["name"].startswith(prefix):
                continue
            node, _, _ = actor["name"].removeprefix(prefix).rsplit("-", 2)  # then its device, and an incarnation
            if nodes is None or node in nodes:
                with contextlib.suppress(ValueError):  # it ended meanwhile
                    ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE), no_restart=True)

    def claim_epoch(self, job: str, at_least: int) -> int:
        epoch = at_least
        while internal_kv._internal_kv_put(_epoch_key(job, epoch), b"claimed", False, namespace=_KV_NAMESPACE):
            epoch += 1  # somebody had that one
        return epoch

    def first_meant(self, notice: str, incarnation: str) -> str:
        key = f"notice/{notice}".encode()
        internal_kv._internal_kv_put(key, incarnation.encode(), False, namespace=_KV_NAMESPACE)
        kept: bytes = internal_kv._internal_kv_get(key, namespace=_KV_NAMESPACE)
        return kept.decode()

    def draining(self) -> tuple[Draining, ...]:
        """Nodes that Ray is told to drain: by its autoscaler, by a SIGTERM to `ray start` (as Kubernetes sends it), or
        by hand. Deadlines are times of day, by the clock of whoever asked."""
        found = ray._private.state.state.get_draining_nodes()
        now_s = time.time()
        return tuple(
            Draining(incarnation=node, left_s=max(0.0, ends_ms / 1e3 - now_s) if ends_ms else _DRAIN_LEAD_S)
            for node, ends_ms in sorted(found.items())
        )

    def members(self, pools: Collection[str]) -> tuple[Member, ...]:
        """The nodes of these pools, given back or not. Raises PoolsUnreachable while the head is away."""
        found = []
        for entry in _entries():
            labels = entry.get("Labels") or {}
            pool = pool_of(labels, entry.get("Resources") or {}, pools)
            if entry["Alive"] and pool is not None:
                host = entry.get("NodeManagerHostname") or ""
                found.append(Member(node=_id_of(entry, labels), incarnation=entry["NodeID"], pool=pool, host=host))
        return tuple(sorted(found, key=lambda member: (member.node, member.incarnation)))

    def hold(self, member: Member) -> None:
        """With its agent there the node is never idle. Raises NodeUnreachable."""
        for seen in self.nodes():
            if seen.incarnation == member.incarnation:
                self.agent(seen)

    def leave(self, member: Member) -> None:
        """For good: nobody who asks what nodes there are hears of it any more, and Ray finds it idle. Raises
        PoolsUnreachable while the head is away."""
        name = f"agent-{member.node}-{member.incarnation[:8]}"
        try:
            internal_kv._internal_kv_put(f"{_LEFT}{member.incarnation}".encode(), b"1", namespace=_KV_NAMESPACE)
            with contextlib.suppress(ValueError):  # it has none, or none any more
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            raise PoolsUnreachable(f"Ray: {error}") from error

    def _address(
        self,
        actor_class: Any,
        name: str,
        seen: NodeSeen,
        arguments: tuple[Any, ...],
        environment: dict[str, Any] | None = None,
    ) -> tuple[str, int]:
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,  # nor any GPU: plans say which device computes, and Ray leaves all of the node visible then
            "max_restarts": 0,
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(seen.incarnation, soft=False),
        }
        if environment:
            options["runtime_env"] = environment
        try:
            actor = actor_class.options(**options).remote(*arguments)
            host, port = ray.get(actor.address.remote(), timeout=_START_TIMEOUT_S)
        except (ray.exceptions.RayError, ValueError) as error:
            raise NodeUnreachable(seen.node.id, f"{name} did not start: {error}") from error
        return host, port


def silences_s(supervisors: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """By job, for how many seconds its supervisor, of this name, has heard nothing of each node. Without those that do
    not answer at once: nobody's lease waits for them."""
    asked: dict[Any, str] = {}
    for job, name in supervisors.items():
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # not there, not yet, or the head is away
            asked[ray.get_actor(name, namespace=NAMESPACE).signs.remote()] = job
    found = {}
    if asked:
        for answer in ray.wait(list(asked), num_returns=len(asked), timeout=_SIGNS_S)[0]:
            with contextlib.suppress(ray.exceptions.RayError):  # it has died just now
                found[asked[answer]] = ray.get(answer)
    return found


def connector_name(cluster_id: str) -> str:
    """Of the actor that offers this cluster to a control plane."""
    return f"connector-{cluster_id}"


def _entries() -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = ray.nodes()
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:
        raise PoolsUnreachable(f"Ray: {error}") from error
    return found


def _left() -> frozenset[str]:
    """Incarnations."""
    keys = internal_kv._internal_kv_list(_LEFT.encode(), namespace=_KV_NAMESPACE) or ()
    return frozenset(key.decode().removeprefix(_LEFT) for key in keys)


def _epoch_key(job: str, epoch: int) -> bytes:
    return f"{job}/epoch/{epoch}".encode()


def distinct(found: list[NodeSeen]) -> tuple[NodeSeen, ...]:
    """By id, and one of each: machines may have one name by mistake, and one that comes back is there twice until Ray
    has noticed that it was gone. Always the same one, or the job on it would lose it again and again."""
    kept: dict[str, NodeSeen] = {}
    for seen in sorted(found, key=lambda seen: (seen.node.id, seen.incarnation)):
        if kept.setdefault(seen.node.id, seen) is not seen:
            log.warning("node left out", node=seen.incarnation, error=f"another node is called {seen.node.id}, too")
    return tuple(kept.values())


def labels_of(node: Node) -> dict[str, str]:
    """What a raylet must be labelled with to be seen as this node."""
    given = {field.name: getattr(node, field.name) for field in dataclasses.fields(Node) if field.name != "id"}
    labels = {_label(name): str(value) for name, value in given.items() if value is not None}
    return {**labels, _label("node"): node.id}


def _label(field: str) -> str:
    return f"shoal.io/{field.replace('_', '-')}"


def node_of(entry: dict[str, Any], labels: dict[str, str]) -> Node:
    """Raises InvalidField for a label that cannot be used."""
    resources = entry.get("Resources") or {}
    known: dict[str, Any] = {
        "id": _id_of(entry, labels),
        "devices": 1,
        "host_memory_bytes": int(resources.get("memory", 0)),
        "intra_bytes_per_s": usual_link_bytes_per_s(labels.get(_label("device"), "")),
        "inter_bytes_per_s": _DEFAULT_BYTES_PER_S,
    }
    if zone := labels.get("ray.io/availability-zone"):
        known["zone"] = zone
    known["spot"] = labels.get("ray.io/market-type") == "spot"
    hints = hints_of(Node)
    for field in dataclasses.fields(Node):
        text = labels.get(_label(field.name))
        if text is not None and field.name != "id":
            known[field.name] = _value(_label(field.name), text, hints[field.name])
    return Node(**known)


def _id_of(entry: dict[str, Any], labels: dict[str, str]) -> str:
    host = entry.get("NodeManagerHostname") if _label("pool") in labels else None
    return str(labels.get(_label("node")) or host or entry["NodeID"][:12])


def _value(label: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    if bool in kinds:
        return text.lower() == "true"
    if str in kinds:
        return text
    try:
        return int(text) if int in kinds else float(text)
    except ValueError as error:
        raise InvalidField(label, text, "must be a number") from error


def figures_of(snapshot: ClusterSnapshot) -> Figures:
    """Figures of device types that the catalogue lacks, and of links between zones; plain JSON values."""
    mapping = snapshot_to_mapping(snapshot)
    return {name: mapping[name] for name in ("overrides", "links")}
