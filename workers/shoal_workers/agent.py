"""The agent of one node: it keeps snapshots, passes them to peers and into the object store, keeps journals and what is
told of the node's end, and is the meeting place of an epoch's ranks. Agents hear each other's heartbeats. It outlives
ranks, epochs and jobs, and runs nothing that can crash in user code.

Owns the conversations; files are `ShardStore`'s, objects are the store's.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, assert_never

import structlog

from shoal_recovery.patient_disk import PatientDisk
from shoal_recovery.state import Snapshot
from shoal_recovery.store import Store
from shoal_workers import messages as m
from shoal_workers.admission import Admission, refusal_of
from shoal_workers.beats import Beats, Peer
from shoal_workers.greeting import epoch_pass
from shoal_workers.lifeline import Lifeline
from shoal_workers.link_probe import probe_link
from shoal_workers.log_output import LOGS, ended_by
from shoal_workers.log_spool import LogSpool
from shoal_workers.meeting_place import MeetingPlace
from shoal_workers.notices import Notices
from shoal_workers.rooms import Rooms
from shoal_workers.rows import key_rows, keys_from_rows, snapshot_rows
from shoal_workers.shards import ShardStore, epoch_of, snapshot_name
from shoal_workers.slot_files import Sizes
from shoal_workers.slots import Sending, sendings
from shoal_workers.step_reports import Report, StepReports
from shoal_workers.stored_copies import StoredCopies
from shoal_workers.uploads import Uploads
from shoal_workers.watched import report
from shoal_workers.wire import Connection, ConnectionClosed, Server, connect

log = structlog.get_logger()

_UNREACHED_S = 60.0  # a node that keeps copies: then the step is not safe, and whoever decides must know of it
_Request = (
    m.OpenSlots
    | m.BeginSnapshot
    | m.SealSnapshot
    | m.PutSnapshot
    | m.GetInventory
    | m.GetEpoch
    | m.GetSignal
    | m.Fetch
    | m.Upload
    | m.Retire
    | m.MakeReady
    | m.AppendJournal
    | m.ReadJournal
    | m.SetKey
    | m.GetKey
    | m.Probe
    | m.ProbeLink
    | m.GiveNotice
    | m.ReadLogs
)


class _Owner:
    """What the agent knows of a snapshot that a rank of its own node writes."""

    def __init__(self, opened: m.OpenSlots, name: str) -> None:
        self.opened = opened
        self.sendings = sendings(opened, name)
        self.also: set[int] = set()  # steps that go to the object store, though they are not due
        self.reports: list[Report] = []  # that came with the newest snapshot
        self._backups: dict[tuple[str, int], Connection] = {}

    def uploads(self, step: int) -> bool:
        regular = step % self.opened.upload_every == 0 or step == self.opened.last_step
        due = step > 0 and (regular or step in self.also)
        return self.opened.upload_uri is not None and due

    def backup(self, address: tuple[str, int]) -> Connection:
        if address not in self._backups:
            connection = connect(address, shown=epoch_pass(self.opened.job, self.opened.epoch))
            connection.give_up_after(_UNREACHED_S)
            self._backups[address] = connection
        return self._backups[address]

    def forget(self, address: tuple[str, int]) -> None:
        self._backups.pop(address, None)

    def close(self) -> None:
        for connection in list(self._backups.values()):
            connection.close()


class Agent:
    """Serves until the process ends or `close`. `memory_dir` is in memory, `disk_dir` on disk; both belong to this node
    alone. Snapshots may take `disk_limit_bytes` of the disk where there is no room in memory."""

    def __init__(
        self,
        *,
        node: str,
        memory_dir: Path,
        disk_dir: Path,
        disk_limit_bytes: int,
        host: str,
        heartbeat_s: float,
        open_store: Callable[[str], Store],
        lifeline: Lifeline,
        log_limit_bytes: int = 2**28,
    ) -> None:
        disk = PatientDisk()
        self._stored = StoredCopies(disk_dir / "stored", lambda: self._rooms.left_of_budget(), disk)
        self._rooms = Rooms(memory_dir, disk_dir / "snapshots", disk_limit_bytes, self._stored.make_way)
        self._shards = ShardStore(self._rooms, node)
        self._reports = StepReports(memory_dir)
        self._disk_dir = disk_dir
        self._heartbeat_s = heartbeat_s
        self._owners: dict[tuple[str, str], _Owner] = {}
        self._admission = Admission()
        self._journal_lock = threading.Lock()
        self._rendezvous = MeetingPlace()
        self._spool = LogSpool(disk_dir / LOGS, limit_bytes=log_limit_bytes)
        self.notices = Notices(node)
        self.lifeline = lifeline
        self._uploads = Uploads(disk_dir / "uploads", self._stored, open_store, disk, lifeline.holds)
        self._server = Server(host, self._serve, f"agent-{node}")
        self.port = self._server.port
        self._beats = Beats(node, host, self.port, heartbeat_s)
        (disk_dir / "journal").mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self._stored.start()
        self._uploads.start()
        self._beats.start()
        self._spool.start()
        self._server.start()

    def close(self) -> None:
        """Takes no more callers and lets go of other agents; files stay for the next agent of this node."""
        self._server.close()
        self._beats.close()
        self._spool.close()
        self._uploads.close()
        for owner in list(self._owners.values()):
            owner.close()

    def _serve(self, connection: Connection) -> None:
        while True:
            wire, payload_bytes = connection.receive()
            try:
                message = m.decode(wire)
            except m.ProtocolError as error:
                connection.send(m.encode(m.Done(problem=str(error))))
                return
            if refused := self._admission.refusal(connection.caller, message):
                log.warning("request refused", request=type(message).__name__, why=refused)
                connection.skip(payload_bytes)  # or it would be read as the next request
                connection.send(m.encode(refusal_of(message, refused)))
                continue
            if isinstance(message, m.Watch):
                self._report(connection, message.job)
                return
            try:
                self._answer(connection, message, payload_bytes)
            except (KeyError, ValueError, OSError) as error:
                # The one who asked must learn of it; other conversations are not concerned.
                log.warning("request failed", request=type(message).__name__, error=str(error))
                connection.send(m.encode(m.Done(problem=str(error))))

    def _answer(self, connection: Connection, request: _Request, payload_bytes: int) -> None:
        match request:
            case m.OpenSlots():
                connection.send(m.encode(self._open(request)))
            case m.BeginSnapshot():
                slot = self._shards.begin(request.job, request.name, request.step)
                if owner := self._owners.get((request.job, request.name)):
                    owner.reports = request.reports
                self._reports.add(request.job, request.reports)
                connection.send(m.encode(m.SlotFree(slot=slot)))
            case m.SealSnapshot():
                connection.send(m.encode(self._seal(request)))
            case m.PutSnapshot():
                connection.send(m.encode(self._take_copy(connection, request, payload_bytes)))
            case m.GetInventory():
                connection.send(m.encode(self._inventory(request)))
            case m.GetEpoch():
                held = (self._shards.epoch(request.job), self._stored.epoch(request.job))
                connection.send(m.encode(m.EpochIs(epoch=max(*held, self._admission.oldest(request.job)))))
            case m.GetSignal():
                name = ended_by(self._disk_dir / LOGS / request.job, request.pid)
                connection.send(m.encode(m.SignalIs(name=name)))
            case m.Fetch():
                self._send_ranges(connection, request)
            case m.Upload():
                self._upload(request.job, request.name, request.step, request.uri)
                connection.send(m.encode(m.Done()))
            case m.Retire():
                self._retire(request)
                connection.send(m.encode(m.Done()))
            case m.MakeReady():
                sizes = Sizes(local=tuple(request.local), copies=tuple(request.copies))
                self._shards.make_ready(request.job, sizes, joining=request.joining)
                connection.send(m.encode(m.Done()))
            case m.AppendJournal():
                self._append_journal(request)
                connection.send(m.encode(m.Done()))
            case m.ReadJournal():
                connection.send(m.encode(m.JournalIs(entries=self._read_journal(request.job))))
            case m.SetKey():
                self._rendezvous.set(request.key, request.value)
                connection.send(m.encode(m.Done()))
            case m.GetKey():
                connection.send(m.encode(m.KeyIs(value=self._rendezvous.get(request.key, request.timeout_s))))
            case m.Probe():
                connection.skip(payload_bytes)
                connection.send(m.encode(m.Probed(num_bytes=payload_bytes)))
            case m.ProbeLink():
                connection.send(m.encode(_probed(request)))
            case m.GiveNotice():
                self.notices.give(request)
                connection.send(m.encode(m.Done()))
            case m.ReadLogs():
                connection.send(m.encode(m.LogsAre(life=self._spool.life, rows=self._spool.read(request))))
            case _:
                assert_never(request)

    # --- snapshots ---

    def _open(self, request: m.OpenSlots) -> m.SlotsOpen:
        name = snapshot_name(request.epoch, request.rank, mirror=request.mirror)
        layout = keys_from_rows(request.layout)
        paths, num_bytes = self._shards.open(request.job, name, layout, by_rank=True, left=request.left)
        if replaced := self._owners.get((request.job, name)):
            replaced.close()
        self._owners[request.job, name] = _Owner(request, name)
        return m.SlotsOpen(name=name, paths=list(paths), num_bytes=num_bytes)

    def _seal(self, request: m.SealSnapshot) -> m.Done:
        with self._shards.used(request.job, request.name):
            if request.here:
                if not self._shards.is_sealed(request.job, request.name, request.step):
                    self._shards.seal(request.job, request.name, request.step)
                return m.Done()
            return self._bring_to_safety(self._owners[request.job, request.name], request)

    def _bring_to_safety(self, owner: _Owner, request: m.SealSnapshot) -> m.Done:
        checksums = self._shards.seal(request.job, request.name, request.step)
        slot = self._shards.slot(request.job, request.name, request.step)
        for sending in owner.sendings:
            problem = self._send_copy(owner, sending, request, checksums, slot)
            if problem:
                return m.Done(problem=problem)
        if owner.uploads(request.step):
            assert owner.opened.upload_uri is not None
            self._beside(request, partial(self._bring, request.job, owner.opened.upload_uri))
        return m.Done()

    def _send_copy(
        self, owner: _Owner, sending: Sending, request: m.SealSnapshot, checksums: list[str], slot: memoryview
    ) -> str | None:
        copy = m.PutSnapshot(
            job=request.job,
            name=sending.name,
            step=request.step,
            layout=sending.layout,
            checksums=sending.checksums(checksums),
            uri=owner.opened.upload_uri if owner.uploads(request.step) else None,
            reports=owner.reports,
        )
        try:
            answer = owner.backup(sending.address).request(m.encode(copy), sending.bytes_of(slot))
            return m.decode_as(m.Done, answer).problem
        except ConnectionClosed as error:
            owner.forget(sending.address)
            return f"no copy on {sending.address[0]}:{sending.address[1]}: {error}"

    def _take_copy(self, connection: Connection, request: m.PutSnapshot, payload_bytes: int) -> m.Done:
        with contextlib.ExitStack() as stack:
            try:
                _, num_bytes = self._shards.open(request.job, request.name, keys_from_rows(request.layout))
                stack.enter_context(self._shards.used(request.job, request.name))
                self._shards.begin(request.job, request.name, request.step)
                self._reports.add(request.job, request.reports)
            except (KeyError, ValueError, OSError) as error:
                connection.skip(payload_bytes)  # or the copy would be read as the next request
                return m.Done(problem=f"cannot keep a copy of {request.name}: {error}")
            if payload_bytes != max(num_bytes, 1):
                raise ConnectionClosed(f"a copy of {payload_bytes} bytes where the layout has {num_bytes}")
            connection.read_into(self._shards.slot(request.job, request.name, request.step))
            self._shards.seal(request.job, request.name, request.step, request.checksums)
            if request.uri is not None:
                self._beside(request, partial(self._keep_stored, request.job, request.uri))
        return m.Done()

    def _beside(self, held: m.SealSnapshot | m.PutSnapshot, write: Callable[[Snapshot, memoryview], None]) -> None:
        """Brings to the disk what stands in memory and is safe there: nobody waits for it, but whoever needs the
        memory for another step before that is done. Of a job that is over meanwhile nothing is brought."""
        with contextlib.ExitStack() as stack:
            snapshot, content = stack.enter_context(self._shards.reading(held.job, held.name, held.step))
            reading = stack.pop_all()

        def work() -> None:
            with reading:
                if not self._shards.is_over(held.job):
                    write(snapshot, content)

        try:
            threading.Thread(target=work, name="to-disk", daemon=True).start()
        except RuntimeError:  # there is no thread left for it
            work()

    def _send_ranges(self, connection: Connection, request: m.Fetch) -> None:
        """What is written over meanwhile does not have the checksums any more that the other side expects."""
        held = self._shards if self._shards.is_sealed(request.job, request.name, request.step) else self._stored
        try:
            wanted = ((offset, num_bytes) for offset, num_bytes in request.ranges)
            parts, around = held.ranges(request.job, request.name, request.step, wanted)
        except (KeyError, OSError) as error:
            connection.send(m.encode(m.Fetched(problem=f"not held: {error}", around=[])))
            return
        connection.send(m.encode(m.Fetched(problem=None, around=[list(sums) for sums in around])), parts)

    def _inventory(self, request: m.GetInventory) -> m.InventoryIs:
        spoilt: list[tuple[Snapshot, str]] = []
        held = list(self._shards.snapshots(request.job, spoilt, verified=request.verified))
        known = {(one.name, one.step) for one in held}
        held += self._stored.snapshots(request.job, spoilt, known, verified=request.verified)
        rows = [[one.name, one.step, *key_rows(p.key for p in one.pieces)[0], problem] for one, problem in spoilt]
        reports = self._reports.after(request.job, request.epoch, request.after)
        return m.InventoryIs(snapshots=snapshot_rows(held), spoilt=rows, reports=reports)

    def _retire(self, request: m.Retire) -> None:
        if request.before_epoch is not None:
            self._admission.retire(request.job, request.before_epoch)
        self._shards.retire(request.job, request.before_epoch)
        for job, name in list(self._owners):
            if job == request.job and (request.before_epoch is None or epoch_of(name) < request.before_epoch):
                self._owners.pop((job, name)).close()
        if request.before_epoch is None:
            self._reports.forget(request.job)
            self._uploads.forget(request.job)
            self._rendezvous.forget(f"{request.job}/")

    def _upload(self, job: str, name: str, step: int, uri: str) -> None:
        if not self._uploads.again(job, name, step):
            with self._shards.reading(job, name, step) as (snapshot, content):
                self._uploads.add(job, snapshot, uri, content)

    def _bring(self, job: str, uri: str, snapshot: Snapshot, content: memoryview) -> None:
        if not self._uploads.again(job, snapshot.name, snapshot.step):
            self._uploads.add(job, snapshot, uri, content)

    def _keep_stored(self, job: str, uri: str, snapshot: Snapshot, content: memoryview) -> None:
        self._stored.add(job, snapshot, uri, content)

    def _also(self, order: m.AlsoUpload) -> None:
        for (job, _), owner in list(self._owners.items()):
            if job == order.job:
                owner.also.add(order.step)

    # --- journals ---

    def _append_journal(self, request: m.AppendJournal) -> None:
        with self._journal_lock, self._journal_path(request.job).open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # an agent died while it wrote; its last line must not swallow this one
                    file.write(b"\n")
            file.write("".join(json.dumps(entry) + "\n" for entry in request.entries).encode())

    def _read_journal(self, job: str) -> list[dict[str, Any]]:
        path = self._journal_path(job)
        with self._journal_lock:
            lines = path.read_text().splitlines() if path.exists() else []
        found: dict[int, dict[str, Any]] = {}
        for line in lines:
            try:
                entry = json.loads(line)
                found[entry["seq"]] = entry
            except (ValueError, TypeError, KeyError):  # the line of an agent that died while it wrote
                continue
        whole = takewhile(found.__contains__, count(1))
        return [found[seq] for seq in whole]

    def _journal_path(self, job: str) -> Path:
        return self._disk_dir / "journal" / f"{job}.jsonl"

    # --- watchers ---

    def _report(self, connection: Connection, job: str) -> None:
        events: queue.SimpleQueue[Any] = self._uploads.watch(job)
        self.notices.watch(events)
        self._rooms.watch(job, events)
        threading.Thread(target=self._heed, args=(connection,), name="heed", daemon=True).start()
        try:
            report(connection, events, self._heartbeat_s, self._beats.hearing.silent)
        finally:
            self._uploads.unwatch(job, events)
            self.notices.unwatch(events)
            self._rooms.unwatch(job, events)

    def _heed(self, connection: Connection) -> None:
        """What whoever watches has to say."""
        try:
            while True:
                message = m.decode(connection.receive()[0])
                match message:
                    case m.Heard():
                        self.lifeline.answered(connection, message.at_s)
                    case m.Attend():
                        peers = (Peer(node, host, port) for node, host, port in message.peers)
                        self._beats.hearing.attend(connection, peers)
                    case m.AlsoUpload():
                        self._also(message)
                    case m.StoreHolds():
                        self._stored.is_whole(message.job, message.step)
                    case _:
                        log.warning("unexpected message of a watcher", message=str(message))
        except (ConnectionClosed, m.ProtocolError):
            connection.close()
        finally:
            self.lifeline.left(connection)
            self._beats.hearing.leave(connection)


def _probed(request: m.ProbeLink) -> m.LinkProbed | m.Done:
    try:
        return probe_link((request.host, request.port), request.limit_s)
    except ConnectionClosed as error:
        return m.Done(problem=f"no answer from {request.host}:{request.port}: {error}")
