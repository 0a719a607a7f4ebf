"""A cluster without Ray: every agent and every rank is a process of its own, with the folders and ports of its node.

Processes are forked from a server that has imported torch once, so they start in milliseconds. They are killed,
stopped and brought back by their process ids, as real ones are.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from forking import forking
from networks import Network, enter

from shoal_planner.cluster import GIB, ClusterSnapshot, DeviceOverride, Node
from shoal_recovery.store import open_store
from shoal_recovery.tenure import Life
from shoal_workers import messages as m
from shoal_workers.agent import Agent
from shoal_workers.allocator import keep_memory, keep_modules
from shoal_workers.lifeline import Lifeline
from shoal_workers.log_output import LOGS, LogFile, Output
from shoal_workers.nodes import NodeSeen, NodeUnreachable
from shoal_workers.rank import Rank
from shoal_workers.roster import ask
from shoal_workers.settings import WorkerSettings

HOST = "127.0.0.1"
LIFE = Life(cluster="here", incarnation="1")
_START_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1
_AGENT = ("", -1)  # (job, device) of an agent, where a rank has its own

SETTINGS = WorkerSettings(
    bind_host=HOST,
    advertise_host=HOST,
    heartbeat_s=0.05,
    silence_s=4.0,  # the machine is shared: a process that merely waits for its turn must not count as dead
    silence_confirmed_s=2.0,
    group_timeout_s=20.0,
    reply_timeout_s=10.0,
    link_limit_s=0.0,  # links as `_node` has them, or a tiny model would be trained by one device alone
)


@dataclass(slots=True)
class _Running:
    process: multiprocessing.process.BaseProcess
    port: int

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@dataclass(slots=True)
class _NodeState:
    node: Node
    lives: int = 1
    up: bool = True
    running: dict[tuple[str, int], _Running] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return f"{self.node.id}#{self.lives}"


class ProcessCluster:
    """A `shoal_workers.nodes.Cluster`. `shapes` gives each node its device type and how many devices it has;
    `environment` is added to that of its processes. In a `network` each node has an address of its own."""

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[str, int]],
        overrides: tuple[DeviceOverride, ...] = (),
        environment: Mapping[str, str] | None = None,
        *,
        network: Network | None = None,
        settings: WorkerSettings = SETTINGS,
        host_memory_bytes: int = 4 * GIB,
    ) -> None:
        self._folder = folder
        self._environment = dict(environment or {})
        self._network = network
        self._settings = settings
        self._overrides = overrides
        self._states = {name: _NodeState(_node(name, *shape, host_memory_bytes)) for name, shape in shapes.items()}
        self._lock = threading.RLock()
        self._epochs: dict[str, int] = {}
        self._meant: dict[str, str] = {}
        self._notices = itertools.count()
        self._context = forking()

    # --- what a supervisor asks ---

    def life(self) -> Life:
        return Life(cluster=self._folder.name, incarnation=str(id(self)))

    def nodes(self) -> tuple[NodeSeen, ...]:
        with self._lock:
            return tuple(
                NodeSeen(node=state.node, incarnation=state.incarnation)
                for _, state in sorted(self._states.items())
                if state.up
            )

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(nodes=tuple(seen.node for seen in self.nodes()), overrides=self._overrides)

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        return self._address(seen, _AGENT)

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        return self._address(seen, (job, index))

    def end_ranks(self, job: str, nodes: frozenset[str] | None = None) -> None:
        with self._lock:
            for state in [state for name, state in self._states.items() if nodes is None or name in nodes]:
                for key in [key for key in state.running if key[0] == job]:
                    _kill(state.running.pop(key))

    def claim_epoch(self, job: str, at_least: int) -> int:
        with self._lock:
            claimed = self._epochs[job] = max(at_least, self._epochs.get(job, 0) + 1)
            return claimed

    def first_meant(self, notice: str, incarnation: str) -> str:
        return self._meant.setdefault(notice, incarnation)

    # --- what happens to it ---

    def forget_epochs(self, job: str, claimed: int = 0) -> None:
        """As a head that was lost does; or somebody claims epochs up to this one."""
        with self._lock:
            self._epochs[job] = claimed

    def pids(self, job: str) -> dict[tuple[str, int], int]:
        """The rank processes of the job that live, by node and device."""
        with self._lock:
            return {
                (name, key[1]): running.pid
                for name, state in self._states.items()
                for key, running in state.running.items()
                if key[0] == job and running.process.is_alive()
            }

    def addresses(self, job: str) -> list[tuple[str, int]]:
        """Of the rank processes of the job."""
        with self._lock:
            running = [(name, each) for name, state in self._states.items() for each in state.running.items()]
            return [(self._host(name), rank.port) for name, (key, rank) in running if key[0] == job]

    def agent_pid(self, name: str) -> int:
        with self._lock:
            return self._states[name].running[_AGENT].pid

    def notice(self, name: str, lead_s: float) -> None:
        """As whoever owns the machine gives it."""
        with self._lock:
            address = self._host(name), self._states[name].running[_AGENT].port
            given = f"{name} {next(self._notices)}"
        ask(address, m.GiveNotice(source="test", name=given, why="the machine is wanted back", lead_s=lead_s), 10.0)

    def ranks(self, name: str, job: str) -> list[int]:
        """Which devices of this node have a rank process of this job."""
        with self._lock:
            return sorted(index for owner, index in self._states[name].running if owner == job)

    def kill_rank(self, job: str, name: str, index: int = 0, by: signal.Signals = signal.SIGKILL) -> None:
        with self._lock:
            running = self._states[name].running[job, index]
            if running.process.is_alive():  # or its number may be another's
                os.kill(running.pid, by)
            running.process.join()

    def kill_agent(self, name: str) -> None:
        with self._lock:
            _kill(self._states[name].running[_AGENT])

    def kill_node(self, *names: str, wipe: bool = True) -> None:
        """As machines that vanish together: all their processes at once and, with `wipe`, what stood in their
        folders."""
        with self._lock:
            states = [self._states[name] for name in names]
            running = [each for state in states for each in state.running.values()]
            for each in running:
                each.process.kill()  # which does nothing to one that has died, and whose number another may have
            for state in states:
                state.up = False
                state.running.clear()
            for each in running:
                each.process.join()
        for name in names if wipe else ():
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def bring_back(self, name: str) -> None:
        with self._lock:
            state = self._states[name]
            if not state.up:
                state.lives += 1
                state.up = True

    def memory_of(self, name: str) -> Path:
        """Where the agent of this node keeps snapshots."""
        return self._folder / name / "memory"

    @contextlib.contextmanager
    def stopped(self, job: str, name: str) -> Iterator[None]:
        """All rank processes of the job on this node get SIGSTOP, and SIGCONT at the end."""
        victims = [pid for (node, _), pid in self.pids(job).items() if node == name]
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def heal(self) -> None:
        for name in self._states:
            self.bring_back(name)

    def close(self) -> None:
        with self._lock:
            for state in self._states.values():
                for running in state.running.values():
                    _kill(running)
                state.running.clear()

    def _address(self, seen: NodeSeen, key: tuple[str, int]) -> tuple[str, int]:
        with self._lock:
            state = self._states[seen.node.id]
            if not state.up or state.incarnation != seen.incarnation:
                raise NodeUnreachable(seen.node.id, "is gone")
            running = state.running.get(key)
            if running is None or not running.process.is_alive():
                running = state.running[key] = self._start(seen.node.id, *key)
            return self._host(seen.node.id), running.port

    def _host(self, name: str) -> str:
        return HOST if self._network is None else self._network.host(name)

    def _start(self, name: str, job: str, index: int) -> _Running:
        ours, theirs = self._context.Pipe()
        settings = self._settings.model_copy(update={"bind_host": self._host(name)})
        namespace = None if self._network is None else self._network.namespace(name)
        process = self._context.Process(
            target=_live,
            args=(theirs, self._folder / name, name, job, index, self._environment, settings, namespace),
            name=f"{name}:{index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        try:
            if not ours.poll(_START_TIMEOUT_S):
                raise NodeUnreachable(name, "did not start in time")
            return _Running(process, ours.recv())
        except EOFError as error:
            raise NodeUnreachable(name, "ended while it started") from error
        finally:
            ours.close()


def _node(name: str, device: str, devices: int, host_memory_bytes: int) -> Node:
    """Links so quick that a plan of many devices is worth its traffic even for a tiny model."""
    return Node(
        id=name,
        device=device,
        devices=devices,
        host_memory_bytes=host_memory_bytes,
        intra_bytes_per_s=1e12,
        inter_bytes_per_s=1e12,
    )


def _kill(running: _Running) -> None:
    running.process.kill()
    running.process.join()


def _live(
    connection: Connection,
    folder: Path,
    name: str,
    job: str,
    index: int,
    environment: dict[str, str],
    settings: WorkerSettings,
    namespace: str | None,
) -> None:
    """The life of an agent or, with a device, of a rank."""
    if namespace is not None:
        enter(namespace)
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if index < 0:
        agent = Agent(
            node=name,
            memory_dir=folder / "memory",
            disk_dir=folder / "disk",
            disk_limit_bytes=WorkerSettings().disk_limit_bytes,  # of this node's environment
            host=settings.bind_host,
            heartbeat_s=settings.heartbeat_s,
            open_store=open_store,
            lifeline=Lifeline(
                cut_off_s=settings.cut_off_s, ends_itself_s=settings.ends_itself_s, orphaned_s=settings.orphaned_s
            ),
        )
        agent.start()
        lifeline = agent.lifeline
        connection.send(agent.port)
    else:
        keep_memory()  # as the actor of a rank does: a restore has to find the memory that the steps before it had
        keep_modules()
        output = Output(LogFile(folder / "disk" / LOGS / job))
        output.take()
        rank = Rank(node=name, index=index, settings=settings, output=output)
        rank.start()
        lifeline = rank.lifeline
        connection.send(rank.port)
    connection.close()
    lifeline.wait_for_end()
    os._exit(1)
