"""Agents in this process, each with folders and a port of its own, for tests of conversations with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal_recovery.state import ShardKey, Snapshot
from shoal_recovery.store import Store, open_store
from shoal_workers import messages as m
from shoal_workers.agent import Agent
from shoal_workers.greeting import Pass, cluster_pass, epoch_pass
from shoal_workers.lifeline import Lifeline
from shoal_workers.rows import key_rows, snapshots_from_rows
from shoal_workers.settings import WorkerSettings
from shoal_workers.shards import epoch_of
from shoal_workers.wire import Connection, connect

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RunningAgent:
    node: str
    agent: Agent
    memory_dir: Path
    disk_dir: Path
    _connections: list[Connection] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.agent.port

    def ask(self, request: Any) -> Any:
        """As whoever may."""
        connection = connect(self.address, shown=pass_for(request))
        try:
            connection.set_timeout(10.0)
            return m.decode(connection.request(m.encode(request)))
        finally:
            connection.close()

    def connect(self, epoch: int | None = None, job: str = "job") -> Connection:
        """As a rank of this epoch, or as a supervisor. Closed with the agent."""
        connection = connect(self.address, shown=None if epoch is None else epoch_pass(job, epoch))
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self.agent.close()

    def inventory(self, job: str = "job") -> tuple[Snapshot, ...]:
        return snapshots_from_rows(self.ask(m.GetInventory(job=job)).snapshots)

    def held(self, job: str = "job") -> list[tuple[str, int]]:
        return sorted((snapshot.name, snapshot.step) for snapshot in self.inventory(job))


def pass_for(request: Any) -> Pass:
    match request:
        case m.OpenSlots():
            return epoch_pass(request.job, request.epoch)
        case m.BeginSnapshot() | m.SealSnapshot() | m.PutSnapshot() | m.Fetch():
            return epoch_pass(request.job, epoch_of(request.name))
        case m.SetKey() | m.GetKey():
            job, epoch, _ = request.key.split("/", 2)
            return epoch_pass(job, int(epoch))
        case _:
            return cluster_pass()


def start_agent(
    folder: Path, node: str, opener: Callable[[str], Store] = open_store, memory_dir: Path | None = None
) -> RunningAgent:
    memory_dir, disk_dir = memory_dir or folder / node / "memory", folder / node / "disk"
    agent = Agent(
        node=node,
        memory_dir=memory_dir,
        disk_dir=disk_dir,
        disk_limit_bytes=WorkerSettings().disk_limit_bytes,
        host=HOST,
        heartbeat_s=0.05,
        open_store=opener,
        lifeline=Lifeline(cut_off_s=10.0, ends_itself_s=60.0),
    )
    agent.start()
    return RunningAgent(node=node, agent=agent, memory_dir=memory_dir, disk_dir=disk_dir)


@contextlib.contextmanager
def running_agents(folder: Path, *nodes: str) -> Iterator[tuple[RunningAgent, ...]]:
    started = tuple(start_agent(folder, node) for node in nodes)
    try:
        yield started
    finally:
        for each in started:
            each.close()


def open_slots(
    layout: tuple[ShardKey, ...],
    *,
    epoch: int = 1,
    rank: int = 0,
    backups: tuple[RunningAgent, ...] = (),
    uri: str | None = None,
    every: int = 1,
) -> m.OpenSlots:
    return m.OpenSlots(
        job="job",
        epoch=epoch,
        rank=rank,
        layout=key_rows(layout),
        backups=[[backup.node, *backup.address] for backup in backups],
        upload_uri=uri,
        upload_every=every,
        last_step=1000,
    )


def write_snapshot(
    agent: RunningAgent, opened: m.OpenSlots, step: int, reports: Sequence[dict[str, Any]] = ()
) -> bytes:
    """What a rank does, but for the seal; the bytes of the slot."""
    slots = agent.ask(opened)
    begun = agent.ask(m.BeginSnapshot(job="job", name=slots.name, step=step, reports=list(reports)))
    content = bytes((step + index) % 256 for index in range(slots.num_bytes))
    with open(slots.paths[begun.slot], "r+b") as file:
        file.write(content)
    return content


def watch(agent: RunningAgent) -> Connection:
    connection = agent.connect()
    connection.send(m.encode(m.Watch(job="job", after_step=0)))
    return connection


def next_word(connection: Connection) -> m.Uploaded | m.UploadDelayed:
    while True:
        message = m.decode(connection.receive()[0])
        if not isinstance(message, m.Heartbeat):
            assert isinstance(message, m.Uploaded | m.UploadDelayed)
            return message


def next_report(connection: Connection) -> m.Uploaded:
    word = next_word(connection)
    assert isinstance(word, m.Uploaded)
    return word
