"""Pools that are node types of Ray's autoscaler: nodes are asked for by a resource that each node of a type has one of,
and given back by leaving them idle until the autoscaler ends them (`idle_timeout_minutes`).

Owns what is said to that autoscaler and read of it, of both of its kinds. What is asked for stands in the head's store,
replaces what was asked before, and holds while nobody is connected; nobody else may call `request_resources` there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import structlog
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental import internal_kv

from shoal_planner.rented_pools import pool_resource
from shoal_workers.nodes import NodeUnreachable
from shoal_workers.provisioner import Member, PoolOrder, PoolsUnreachable, Supply

log = structlog.get_logger()

_SAY_AGAIN_S = 30.0
_LEAVE_S = 15.0  # no plan stands on it; copies may
_NOTHING = PoolOrder(target=0, release=frozenset())


class RayPools:
    """`notify` tells a node that it goes away in so many seconds. `hold` has something of Shoal's run on a node, and
    `leave` ends that, for good: a node with an actor is never idle, and of those that are the autoscaler takes any."""

    def __init__(
        self,
        notify: Callable[[Member, float], None],
        hold: Callable[[Member], None],
        leave: Callable[[Member], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notify = notify
        self._hold = hold
        self._leave = leave
        self._clock = clock
        self._asked: dict[str, int] = {}
        self._asked_again_s = 0.0
        self._raised_at_s: dict[str, float] = {}  # by the time of day, as the autoscaler writes it
        self._told_s: dict[str, float] = {}
        self._held: set[str] = set()

    def obey(self, orders: Mapping[str, PoolOrder], members: Sequence[Member]) -> None:
        self._request({name: order.target for name, order in orders.items()})
        for member in members:
            if member.node in orders.get(member.pool, _NOTHING).release:
                self._release(member)
            elif member.incarnation not in self._held:
                self._held.add(member.incarnation)
                threading.Thread(target=self._keep, args=(member,), name="hold", daemon=True).start()

    def look(self, pools: Sequence[str], members: Sequence[Member]) -> Mapping[str, Supply]:
        try:
            starting, failed = _status_v2() if is_autoscaler_v2() else _status_v1()
        except (RuntimeError, OSError, ValueError, KeyError, ray.exceptions.RayError) as error:
            raise PoolsUnreachable(f"Ray's autoscaler: {error}") from error
        found = {}
        for name in pools:
            at_s, why = failed.get(name, (0.0, ""))
            new = at_s >= self._raised_at_s.get(name, 0.0)
            found[name] = Supply(starting=starting.get(name, 0), problem=why if why and new else None)
        return found

    def _request(self, targets: Mapping[str, int]) -> None:
        now_s = self._clock()
        if targets == self._asked and now_s < self._asked_again_s:
            return
        for name, target in targets.items():
            if target > self._asked.get(name, 0):  # what failed before was another request
                self._raised_at_s[name] = time.time()
        bundles = [{pool_resource(name): 1} for name, target in sorted(targets.items()) for _ in range(target)]
        try:
            request_resources(bundles=bundles)
        except (RuntimeError, OSError, ray.exceptions.RayError) as error:
            raise PoolsUnreachable(f"Ray's autoscaler: {error}") from error
        self._asked, self._asked_again_s = dict(targets), now_s + _SAY_AGAIN_S

    def _keep(self, member: Member) -> None:
        try:
            self._hold(member)
        except (NodeUnreachable, RuntimeError, OSError, ray.exceptions.RayError) as error:
            log.warning("node not held", node=member.node, why=str(error))
            self._held.discard(member.incarnation)  # once more at the next turn

    def _release(self, member: Member) -> None:
        now_s = self._clock()
        told_s = self._told_s.setdefault(member.incarnation, now_s)
        left_s = told_s + _LEAVE_S - now_s
        if left_s > 0:
            self._notify(member, left_s)
        else:
            self._leave(member)


_Status = tuple[Mapping[str, int], Mapping[str, tuple[float, str]]]


def _status_v1() -> _Status:
    """By type: nodes that are made and have not joined; when making one failed, and why."""
    text = internal_kv._internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    if not text:
        raise RuntimeError("none runs on this cluster, or it has not looked around yet")
    report = json.loads(text).get("autoscaler_report") or {}
    starting: dict[str, int] = {}
    for _, kind, *_ in report.get("pending_nodes") or ():
        starting[kind] = starting.get(kind, 0) + 1
    known: Mapping[str, Any] = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    failed = {}
    for kind, record in known.items():
        if not record["is_available"]:
            why = record.get("unavailable_node_information") or {}
            text = ": ".join(part for part in (why.get("category"), why.get("description")) if part)
            failed[kind] = float(record["last_checked_timestamp"]), text or "it could not be made"
    return starting, failed


def _status_v2() -> _Status:
    status = get_cluster_status(ray._private.worker.global_worker.gcs_client.address)
    starting: dict[str, int] = {}
    for node in status.pending_nodes:
        starting[node.ray_node_type_name] = starting.get(node.ray_node_type_name, 0) + 1
    failed: dict[str, tuple[float, str]] = {}
    for launch in status.failed_launches:
        at_s = float(launch.failed_ts_s or launch.request_ts_s)
        if at_s >= failed.get(launch.ray_node_type_name, (0.0, ""))[0]:
            failed[launch.ray_node_type_name] = at_s, launch.details or "it could not be made"
    return starting, failed
