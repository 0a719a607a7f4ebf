"""The connector: offers one Ray cluster to one control plane, starts a supervisor for each job that is wanted there,
and brings their journals home. It holds nothing that cannot be asked for again, so it may die and come back any time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import structlog
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal_planner.cluster import snapshot_to_mapping
from shoal_planner.profile import profile_from_mapping, profile_to_mapping
from shoal_planner.script_spec import ScriptSpec, parse_any_job
from shoal_workers.cluster_key import join_cluster
from shoal_workers.cluster_profile import ClusterProfile
from shoal_workers.cluster_ray import NAMESPACE, Draining, Figures, RayCluster, connector_name, silences_s
from shoal_workers.control_plane import ControlPlane, ControlPlaneDown, Drill, JobElsewhere, LeaseRefused, Wish
from shoal_workers.herald import Herald
from shoal_workers.log_courier import LogCourier
from shoal_workers.looking import Looker
from shoal_workers.messages import GiveNotice, Retire
from shoal_workers.nodes import NodeUnreachable
from shoal_workers.pools import provisioner_of
from shoal_workers.provisioner import Member
from shoal_workers.roster import ask
from shoal_workers.script_ray import RayScripts
from shoal_workers.signs import Signs
from shoal_workers.supervisor_actor import SupervisorActor
from shoal_workers.unanswered import Patience, Unanswered
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()

_LEASE_S = 15.0
_RENEW_S = 2.0
_LONG_POLL_S = 10.0
_ENTRIES_WAIT_S = 0.5
_RETRY_S = 0.5
_ANSWER_S = 5.0
_DRAINS_S = 1.0
_STRAYS_S = 5.0
_LOGS_S = 1.0
_SUPERVISOR_RESTARTS = 50
_SUPERVISOR = "supervisor-"
_HEAD_RESOURCE = "node:__internal_head__"
PoolsGiven = dict[str, Any] | None


class Connector:
    """Runs in threads until the process ends."""

    def __init__(self, *, server: str, token: str, cluster_id: str, figures: Figures, pools: PoolsGiven = None) -> None:
        self._cluster_id = cluster_id
        self._figures = figures
        self._cluster = RayCluster(cluster_id, figures)
        self._plane = ControlPlane(server, token, cluster_id, holder=uuid.uuid4().hex)
        self._version = -1
        self._wishes: tuple[Wish, ...] = ()
        self._couriers: dict[str, threading.Thread] = {}
        self._told_to_rest: set[str] = set()
        self._next_strays_s = 0.0
        self._told_of_code: dict[str, str] = {}
        self._profile = ClusterProfile()
        self._herald = Herald(self._cluster)
        self._logs = LogCourier(self._cluster, self._plane, lambda: bool(self._wishes))
        self._signs = Signs(lambda jobs: silences_s({job: _name(job) for job in jobs}))
        self._provisioner = provisioner_of(pools, self._cluster, self._give_back)

    def start(self) -> None:
        threading.Thread(target=self._guarded, args=(self._offer,), name="offer", daemon=True).start()
        threading.Thread(target=self._guarded, args=(self._serve,), name="wishes", daemon=True).start()
        threading.Thread(target=self._guarded, args=(self._watch_drains,), name="drains", daemon=True).start()
        threading.Thread(target=self._guarded, args=(self._find_logs,), name="log-nodes", daemon=True).start()
        threading.Thread(target=self._guarded, args=(self._logs.bring,), name="logs", daemon=True).start()
        if self._provisioner is not None:
            run = self._provisioner.run
            threading.Thread(target=self._guarded, args=(run,), name="pools", daemon=True).start()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception:
            # A defect of ours, or an answer nobody foresaw. A connector without one of its loops would look alive and
            # do nothing; a fresh one asks for all that it needs.
            log.exception("connector failed")
            os._exit(1)

    def _offer(self) -> None:
        known = False
        while True:
            try:
                if not known:  # or what the connector before this one had learnt would be lost
                    self._profile.learn_older(profile_from_mapping(self._plane.profile()))
                    known = True
                snapshot = self._cluster.snapshot()  # before pools are told of: these may know of more nodes
                profile = profile_to_mapping(self._profile.on(snapshot.nodes))
                head = self._cluster.head_is_fault_tolerant()
                pools = None if self._provisioner is None else self._provisioner.report()
                told = snapshot_to_mapping(snapshot)
                signs = self._signs.look((node.id for node in snapshot.nodes), tuple(self._couriers))
                self._plane.offer(told, profile, _LEASE_S, fault_tolerant_head=head, pools=pools, signs=signs)
            except (ControlPlaneDown, LeaseRefused) as error:
                log.warning("cluster not offered", error=str(error))
            time.sleep(_RENEW_S)

    def _serve(self) -> None:
        while True:
            try:
                wishes = self._plane.wishes(self._version, _LONG_POLL_S if self._idle() else 0.5)
            except ControlPlaneDown as error:
                log.warning("no wishes", error=str(error))
                time.sleep(_RETRY_S)
                continue
            self._version, self._wishes = wishes.version, wishes.jobs
            if self._provisioner is not None and wishes.pools is not None:
                self._provisioner.told(wishes.pools)
            for drill in wishes.drills:
                self._herald.pass_on(drill.node, _notice_of(drill))
            try:
                self._end_strays()
                self._couriers = {job: courier for job, courier in self._couriers.items() if courier.is_alive()}
                for wish in sorted(self._wishes, key=lambda wish: wish.id):
                    self._act(wish)
            except ray.exceptions.RayError as error:  # the head is away, for a while perhaps
                log.warning("not known who is there", error=str(error))

    def _end_strays(self) -> None:
        """Supervisors of jobs that are this cluster's no more: given to another while nobody heard of this one. Where
        the control plane does not answer nothing is ended."""
        if time.monotonic() < self._next_strays_s:
            return
        self._next_strays_s = time.monotonic() + _STRAYS_S
        expected = {wish.id for wish in self._wishes} | self._couriers.keys()
        try:
            strays = [job for job in _supervised() if job not in expected and not self._plane.wants(job)]
        except ControlPlaneDown as error:
            log.warning("not known what else is wanted here", error=str(error))
            return
        for job in strays:
            self._dismiss(job)

    def _dismiss(self, job: str) -> None:
        log.warning("job is not wanted here any more", job=job)
        with contextlib.suppress(ValueError):  # it ended meanwhile
            ray.kill(ray.get_actor(_name(job), namespace=NAMESPACE), no_restart=True)
        self._cluster.end_ranks(job)
        RayScripts(job).end(gently=False)
        for seen in self._cluster.nodes():
            with contextlib.suppress(NodeUnreachable, ConnectionClosed):  # its snapshots are nobody's, and do no harm
                ask(self._cluster.agent(seen), Retire(job=job, before_epoch=None), _ANSWER_S)

    def _watch_drains(self) -> None:
        while True:
            for draining in self._cluster.draining():
                self._herald.pass_on(draining.incarnation, _notice_of_drain(draining))
            time.sleep(_DRAINS_S)

    def _give_back(self, member: Member, left_s: float) -> None:
        name = f"release {member.incarnation}"
        notice = GiveNotice(source="release", name=name, why="no plan uses it", lead_s=left_s)
        self._herald.pass_on(member.incarnation, notice)

    def _find_logs(self) -> None:
        while True:
            try:
                self._logs.look()
            except ray.exceptions.RayError as error:  # the head is away, for a while perhaps
                log.warning("not known who prints", error=str(error))
            time.sleep(_LOGS_S)

    def _idle(self) -> bool:
        """Whether nothing but a new wish can give this loop work."""
        wished = {wish.id for wish in self._wishes}
        if any(wish.wish != "run" for wish in self._wishes) or self._told_to_rest & wished:
            return False
        # A courier that nobody wishes for is about to end, and may make room for another one.
        if any(wish.share is None for wish in self._wishes):  # one job at a time
            served = bool(self._couriers)
        else:
            served = {wish.id for wish in self._wishes if wish.has_nodes} <= self._couriers.keys()
        return served and self._couriers.keys() <= wished

    def _act(self, wish: Wish) -> None:
        if wish.id not in self._couriers and self._may_start(wish):
            courier = threading.Thread(
                target=self._guarded, args=(partial(self._carry, wish),), name=f"courier-{wish.id}", daemon=True
            )
            self._told_to_rest.discard(wish.id)
            self._couriers[wish.id] = courier
            courier.start()
        elif wish.wish != "run" or wish.id in self._told_to_rest or wish.share is not None:
            with contextlib.suppress(ValueError):  # its courier has not started it yet, or has ended it already
                self._tell(ray.get_actor(_name(wish.id), namespace=NAMESPACE), wish)
        if wish.saves:  # said again, as a supervisor may die before it obeys; it knows which it has obeyed
            with contextlib.suppress(ValueError):
                ray.get_actor(_name(wish.id), namespace=NAMESPACE).checkpoint.remote(wish.saves)

    def _tell(self, supervisor: Any, wish: Wish) -> None:
        """Said again until the job is over or rests: a supervisor may die before it obeys. One that rests already does
        not hear that the job is to go on; when it has ended, another one is started."""
        if wish.share is not None:
            supervisor.share.remote(*_share(wish))
        if wish.wish == "cancelled":
            supervisor.cancel.remote()
            return
        if wish.wish == "run" and wish.id not in self._told_to_rest:
            return
        self._told_to_rest.add(wish.id)
        heard = supervisor.pause.remote(wish.wish == "paused", *(wish.why or ()))
        with contextlib.suppress(ray.exceptions.RayError):
            if wish.wish == "run" and ray.get(heard, timeout=_ANSWER_S):
                self._told_to_rest.discard(wish.id)

    def _may_start(self, wish: Wish) -> bool:
        """A job with nodes of its own; one that has a supervisor, or only needs one to end it, does not wait. Where
        nobody shares the cluster out, one job at a time has it."""
        if wish.share is None and self._couriers:
            return wish.wish == "cancelled" or _exists(wish.id)
        return wish.has_nodes or wish.wish == "cancelled" or _exists(wish.id)

    def _carry(self, wish: Wish) -> None:
        """Starts or finds the job's supervisor and brings its journal home until the job is over."""
        patience = Patience()
        try:
            if (prepared := self._prepared(wish)) is None:
                return
            wish, last_seq = prepared, prepared.last_seq
            supervisor = self._supervisor(wish, last_seq)
            while True:
                try:
                    entries = patience.wait(supervisor.entries_after.remote(last_seq, _ENTRIES_WAIT_S))
                    if entries:
                        self._profile.learn(entries)
                        last_seq = self._plane.append(wish.id, entries)
                    elif patience.wait(supervisor.ended.remote()):
                        break
                    elif (known := patience.wait(supervisor.last_seq.remote())) is not None and known < last_seq:
                        # It was restarted and found no journal: the nodes that kept it are gone, too.
                        log.warning("supervisor lacks its history", job=wish.id, known=known, last_seq=last_seq)
                        ray.kill(supervisor, no_restart=True)
                        return
                    elif all(each.id != wish.id for each in self._wishes):
                        self._plane.append(wish.id, [])  # asks whose the job is: one with no news is never told else
                except Unanswered as error:
                    anew = patience.give_up(supervisor)  # ranks do not wait for ever; a new one reads the journal
                    log.warning("supervisor does not answer", job=wish.id, why=str(error), anew=anew)
                except (ControlPlaneDown, ray.exceptions.ActorUnavailableError) as error:
                    log.warning("journal not brought home", job=wish.id, error=str(error))
                    time.sleep(_RETRY_S)
        except JobElsewhere as error:
            log.warning("job is not this cluster's any more", job=wish.id, why=str(error))
            self._dismiss(wish.id)
            return
        except (ControlPlaneDown, ray.exceptions.RayError) as error:
            # Whether it could not be started or died for good: the next look at the wishes starts it again.
            log.warning("supervisor lost", job=wish.id, error=str(error))
            return
        ray.kill(supervisor, no_restart=True)

    def _prepared(self, wish: Wish) -> Wish | None:
        """With a model that somebody has looked at, and code that can be sent; None where there is nothing to start.
        Raises ControlPlaneDown, JobElsewhere."""
        job = parse_any_job(wish.spec)
        if isinstance(job, ScriptSpec) or job.model.module is None or _exists(wish.id):
            return wish
        looker = Looker(self._plane, self._cluster, lambda: self._is_wished(wish.id), self._told_of_code)
        if wish.wish == "cancelled":
            if job.model.is_known:
                return wish
            looker.cancel(wish)
            return None
        return looker.prepared(wish, job)

    def _is_wished(self, job: str) -> bool:
        return any(wish.id == job and wish.wish == "run" for wish in self._wishes)

    def _supervisor(self, wish: Wish, last_seq: int) -> Any:
        history = self._plane.history(wish.id) if last_seq and not _exists(wish.id) else []
        share = None if wish.share is None else _share(wish)
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
        ).remote(wish.id, wish.spec, self._cluster_id, self._figures, history, wish.wish == "paused", share)


@ray.remote
class ConnectorActor:
    def __init__(self, server: str, token: str, cluster_id: str, figures: Figures, pools: PoolsGiven = None) -> None:
        join_cluster()
        self._pools = pools
        self._connector = Connector(server=server, token=token, cluster_id=cluster_id, figures=figures, pools=pools)
        self._connector.start()

    def alive(self) -> bool:
        return True

    def pools(self) -> PoolsGiven:
        """As they were given to begin with; the file that they come from may say more by now."""
        return self._pools


def start_connector(
    server: str,
    token: str,
    cluster_id: str,
    figures: Figures,
    pools: PoolsGiven = None,
    *,
    timeout_s: float | None = None,
) -> None:
    """On the Ray cluster that this process is connected to; replaces none that runs. Returns when it runs. `pools` as
    `pools_given` reads them here; without, the connector reads its own environment. Raises RayError where it does not
    run within `timeout_s`."""
    connector: Any = ConnectorActor
    actor = connector.options(
        name=connector_name(cluster_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=_on_the_head(),
    ).remote(server, token, cluster_id, figures, pools)
    ray.get(actor.alive.remote(), timeout=timeout_s)


def _on_the_head() -> Any:
    """The head is not spot, and without it there is no cluster: nothing is gained by running anywhere else. Said by its
    id, for a driver may be attached to any of several raylets of its machine."""
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD_RESOURCE in node["Resources"]]
    return NodeAffinitySchedulingStrategy(heads[0], soft=False)


def _notice_of(drill: Drill) -> GiveNotice:
    return GiveNotice(source="drill", name=drill.id, why="asked for by a user", lead_s=drill.left_s)


def _notice_of_drain(draining: Draining) -> GiveNotice:
    """A node is drained once: Ray takes no such order back."""
    name = f"drain {draining.incarnation}"
    return GiveNotice(source="ray", name=name, why="its node is being drained", lead_s=draining.left_s)


def _share(wish: Wish) -> tuple[int, list[str] | None, str]:
    """As a supervisor is told it."""
    assert wish.share is not None
    nodes = wish.share.nodes
    return wish.share.version, None if nodes is None else list(nodes), wish.share.reason


def _name(job: str) -> str:
    return f"{_SUPERVISOR}{job}"


def _supervised() -> list[str]:
    """The jobs that have a supervisor."""
    named = (
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE
    )
    return sorted(name.removeprefix(_SUPERVISOR) for name in named if name.startswith(_SUPERVISOR))


def _exists(job: str) -> bool:
    try:
        ray.get_actor(_name(job), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
