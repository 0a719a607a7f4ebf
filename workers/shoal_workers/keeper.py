"""A job's journal in the hands of its supervisor: appended here, kept by agents on two nodes, read by the connector.

Owns numbering and copies. Entries reach the agents in order and without waiting; nothing is shown to the connector
before one of them has it, so a supervisor that comes next never gives a number that the control plane knows to another
entry. What the control plane has not taken yet survives this process as long as one of the two nodes does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import structlog

from shoal_recovery.journal import Entry, Event, StepDone, entry_from_mapping, entry_to_mapping
from shoal_workers import messages as m
from shoal_workers.nodes import Cluster
from shoal_workers.wire import Connection, ConnectionClosed, connect

log = structlog.get_logger()

NUM_KEEPERS = 2
_ANSWER_S = 10.0
# Short steps are brought home together: each journey costs the connector, the control plane and its database more than
# the supervisor spends on the step.
_TOGETHER_S = 0.5


class Keeper:
    def __init__(self, job: str, wall_clock: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._wall_clock = wall_clock
        self._clock = clock
        self._told_s = -_TOGETHER_S  # when somebody was given entries
        self._entries: list[Entry] = []
        self._changed = threading.Condition()
        self._copies: dict[tuple[str, int], Copy] = {}
        self._kept_seq = 0
        self._given_seq = 0  # up to which somebody was given entries: what was shown once stays so

    def adopt(self, entries: Iterable[Entry]) -> None:
        """What an earlier supervisor of this job wrote."""
        with self._changed:
            self._entries = sorted(entries, key=lambda entry: entry.seq)

    def append(self, event: Event) -> Entry:
        with self._changed:
            entry = Entry(seq=len(self._entries) + 1, at_s=self._wall_clock(), event=event)
            self._entries.append(entry)
            self._changed.notify_all()
            copies = list(self._copies.values())
        for copy in copies:
            copy.put((entry,))
        return entry

    def entries(self) -> tuple[Entry, ...]:
        with self._changed:
            return tuple(self._entries)

    def entries_after(self, seq: int, wait_s: float) -> tuple[Entry, ...]:
        """Those that are kept; waits up to `wait_s` for the first one, and within that time for more where there is
        nothing but steps to tell and the last answer was just now. Any thread."""
        ends_s = self._clock() + wait_s
        with self._changed:
            self._changed.wait_for(lambda: self._visible() > seq, wait_s)
            together_s = min(ends_s, self._told_s + _TOGETHER_S) - self._clock()
            self._changed.wait_for(lambda: self._more_than_steps(seq), max(0.0, together_s))
            self._given_seq = self._visible()
            found = tuple(self._entries[seq : self._given_seq])
            self._told_s = self._clock() if found else self._told_s
            return found

    def _more_than_steps(self, seq: int) -> bool:
        return not all(isinstance(entry.event, StepDone) for entry in self._entries[seq : self._visible()])

    def _visible(self) -> int:
        return max(self._shown(), self._given_seq)

    def _shown(self) -> int:
        """Where there is no agent at all, there is nothing to wait for."""
        return self._kept_seq if self._copies else len(self._entries)

    def _kept(self, seq: int) -> None:
        with self._changed:
            self._kept_seq = max(self._kept_seq, seq)
            self._changed.notify_all()

    def keep_on(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Which agents are there; two of them keep copies, and stay the same as long as they live."""
        there = list(addresses)
        with self._changed:
            for address in [kept for kept, copy in self._copies.items() if kept not in there or copy.broken]:
                self._copies.pop(address).close()
            for address in there:
                if len(self._copies) < NUM_KEEPERS and address not in self._copies:
                    copy = self._copies[address] = Copy(self._job, address, self._kept)
                    copy.put(tuple(self._entries))

    def wait_kept(self, timeout_s: float) -> None:
        """Until one agent has everything: whoever comes next knows it then. Waits for nobody who is gone."""
        with self._changed:
            last = len(self._entries)
            self._changed.wait_for(
                lambda: self._shown() >= last or all(copy.broken for copy in self._copies.values()), timeout_s
            )

    def flush(self, timeout_s: float) -> None:
        """Waits until the copies have everything, for an end in order."""
        with self._changed:
            copies = list(self._copies.values())
        for copy in copies:
            copy.flush(timeout_s)

    def close(self) -> None:
        """The copies get what is on its way, and nothing more."""
        with self._changed:
            for copy in self._copies.values():
                copy.close()
            self._copies.clear()
            self._changed.notify_all()


class Copy:
    """One agent's copy, written by a thread of its own. `kept` is called with the number of the last entry that it
    has, and when it comes to an end."""

    def __init__(self, job: str, address: tuple[str, int], kept: Callable[[int], None]) -> None:
        self._job = job
        self._address = address
        self._kept = kept
        self._entries: queue.SimpleQueue[tuple[Entry, ...] | threading.Event | None] = queue.SimpleQueue()
        self.broken = False
        threading.Thread(target=self._write, name="journal-copy", daemon=True).start()

    def put(self, entries: tuple[Entry, ...]) -> None:
        self._entries.put(entries)

    def flush(self, timeout_s: float) -> None:
        done = threading.Event()
        self._entries.put(done)
        if not self.broken:
            done.wait(timeout_s)

    def close(self) -> None:
        self._entries.put(None)

    def _write(self) -> None:
        connection: Connection | None = None
        try:
            connection = connect(self._address)
            connection.set_timeout(_ANSWER_S)  # a host that vanished never answers, nor closes anything
            while (entries := self._entries.get()) is not None:
                if isinstance(entries, threading.Event):
                    entries.set()
                elif entries:
                    wire = [entry_to_mapping(entry) for entry in entries]
                    answer = connection.request(m.encode(m.AppendJournal(job=self._job, entries=wire)))
                    if problem := m.decode_as(m.Done, answer).problem:
                        raise ConnectionClosed(problem)  # a copy with a gap is none; another agent takes its place
                    self._kept(entries[-1].seq)
        except ConnectionClosed as error:
            log.info("journal copy lost", address=self._address, error=str(error))
            self.broken = True
            self._kept(0)
        finally:
            if connection is not None:
                connection.close()


def every_agent(cluster: Cluster, timeout_s: float) -> tuple[tuple[str, int], ...]:
    """The addresses of the agents of all nodes that answer in time: nobody knows yet which of them keep a journal."""
    nodes = cluster.nodes()
    if not nodes:
        return ()
    pool = ThreadPoolExecutor(max_workers=len(nodes))
    asked = [pool.submit(cluster.agent, seen) for seen in nodes]
    done, _ = wait(asked, timeout_s)
    pool.shutdown(wait=False, cancel_futures=True)
    return tuple(each.result() for each in asked if each in done and each.exception() is None)


def read_journals(
    job: str, addresses: Iterable[tuple[str, int]], ask: Callable[..., object], known: tuple[Entry, ...] = ()
) -> tuple[Entry, ...]:
    """The longest journal that any of these agents keeps, if it goes on where `known` ends, or else that: an agent may
    still have what was written before the job was elsewhere."""
    best = known
    for address in addresses:
        try:
            answer = ask(address, m.ReadJournal(job=job), 5.0)
        except ConnectionClosed:
            continue
        assert isinstance(answer, m.JournalIs)
        entries = tuple(entry_from_mapping(entry) for entry in answer.entries)
        if not known or (len(entries) >= len(known) and entries[len(known) - 1].at_s == known[-1].at_s):
            best = max(best, entries, key=len)
    return best
