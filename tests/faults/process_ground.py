"""A ground of plain processes: a real supervisor in a thread, real agents and ranks, each a process of its own. Blows
are signals to them, bits in their files, links that are cut, a full disk, a store that is cut off."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import networks
from faults.disks import Disks, fill, freeze
from faults.drawn_plans import draw_plans
from faults.drills import SHAPES, Drill, Kind
from faults.judging import PACES, Pace
from faults.playing import Strike, Stuck, nothing
from faults.slots import spoil, written
from faults.stores import STORE, Stores
from faults.watched_paces import judge_short_steps, watch
from networks import Network
from process_cluster import SETTINGS, ProcessCluster
from slowing import Slowed
from supervised import Supervised

from shoal_planner.job import JobSpec
from shoal_recovery.journal import Entry
from shoal_workers.supervisor import Supervisor

_AN_HOUR_S = 3600.0
_APART = (Kind.PARTITION, Kind.PARTITION_STORE, Kind.VANISHED)
_SLOW_STEPS = 3 * PACES.least_steps
_SETTINGS = SETTINGS.model_copy(update={"cut_off_s": 5.0, "ends_itself_s": 10.0})


class ProcessGround:
    def __init__(self, name: str, folder: Path, stores: Stores) -> None:
        self._folder = folder
        self._stores = stores
        self._shapes = SHAPES[name]
        self.missing: Mapping[Kind, str] = {}
        self._mount_disks()
        self._network = self._join_network()
        environment = stores.environment() if self._network is None else stores.stand_in(self._network)
        self._cluster = ProcessCluster(
            folder, self._shapes, environment=environment, network=self._network, settings=_SETTINGS
        )
        self._running: Supervised | None = None
        self._entries: Sequence[Entry] = ()
        self._paces: list[Pace] = []

    def close(self) -> None:
        self._cluster.close()
        if self._network is not None:
            self._network.close()
        self._disks.close()

    # --- the job ---

    def begin(self, drill: Drill, job: JobSpec) -> str:
        self._job = job
        self._name = job.name
        self._entries, self._paces = (), []
        self._running = self._supervise(restarted=False)
        return self._name

    def entries(self) -> Sequence[Entry]:
        """A supervisor that has not read the journal yet knows less than the one before it."""
        assert self._running is not None
        if (error := self._running.error) is not None:
            raise Stuck("the supervisor failed: " + "".join(traceback.format_exception(error)))
        if self._running.supervisor.dead:
            return self._entries
        found = self._running.supervisor.entries_after(0, 0.0)
        if len(found) > len(self._entries):
            self._entries = found
        return self._entries

    def paces(self) -> Sequence[Pace]:
        return self._paces

    def whole(self) -> bool:
        assert self._running is not None
        return self._running.supervisor._roster.ready() >= self._shapes.keys()

    def end(self) -> None:
        assert self._running is not None
        self._running.supervisor.cancel()
        if not self._running.supervisor.dead:
            self._running.supervisor.ended.wait(20.0)
        self._cluster.end_ranks(self._name)
        self._cluster.heal()
        if self._network is not None:
            self._network.mend(*self._shapes)
        self._stores.wake()
        self._stores.mend()

    def _supervise(self, *, restarted: bool) -> Supervised:
        def prepare(supervisor: Supervisor) -> None:
            draw_plans(supervisor)
            watch(supervisor, self._paces)

        return Supervised(
            self._cluster, self._name, self._job, restarted=restarted, settings=_SETTINGS, prepare=prepare
        )

    # --- moments ---

    def writing(self) -> object:
        return written(self._cluster.memory_of(name) / self._name for name in self._shapes)

    def uploading(self) -> bool:
        return any(any((self._folder / name / "disk" / "uploads").glob("*")) for name in self._shapes)

    # --- blows ---

    def strike(self, kind: Kind, pick: int) -> Strike | None:
        strikes: Mapping[Kind, Callable[[int], Strike | None]] = {
            Kind.RANK: self._rank,
            Kind.AGENT: self._agent,
            Kind.NODE: functools.partial(self._nodes, 1, True),
            Kind.HALF: functools.partial(self._nodes, (len(self._shapes) + 1) // 2, True),
            Kind.AWAY: functools.partial(self._nodes, (len(self._shapes) + 1) // 2, False),
            Kind.SUPERVISOR: self._supervisor,
            Kind.RANK_STOPPED: self._rank_stopped,
            Kind.AGENT_STOPPED: self._agent_stopped,
            Kind.NODE_STOPPED: self._node_stopped,
            Kind.NOTICE: self._notice,
            Kind.DISK_FULL: functools.partial(self._disk, fill),
            Kind.DISK_HUNG: functools.partial(self._disk, freeze),
            Kind.STORE_CUT: self._store_cut,
            Kind.STORE_HUNG: self._store_hung,
            Kind.STORE_SLOW: self._store_slow,
            Kind.MEMORY_SPOILT: self._memory_spoilt,
            Kind.OBJECT_SPOILT: functools.partial(self._checkpoint_spoilt, self._stores.spoil_newest),
            Kind.MANIFEST_SPOILT: functools.partial(self._checkpoint_spoilt, self._stores.spoil_manifest),
            Kind.PARTITION: functools.partial(self._cut_off, (len(self._shapes) + 1) // 2),
            Kind.PARTITION_STORE: self._partition_store,
            Kind.VANISHED: functools.partial(self._cut_off, 1),
            Kind.STRAGGLER: self._straggler,
        }
        return strikes[kind](pick)

    def _cluster_nodes(self) -> list[str]:
        return [seen.node.id for seen in self._cluster.nodes()]

    def _picked(self, pick: int) -> str | None:
        """A node that computes and is there."""
        assert self._running is not None
        computing = sorted(self._running.devices() & set(self._cluster_nodes()))
        return computing[pick % len(computing)] if computing else None

    def _pids(self, name: str) -> list[int]:
        """Of the ranks of the job on this node."""
        return [pid for (node, _), pid in sorted(self._cluster.pids(self._name).items()) if node == name]

    def _rank(self, pick: int) -> Strike | None:
        name = self._picked(pick)
        pids = [] if name is None else self._pids(name)
        if name is None or not pids:
            return None
        _signal(pids[pick % len(pids) :][:1], signal.SIGKILL)
        return Strike(nodes=(name,), out=(), heal=nothing)

    def _agent(self, pick: int) -> Strike | None:
        name = self._picked(pick)
        if name is None:
            return None
        self._cluster.kill_agent(name)
        return Strike(nodes=(name,), out=(name,), heal=nothing)

    def _several(self, count: int, pick: int) -> list[str]:
        """One that computes, and those after it."""
        there = self._cluster_nodes()
        first = self._picked(pick)
        begin = 0 if first is None else there.index(first)
        return [] if first is None else (there[begin:] + there[:begin])[:count]

    def _nodes(self, count: int, wipe: bool, pick: int) -> Strike | None:
        names = self._several(count, pick)
        if not names:
            return None
        self._cluster.kill_node(*names, wipe=wipe)

        def heal() -> None:
            for name in names:
                self._cluster.bring_back(name)

        return Strike(nodes=tuple(names), out=tuple(names), heal=heal)

    def _supervisor(self, pick: int) -> Strike:
        assert self._running is not None
        self.entries()
        self._running.vanish()

        def heal() -> None:
            self._running = self._supervise(restarted=True)

        return Strike(nodes=(), out=(), heal=heal)

    def _stopped(self, name: str, pids: Iterable[int], out: tuple[str, ...]) -> Strike:
        stopped = tuple(pids)
        _signal(stopped, signal.SIGSTOP)
        return Strike(nodes=(name,), out=out, heal=functools.partial(_signal, stopped, signal.SIGCONT))

    def _rank_stopped(self, pick: int) -> Strike | None:
        name = self._picked(pick)
        return None if name is None else self._stopped(name, self._pids(name), ())

    def _agent_stopped(self, pick: int) -> Strike | None:
        name = self._picked(pick)
        return None if name is None else self._stopped(name, [self._cluster.agent_pid(name)], (name,))

    def _node_stopped(self, pick: int) -> Strike | None:
        name = self._picked(pick)
        if name is None:
            return None
        return self._stopped(name, [self._cluster.agent_pid(name), *self._pids(name)], (name,))

    def _straggler(self, pick: int) -> Strike | None:
        """Its supervisor believes it sooner than others do. The machine is shared: who has stood still gets more of it
        than others do."""
        assert self._running is not None
        name = self._picked(pick)
        if name is None:
            return None
        judge_short_steps(self._running.supervisor)
        slowing = Slowed(self._pids(name), 5.0 + pick % 4)
        return Strike(nodes=(name,), out=(), heal=slowing.end, lasts=True, steps=_SLOW_STEPS)

    def _notice(self, pick: int) -> Strike | None:
        name = self._picked(pick)
        if name is None:
            return None
        self._cluster.notice(name, _AN_HOUR_S)

        def heal() -> None:
            if name in self._cluster_nodes():
                self._cluster.kill_node(name)
            self._cluster.bring_back(name)

        return Strike(nodes=(name,), out=(name,), heal=heal)

    def _disk(self, harm: Callable[[Path], Callable[[], None]], pick: int) -> Strike | None:
        name = self._picked(pick)
        if name is None:
            return None
        heal = harm(self._folder / name / "disk")
        return Strike(nodes=(name,), out=(), heal=heal, lasts=True)

    def _store_cut(self, pick: int) -> Strike:
        self._stores.cut()
        return Strike(nodes=(), out=(), heal=self._stores.mend, lasts=True)

    def _store_hung(self, pick: int) -> Strike:
        self._stores.hang()
        return Strike(nodes=(), out=(), heal=self._stores.wake, lasts=True)

    def _store_slow(self, pick: int) -> Strike:
        self._stores.slow()
        return Strike(nodes=(), out=(), heal=self._stores.mend, lasts=True)

    def _memory_spoilt(self, pick: int) -> Strike | None:
        name = self._picked(pick)
        if name is None or not self._pids(name):
            return None
        _signal(self._pids(name), signal.SIGKILL)
        spoil(self._cluster.memory_of(name) / self._name, pick)
        return Strike(nodes=(name,), out=(name,), heal=nothing)

    def _checkpoint_spoilt(self, spoil: Callable[[str, str], None], pick: int) -> Strike | None:
        assert self._job.checkpoint.uri is not None
        spoil(self._job.checkpoint.uri, self._name)
        return self._nodes((len(self._shapes) + 1) // 2, True, pick)

    def _cut_off(self, count: int, pick: int) -> Strike | None:
        assert self._network is not None
        names = self._several(count, pick)
        if not names:
            return None
        (self._network.cut if count == 1 else self._network.part)(*names)
        heal = functools.partial(self._network.mend, *names)
        return Strike(nodes=tuple(names), out=tuple(names), heal=heal)

    def _partition_store(self, pick: int) -> Strike | None:
        assert self._network is not None
        names = self._several((len(self._shapes) + 1) // 2, pick)
        if not names:
            return None
        self._network.part_beside(STORE, *names)
        heal = functools.partial(self._network.mend, *names)
        return Strike(nodes=tuple(names), out=tuple(names), heal=heal)

    # --- networks and disks of their own ---

    def _join_network(self) -> Network | None:
        if why := networks.missing():
            self.missing = {**self.missing, **dict.fromkeys(_APART, why)}
            return None
        return Network((*self._shapes, STORE)).__enter__()

    def _mount_disks(self) -> None:
        self._disks = Disks(self._folder / name / "disk" for name in self._shapes)
        if self._disks.missing:
            missing = dict.fromkeys((Kind.DISK_FULL, Kind.DISK_HUNG), self._disks.missing)
            self.missing = {**self.missing, **missing}


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
