"""The connector: offers one Ray cluster to one control plane, starts a supervisor for each job that is wanted there,
and brings their journals home. It holds nothing that cannot be asked for again, so it may die and come back any time.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import ray
import structlog
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal_planner.cluster import snapshot_to_mapping
from shoal_workers.cluster_ray import NAMESPACE, RayCluster, overrides_from_mapping
from shoal_workers.control_plane import ControlPlane, ControlPlaneDown, LeaseRefused, Wish
from shoal_workers.supervisor_actor import SupervisorActor

log = structlog.get_logger()

_LEASE_S = 15.0
_RENEW_S = 2.0
_LONG_POLL_S = 10.0
_ENTRIES_WAIT_S = 0.5
_RETRY_S = 0.5
_SUPERVISOR_RESTARTS = 50
_HEAD_RESOURCE = "node:__internal_head__"


class Connector:
    """Runs in threads until the process ends."""

    def __init__(self, *, server: str, token: str, cluster_id: str, overrides: list[dict[str, Any]]) -> None:
        self._cluster_id = cluster_id
        self._overrides = overrides
        self._cluster = RayCluster(cluster_id, overrides_from_mapping(overrides))
        self._plane = ControlPlane(server, token, cluster_id, holder=uuid.uuid4().hex)
        self._version = -1
        self._wishes: tuple[Wish, ...] = ()
        self._couriers: dict[str, threading.Thread] = {}
        self._cancelled: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self._offer, name="offer", daemon=True).start()
        threading.Thread(target=self._serve, name="wishes", daemon=True).start()

    def _offer(self) -> None:
        while True:
            try:
                self._plane.offer(snapshot_to_mapping(self._cluster.snapshot()), {}, _LEASE_S)
            except (ControlPlaneDown, LeaseRefused) as error:
                log.warning("cluster not offered", error=str(error))
            time.sleep(_RENEW_S)

    def _serve(self) -> None:
        while True:
            try:
                self._version, self._wishes = self._plane.wishes(self._version, _LONG_POLL_S if self._idle() else 0.5)
            except ControlPlaneDown as error:
                log.warning("no wishes", error=str(error))
                time.sleep(_RETRY_S)
            self._couriers = {job: courier for job, courier in self._couriers.items() if courier.is_alive()}
            self._act()

    def _idle(self) -> bool:
        """Whether nothing but a new wish can give this loop work."""
        return len(self._couriers) >= min(1, len(self._wishes))

    def _act(self) -> None:
        for wish in sorted(self._wishes, key=lambda wish: wish.id):
            if wish.id in self._couriers:
                if wish.wish == "cancelled" and wish.id not in self._cancelled:
                    self._cancel(wish.id)
            elif self._may_start(wish):
                courier = threading.Thread(target=self._carry, args=(wish,), name=f"courier-{wish.id}", daemon=True)
                self._couriers[wish.id] = courier
                courier.start()

    def _may_start(self, wish: Wish) -> bool:
        """One job at a time has the cluster; one that has a supervisor, or only needs one to end it, does not wait."""
        return not self._couriers or wish.wish == "cancelled" or _exists(wish.id)

    def _cancel(self, job: str) -> None:
        try:
            ray.get_actor(_name(job), namespace=NAMESPACE).cancel.remote()
        except ValueError:  # its courier has not started it yet, or has ended it already
            return
        self._cancelled.add(job)

    def _carry(self, wish: Wish) -> None:
        """Starts or finds the job's supervisor and brings its journal home until the job is over."""
        try:
            supervisor = self._supervisor(wish)
        except ControlPlaneDown as error:
            log.warning("job not started", job=wish.id, error=str(error))
            return  # tried again at the next look at the wishes
        last_seq = wish.last_seq
        while True:
            try:
                entries = ray.get(supervisor.entries_after.remote(last_seq, _ENTRIES_WAIT_S))
                if entries:
                    last_seq = self._plane.append(wish.id, entries)
                elif ray.get(supervisor.ended.remote()):
                    break
            except (ControlPlaneDown, ray.exceptions.RayError) as error:
                log.warning("journal not brought home", job=wish.id, error=str(error))
                time.sleep(_RETRY_S)
        ray.kill(supervisor, no_restart=True)

    def _supervisor(self, wish: Wish) -> Any:
        history = self._plane.history(wish.id) if wish.last_seq and not _exists(wish.id) else []
        actor: Any = SupervisorActor
        return actor.options(
            name=_name(wish.id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=_SUPERVISOR_RESTARTS,
            max_task_retries=-1,
            max_concurrency=8,
            scheduling_strategy=_on_the_head(),
        ).remote(wish.id, wish.spec, self._cluster_id, self._overrides, history)


@ray.remote
class ConnectorActor:
    def __init__(self, server: str, token: str, cluster_id: str, overrides: list[dict[str, Any]]) -> None:
        self._connector = Connector(server=server, token=token, cluster_id=cluster_id, overrides=overrides)
        self._connector.start()

    def alive(self) -> bool:
        return True


def start_connector(server: str, token: str, cluster_id: str, overrides: list[dict[str, Any]]) -> None:
    """On the Ray cluster that this process is connected to; replaces none that runs. Returns when it runs."""
    connector: Any = ConnectorActor
    actor = connector.options(
        name=f"connector-{cluster_id}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=_on_the_head(),
    ).remote(server, token, cluster_id, overrides)
    ray.get(actor.alive.remote())


def _on_the_head() -> Any:
    """The head is not spot, and without it there is no cluster: nothing is gained by running anywhere else. Said by its
    id, for a driver may be attached to any of several raylets of its machine."""
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD_RESOURCE in node["Resources"]]
    return NodeAffinitySchedulingStrategy(heads[0], soft=False)


def _name(job: str) -> str:
    return f"supervisor-{job}"


def _exists(job: str) -> bool:
    try:
        ray.get_actor(_name(job), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
