"""A ground of real raylets: the whole of Shoal on one machine, control plane and connector included, each raylet in a
network of its own. Blows are signals to its processes, links that are cut, bits in files, a full disk, a store that is
cut off; the journal is read over HTTP, as a user would."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import networks
import psutil
from faults import apart_cluster, worker_hook
from faults.apart_cluster import ApartShoal
from faults.disks import Disks, fill, freeze
from faults.drills import Drill, Kind
from faults.heads import kill_head, lose_head
from faults.judging import Pace
from faults.playing import ENDED, Strike, nothing
from faults.slots import spoil, written
from faults.stores import STORE, Stores
from networks import Network
from running import Running, lives
from slowing import Slowed
from waiting import eventually

from shoal.errors import Conflict, ShoalError
from shoal.local_shoal import CLUSTER_ID, LocalOptions, LocalShoal
from shoal_planner.job import JobSpec, job_to_mapping
from shoal_recovery.journal import (
    CheckpointCommitted,
    Entry,
    NodeJoined,
    NodeLost,
    NoticeEnded,
    PlanAdopted,
    entry_from_mapping,
)

CLUSTER = {
    "nodes": [
        {"name": "big", "device": "cpu-2t", "host_memory_gib": 2},
        {"name": "small", "device": "cpu-1t", "count": 4, "host_memory_gib": 2, "spot": True},
    ],
    "devices": {"cpu-2t": {"memory_gib": 0.1}, "cpu-1t": {"memory_gib": 0.008}},
}
NODES = frozenset({"big-0", *(f"small-{index}" for index in range(4))})
_HALF = (len(NODES) + 1) // 2
_AGAIN_S = 0.2
_THERE_S = 60.0
_PAUSED_S = 120.0
_END_S = 60.0


class RayGround:
    def __init__(self, folder: Path, stores: Stores) -> None:
        self._stores = stores
        self._nodes_dir = folder / "nodes" / CLUSTER_ID
        self._disks = Disks(self._nodes_dir / node for node in sorted(NODES))
        self.missing: Mapping[Kind, str] = {}
        if self._disks.missing:
            self.missing = dict.fromkeys((Kind.DISK_FULL, Kind.DISK_HUNG), self._disks.missing)
        os.environ.update(worker_hook.environment())
        self._network = self._join_network()
        here = LocalShoal if self._network is None else ApartShoal
        self._shoal = here(LocalOptions(cluster=CLUSTER, data_dir=folder, port=0))
        self._shoal.__enter__()
        self._running = Running(self._shoal, sorted(NODES))
        self._entries: list[Entry] = []
        self._gone: set[str] = set()  # nodes whose raylet is dead
        self._job_id = ""

    def close(self) -> None:
        self._running.client.close()
        self._shoal.stop()
        if self._network is not None:
            self._network.close()
        self._disks.close()

    def _join_network(self) -> Network | None:
        if why := networks.missing():
            self.missing = {**self.missing, Kind.PARTITION: why, Kind.PARTITION_STORE: why}
            return None
        network = Network((*sorted(NODES), STORE)).__enter__()
        os.environ.update(apart_cluster.environment(network, sorted(NODES), self._stores.stand_in(network)))
        return network

    # --- the job ---

    def begin(self, drill: Drill, job: JobSpec) -> str:
        eventually(lambda: {node["id"] for node in self._running.client.nodes()} >= NODES, _THERE_S)
        self._entries, self._job = [], job
        self._job_id = self._running.submit(job_to_mapping(job))
        self._over = threading.Event()
        arguments = self._job_id, self._entries, self._over
        threading.Thread(target=self._follow, args=arguments, name="follow", daemon=True).start()
        return self._job_id

    def _follow(self, job_id: str, entries: list[Entry], over: threading.Event) -> None:
        """To ask again and again would keep the control plane busy for a quarter of a core."""
        add = entries.append
        while not over.is_set():
            with contextlib.suppress(ShoalError, OSError, RuntimeError):  # RuntimeError: the ground was closed
                for event in self._running.client.events(job_id, after=len(entries), follow=True):
                    add(entry_from_mapping(_without(event, "at")))
                over.set()
            over.wait(_AGAIN_S)

    def entries(self) -> Sequence[Entry]:
        """While the control plane is down, what was known before."""
        return tuple(self._entries)

    def paces(self) -> Sequence[Pace]:
        """None: supervisors are watched from outside, and devices compute for less than they judge."""
        return ()

    def whole(self) -> bool:
        there: set[str] = set()
        for event in (entry.event for entry in self.entries()):
            if isinstance(event, NodeJoined):
                there.add(event.node)
            elif isinstance(event, NodeLost) or (isinstance(event, NoticeEnded) and event.outcome == "gone"):
                there.discard(event.node)
        return there >= NODES

    def end(self) -> None:
        self._stores.wake()
        self._stores.mend()
        client = self._running.client
        if client.get(self._job_id)["status"]["state"] not in ENDED:
            client.cancel(self._job_id)
        client.wait(self._job_id, timeout_s=_END_S)
        self._over.set()

    # --- moments ---

    def writing(self) -> object:
        return written(self._kept(node) for node in sorted(NODES))

    def uploading(self) -> bool:
        return any(self._nodes_dir.glob("*/uploads/*"))

    def _kept(self, node: str) -> Path:
        return self._shoal.memory_dir / CLUSTER_ID / node / self._job_id

    # --- blows ---

    def strike(self, kind: Kind, pick: int) -> Strike | None:
        strikes: Mapping[Kind, Callable[[int], Strike | None]] = {
            Kind.RANK: self._rank,
            Kind.AGENT: self._agent,
            Kind.NODE: functools.partial(self._nodes, 1),
            Kind.HALF: functools.partial(self._nodes, _HALF),
            Kind.AWAY: self._away,
            Kind.SUPERVISOR: functools.partial(self._process, "ray::SupervisorActor"),
            Kind.CONNECTOR: functools.partial(self._process, "ray::ConnectorActor"),
            Kind.RANK_STOPPED: functools.partial(self._stopped, ("ray::RankActor",)),
            Kind.AGENT_STOPPED: functools.partial(self._stopped, ("ray::AgentActor",)),
            Kind.NODE_STOPPED: functools.partial(self._stopped, ("ray::AgentActor", "ray::RankActor")),
            Kind.PARTITION: functools.partial(self._partition, False),
            Kind.PARTITION_STORE: functools.partial(self._partition, True),
            Kind.VANISHED: self._vanished,
            Kind.STRAGGLER: self._straggler,
            Kind.NOTICE: self._notice,
            Kind.DRAINED: self._drained,
            Kind.DISK_FULL: functools.partial(self._disk, fill),
            Kind.DISK_HUNG: functools.partial(self._disk, freeze),
            Kind.STORE_CUT: functools.partial(self._store, self._stores.cut, self._stores.mend),
            Kind.STORE_HUNG: functools.partial(self._store, self._stores.hang, self._stores.wake),
            Kind.STORE_SLOW: functools.partial(self._store, self._stores.slow, self._stores.mend),
            Kind.PAUSED: self._paused,
            Kind.MEMORY_SPOILT: self._memory_spoilt,
            Kind.OBJECT_SPOILT: functools.partial(self._checkpoint_spoilt, self._stores.spoil_newest),
            Kind.MANIFEST_SPOILT: functools.partial(self._checkpoint_spoilt, self._stores.spoil_manifest),
            Kind.RAYLET: self._raylet,
            Kind.CONTROL_PLANE: self._control_plane,
            Kind.GCS: self._head,
            Kind.HEAD_LOST: self._head_lost,
        }
        return strikes[kind](pick)

    def _computing(self) -> list[str]:
        adopted = [entry.event for entry in self.entries() if isinstance(entry.event, PlanAdopted)]
        pipelines = adopted[-1].plan["pipelines"] if adopted else []
        replicas = (part for pipeline in pipelines for stage in pipeline["stages"] for part in stage["replicas"])
        return sorted({replica["node"] for replica in replicas})

    def _picked(self, pick: int) -> str | None:
        """A node that computes and is there."""
        computing = [node for node in self._computing() if node not in self._gone]
        return computing[pick % len(computing)] if computing else None

    def _several(self, count: int, pick: int) -> tuple[str, ...]:
        """One that computes, and those after it."""
        there, first = sorted(NODES - self._gone), self._picked(pick)
        begin = 0 if first is None else there.index(first)
        return () if first is None else tuple((there[begin:] + there[:begin])[:count])

    def _of_node(self, titles: Iterable[str], node: str) -> list[psutil.Process]:
        there = self._shoal.pids(node)["all"]
        found = (self._running.processes(title) for title in titles)
        return [process for each in found for pid, process in each.items() if pid in there]

    def _all_of(self, node: str) -> list[psutil.Process]:
        """The raylet first, or it would start others meanwhile."""
        found = []
        for pid in self._shoal.pids(node)["all"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def _of_picked(self, titles: Iterable[str], pick: int) -> tuple[str, list[psutil.Process]] | None:
        """A node that computes, where such processes run."""
        node = self._picked(pick)
        found = [] if node is None else self._of_node(titles, node)
        return None if node is None or not found else (node, found)

    def _rank(self, pick: int) -> Strike | None:
        struck = self._of_picked(("ray::RankActor",), pick)
        if struck is None:
            return None
        _each(struck[1], psutil.Process.kill)
        return Strike(nodes=(struck[0],), out=(), heal=nothing)

    def _agent(self, pick: int) -> Strike | None:
        struck = self._of_picked(("ray::AgentActor",), pick)
        if struck is None:
            return None
        _each(struck[1], psutil.Process.kill)
        return Strike(nodes=(struck[0],), out=(struck[0],), heal=nothing)

    def _process(self, title: str, pick: int) -> Strike | None:
        found = self._running.processes(title)
        _each(found.values(), psutil.Process.kill)
        return Strike(nodes=(), out=(), heal=nothing) if found else None

    def _nodes(self, count: int, pick: int) -> Strike | None:
        names = self._several(count, pick)
        if not names:
            return None
        self._kill(names)
        return Strike(nodes=names, out=names, heal=functools.partial(self._add, names))

    def _away(self, pick: int) -> Strike | None:
        names = self._several(_HALF, pick)
        if not names:
            return None
        _each((process for name in names for process in self._all_of(name)), psutil.Process.kill)
        self._gone.update(names)
        return Strike(nodes=names, out=names, heal=functools.partial(self._add, names))

    def _kill(self, names: tuple[str, ...]) -> None:
        """With what they kept."""
        self._shoal.kill(*names)
        self._gone.update(names)

    def _add(self, names: tuple[str, ...]) -> None:
        """Those that are not there again, in a new cluster."""
        for name in names:
            if name in self._gone:
                self._shoal.add(name)
                self._gone.discard(name)

    def _stopped(self, titles: tuple[str, ...], pick: int) -> Strike | None:
        struck = self._of_picked(titles, pick)
        if struck is None:
            return None
        node, stopped = struck
        _each(stopped, psutil.Process.suspend)
        out = (node,) if "ray::AgentActor" in titles else ()
        return Strike(nodes=(node,), out=out, heal=functools.partial(_each, stopped, psutil.Process.resume))

    def _vanished(self, pick: int) -> Strike | None:
        """Its kernel keeps connections open, and nobody there says a word."""
        node = self._picked(pick)
        if node is None:
            return None
        _each(self._all_of(node), psutil.Process.suspend)
        return Strike(nodes=(node,), out=(node,), heal=functools.partial(self._replace, node))

    def _partition(self, with_store: bool, pick: int) -> Strike | None:
        """It lasts until Ray has given the nodes up. A raylet ends once it hears of that, and is then started again, as
        units and pods are."""
        assert self._network is not None
        names, network = self._several(_HALF, pick), self._network
        if not names:
            return None
        flags = [self._running.raylet_flags(name) for name in names]
        raylets = [psutil.Process(self._shoal.pids(name)["raylet"]) for name in names]
        if with_store:
            network.part_beside(STORE, *names)
        else:
            network.part(*names)

        def heal() -> None:
            eventually(lambda: not any(self._running.alive(flags)), _THERE_S)
            network.mend(*names)
            eventually(lambda: not any(map(lives, raylets)), _THERE_S)
            self._gone.update(names)
            self._add(names)

        return Strike(nodes=names, out=names, heal=heal)

    def _straggler(self, pick: int) -> Strike | None:
        struck = self._of_picked(("ray::RankActor",), pick)
        if struck is None:
            return None
        slowing = Slowed((process.pid for process in struck[1]), 2.0 + pick % 4)
        return Strike(nodes=(struck[0],), out=(), heal=slowing.end, lasts=True)

    def _notice(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        if node is None:
            return None

        def told() -> bool:
            try:
                self._running.client.preempt(node, notice_s=60)
            except Conflict:  # the connector died and is not back yet
                return False
            return True

        eventually(told, _THERE_S)
        return Strike(nodes=(node,), out=(node,), heal=functools.partial(self._replace, node))

    def _drained(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        if node is None:
            return None
        self._running.drain(node, 60.0)
        return Strike(nodes=(node,), out=(node,), heal=functools.partial(self._replace, node))

    def _replace(self, node: str) -> None:
        if node not in self._gone:
            self._kill((node,))
        self._add((node,))

    def _disk(self, harm: Callable[[Path], Callable[[], None]], pick: int) -> Strike | None:
        node = self._picked(pick)
        if node is None:
            return None
        return Strike(nodes=(node,), out=(), heal=harm(self._nodes_dir / node), lasts=True)

    def _store(self, harm: Callable[[], None], heal: Callable[[], None], pick: int) -> Strike:
        harm()
        return Strike(nodes=(), out=(), heal=heal, lasts=True)

    def _raylet(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        if node is None:
            return None
        psutil.Process(self._shoal.pids(node)["raylet"]).kill()
        self._gone.add(node)
        return Strike(nodes=(node,), out=(node,), heal=functools.partial(self._add, (node,)))

    def _paused(self, pick: int) -> Strike:
        """What nodes keep of it then is no matter: it stands in the store."""
        client = self._running.client
        client.pause(self._job_id)

        def heal() -> None:
            over = ("paused", *ENDED)
            eventually(lambda: client.get(self._job_id)["status"]["state"] in over, _PAUSED_S)
            with contextlib.suppress(ShoalError):  # it may have ended before
                client.resume(self._job_id)

        return Strike(nodes=(), out=tuple(sorted(NODES)), heal=heal)

    def _memory_spoilt(self, pick: int) -> Strike | None:
        struck = self._of_picked(("ray::RankActor",), pick)
        if struck is None:
            return None
        node, ranks = struck
        _each(ranks, psutil.Process.kill)
        spoil(self._kept(node), pick)
        return Strike(nodes=(node,), out=(node,), heal=nothing)

    def _checkpoint_spoilt(self, spoil: Callable[[str, str], None], pick: int) -> Strike | None:
        assert self._job.checkpoint.uri is not None
        spoil(self._job.checkpoint.uri, self._job_id)
        return self._nodes(_HALF, pick)

    def _head(self, pick: int) -> Strike:
        """Steps go on meanwhile. No node can be added before it is back."""
        heal = kill_head(self._running, min(NODES - self._gone))
        return Strike(nodes=(), out=(), heal=heal, lasts=True)

    def _head_lost(self, pick: int) -> Strike:
        """Where the store has a step, every other one takes along what all nodes keep in memory."""
        stored = any(isinstance(entry.event, CheckpointCommitted) for entry in self.entries())
        out = tuple(sorted(NODES)) if stored and pick % 2 else ()
        renew = lose_head(self._running, with_memory=bool(out))

        def heal() -> None:
            renew()
            self._gone.clear()

        return Strike(nodes=out, out=out, heal=heal)

    def _control_plane(self, pick: int) -> Strike:
        psutil.Process(self._shoal.server_pid).kill()
        return Strike(nodes=(), out=(), heal=self._shoal.start_server)


def _each(processes: Iterable[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            do(process)


def _without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}
