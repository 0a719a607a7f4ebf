"""A ground of real raylets: the whole of Shoal on one machine, control plane and connector included. Blows are signals
to its processes; the journal is read over HTTP, as a user would."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from faults.drills import Drill, Kind
from faults.playing import Strike
from faults.stores import Stores
from running import Running

from shoal.errors import ShoalError
from shoal.local_shoal import CLUSTER_ID, LocalOptions, LocalShoal
from shoal_planner.job import JobSpec, job_to_mapping
from shoal_recovery.journal import Entry, NodeJoined, NodeLost, NoticeEnded, PlanAdopted, entry_from_mapping

CLUSTER = {
    "nodes": [
        {"name": "big", "device": "cpu-2t", "host_memory_gib": 2},
        {"name": "small", "device": "cpu-1t", "count": 4, "host_memory_gib": 2, "spot": True},
    ],
    "devices": {"cpu-2t": {"memory_gib": 0.1}, "cpu-1t": {"memory_gib": 0.008}},
}
NODES = frozenset({"big-0", *(f"small-{index}" for index in range(4))})
_LOOK_S = 0.05
_END_S = 60.0


def _nothing() -> None:
    pass


class RayGround:
    def __init__(self, folder: Path, stores: Stores) -> None:
        self._stores = stores
        self.missing: Mapping[Kind, str] = {}
        self._shoal = LocalShoal(LocalOptions(cluster=CLUSTER, data_dir=folder, port=0))
        self._shoal.__enter__()
        self._running = Running(self._shoal, sorted(NODES))
        self._entries: list[Entry] = []
        self._looked_s = 0.0
        self._job_id = ""

    def close(self) -> None:
        self._running.client.close()
        self._shoal.stop()

    # --- the job ---

    def begin(self, drill: Drill, job: JobSpec) -> None:
        self._entries = []
        self._job_id = self._running.submit(job_to_mapping(job))

    def entries(self) -> Sequence[Entry]:
        """While the control plane is down, what was known before."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            with contextlib.suppress(ShoalError, OSError):
                for event in self._running.client.events(self._job_id, after=len(self._entries)):
                    self._entries.append(entry_from_mapping(_without(event, "at")))
        return self._entries

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
        if client.get(self._job_id)["status"]["state"] not in ("succeeded", "failed", "cancelled"):
            client.cancel(self._job_id)
        client.wait(self._job_id, timeout_s=_END_S)

    # --- moments ---

    def writing(self) -> object:
        found = []
        for path in sorted(self._shoal.memory_dir.glob(f"{CLUSTER_ID}/*/{self._job_id}/*.seal?")):
            with contextlib.suppress(FileNotFoundError):
                found.append((path, path.stat().st_mtime_ns))
        return found

    def uploading(self) -> bool:
        return any((self._shoal.data_dir / "nodes" / CLUSTER_ID).glob("*/uploads/*.task"))

    # --- blows ---

    def strike(self, kind: Kind, pick: int) -> Strike | None:
        strikes: Mapping[Kind, Callable[[int], Strike | None]] = {
            Kind.RANK: functools.partial(self._process_of_node, "ray::RankActor", ()),
            Kind.AGENT: self._agent,
            Kind.NODE: functools.partial(self._nodes, 1),
            Kind.HALF: functools.partial(self._nodes, (len(NODES) + 1) // 2),
            Kind.SUPERVISOR: functools.partial(self._process, "ray::SupervisorActor"),
            Kind.CONNECTOR: functools.partial(self._process, "ray::ConnectorActor"),
            Kind.RANK_STOPPED: self._rank_stopped,
            Kind.NOTICE: self._notice,
            Kind.DRAINED: self._drained,
            Kind.STORE_CUT: self._store_cut,
            Kind.RAYLET: self._raylet,
            Kind.CONTROL_PLANE: self._control_plane,
            Kind.GCS: self._head,
        }
        return strikes[kind](pick)

    def _computing(self) -> list[str]:
        adopted = [entry.event for entry in self.entries() if isinstance(entry.event, PlanAdopted)]
        pipelines = adopted[-1].plan["pipelines"] if adopted else []
        replicas = (part for pipeline in pipelines for stage in pipeline["stages"] for part in stage["replicas"])
        return sorted({replica["node"] for replica in replicas})

    def _picked(self, pick: int) -> str | None:
        computing = self._computing()
        return computing[pick % len(computing)] if computing else None

    def _of_node(self, title: str, node: str) -> psutil.Process | None:
        raylet = self._shoal.pids(node)["raylet"]
        for process in self._running.processes(title).values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() == raylet:
                    return process
        return None

    def _process_of_node(self, title: str, out: tuple[str, ...], pick: int) -> Strike | None:
        node = self._picked(pick)
        process = None if node is None else self._of_node(title, node)
        if node is None or process is None:
            return None
        process.kill()
        return Strike(nodes=(node,), out=out, heal=_nothing)

    def _agent(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        return None if node is None else self._process_of_node("ray::AgentActor", (node,), pick)

    def _process(self, title: str, pick: int) -> Strike | None:
        found = self._running.processes(title)
        for process in found.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return Strike(nodes=(), out=(), heal=_nothing) if found else None

    def _nodes(self, count: int, pick: int) -> Strike | None:
        first = self._picked(pick)
        if first is None:
            return None
        there = sorted(NODES)
        begin = there.index(first)
        names = tuple((there[begin:] + there[:begin])[:count])
        self._shoal.kill(*names)
        return Strike(nodes=names, out=names, heal=functools.partial(self._add, names))

    def _add(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._shoal.add(name)

    def _rank_stopped(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        process = None if node is None else self._of_node("ray::RankActor", node)
        if node is None or process is None:
            return None
        process.suspend()

        def heal() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

        return Strike(nodes=(node,), out=(), heal=heal)

    def _notice(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        if node is None:
            return None
        self._running.client.preempt(node, notice_s=60)
        return Strike(nodes=(node,), out=(node,), heal=functools.partial(self._replace, node))

    def _drained(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        if node is None:
            return None
        self._running.drain(node, 60.0)
        return Strike(nodes=(node,), out=(node,), heal=functools.partial(self._replace, node))

    def _replace(self, node: str) -> None:
        self._shoal.kill(node)
        self._shoal.add(node)

    def _store_cut(self, pick: int) -> Strike:
        self._stores.cut()
        return Strike(nodes=(), out=(), heal=self._stores.mend, lasts=True)

    def _raylet(self, pick: int) -> Strike | None:
        node = self._picked(pick)
        if node is None:
            return None
        psutil.Process(self._shoal.pids(node)["raylet"]).kill()
        return Strike(nodes=(node,), out=(node,), heal=functools.partial(self._add, (node,)))

    def _head(self, pick: int) -> Strike:
        """It comes back by itself, with all that it knew; steps go on meanwhile."""
        for process in psutil.Process(self._shoal.cluster_pid).children():
            if "gcs_server" in process.name():
                process.kill()
        return Strike(nodes=(), out=(), heal=_nothing, lasts=True)

    def _control_plane(self, pick: int) -> Strike:
        psutil.Process(self._shoal.server_pid).kill()
        return Strike(nodes=(), out=(), heal=self._shoal.start_server)


def _without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}
