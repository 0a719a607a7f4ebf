"""The cluster as Ray shows it: nodes from labels, actors for agents and ranks, epochs claimed in Ray's key-value store.

The only file besides the actors' own that knows how Shoal's processes are named and placed in Ray. All actors are
detached and named, so whoever comes later finds them; nothing here keeps a handle as the only way in.

Node labels (all optional but the first): shoal.io/device, a type of the catalogue; shoal.io/node, the id (default:
Ray's); shoal.io/devices, how many; shoal.io/zone; shoal.io/spot; shoal.io/price-per-hour.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal_planner.cluster import ClusterSnapshot, DeviceOverride, Node
from shoal_workers.actor import AgentActor, RankActor
from shoal_workers.nodes import NodeSeen, NodeUnreachable

NAMESPACE = "shoal"
_KV_NAMESPACE = b"shoal"
_START_TIMEOUT_S = 60.0
_DEFAULT_BYTES_PER_S = 1.25e9


class RayCluster:
    """`cluster_id` names folders on the nodes; `overrides` are figures of device types that the catalogue lacks."""

    def __init__(self, cluster_id: str, overrides: tuple[DeviceOverride, ...]) -> None:
        self._cluster_id = cluster_id
        self._overrides = overrides

    def nodes(self) -> tuple[NodeSeen, ...]:
        found = []
        for entry in ray.nodes():
            labels = entry.get("Labels") or {}
            if entry["Alive"] and "shoal.io/device" in labels:
                found.append(NodeSeen(node=_node(entry, labels), incarnation=entry["NodeID"]))
        return tuple(sorted(found, key=lambda seen: seen.node.id))

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(nodes=tuple(seen.node for seen in self.nodes()), overrides=self._overrides)

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        name = f"agent-{seen.node.id}-{seen.incarnation[:8]}"
        return self._address(AgentActor, name, seen, (self._cluster_id, seen.node.id))

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        name = f"rank-{job}-{seen.node.id}-{index}-{seen.incarnation[:8]}"
        return self._address(RankActor, name, seen, (seen.node.id, index))

    def end_ranks(self, job: str) -> None:
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"rank-{job}-"):
                with contextlib.suppress(ValueError):  # it ended meanwhile
                    ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE), no_restart=True)

    def claim_epoch(self, job: str, at_least: int) -> int:
        epoch = at_least
        while internal_kv._internal_kv_put(_epoch_key(job, epoch), b"claimed", False, namespace=_KV_NAMESPACE):
            epoch += 1  # somebody had that one
        return epoch

    def _address(self, actor_class: Any, name: str, seen: NodeSeen, arguments: tuple[Any, ...]) -> tuple[str, int]:
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(seen.incarnation, soft=False),
        }
        try:
            actor = actor_class.options(**options).remote(*arguments)
            host, port = ray.get(actor.address.remote(), timeout=_START_TIMEOUT_S)
        except (ray.exceptions.RayError, ValueError) as error:
            raise NodeUnreachable(seen.node.id, f"{name} did not start: {error}") from error
        return host, port


def _epoch_key(job: str, epoch: int) -> bytes:
    return f"{job}/epoch/{epoch}".encode()


def _node(entry: dict[str, Any], labels: dict[str, str]) -> Node:
    resources = entry.get("Resources") or {}
    return Node(
        id=labels.get("shoal.io/node", entry["NodeID"][:12]),
        device=labels["shoal.io/device"],
        devices=int(labels.get("shoal.io/devices", "1")),
        host_memory_bytes=int(resources.get("memory", 0)),
        disk_bytes=0,
        intra_bytes_per_s=float(labels.get("shoal.io/intra-bytes-per-s", _DEFAULT_BYTES_PER_S)),
        inter_bytes_per_s=float(labels.get("shoal.io/inter-bytes-per-s", _DEFAULT_BYTES_PER_S)),
        zone=labels.get("shoal.io/zone", "default"),
        spot=labels.get("shoal.io/spot") == "true",
        price_per_hour=float(labels.get("shoal.io/price-per-hour", "0")),
    )


def overrides_to_mapping(overrides: tuple[DeviceOverride, ...]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(override) for override in overrides]


def overrides_from_mapping(values: list[dict[str, Any]]) -> tuple[DeviceOverride, ...]:
    return tuple(DeviceOverride(**value) for value in values)
