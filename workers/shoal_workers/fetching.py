"""Carries out a rank's part of a RecoveryPlan: brings every interval into a new live state, nearest source first.

Owns the requests, the check of every shard before its bytes are used, and the counting of what really came, by tier.
What comes from where was decided before; what a source did not give is told, and decided anew by whoever did.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal_recovery.checkpoints import read_transfers, side_by_side
from shoal_recovery.crc import crc32, joined
from shoal_recovery.errors import StoreUnreachable
from shoal_recovery.state import ELEMENT_BYTES, Tier, Transfer
from shoal_recovery.store import Store
from shoal_workers import messages as m
from shoal_workers.arrivals import Arrivals
from shoal_workers.greeting import Pass
from shoal_workers.live import LiveState
from shoal_workers.rows import Row
from shoal_workers.store_reads import PatientReader
from shoal_workers.wire import Connection, ConnectionClosed, connect

_MAX_RANGES = 2000
_CHUNK_BYTES = 1 << 18
_READ_BYTES = 1 << 25  # of the store at once; a few of these are under way
_TOLD_SHARDS = 32
_PATIENCE_S = 10.0  # without a byte; an agent reads gigabytes in a second, and what it has to verify is less
Source = tuple[Tier, str, str]  # by node ("": the object store) and name of a snapshot or object


class FetchFailed(Exception):
    """The rank cannot get its state as it was planned. `source` says which source is at fault."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(source, problem)
        self.source = source
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a rank may fetch from. `old` is its own live state of before, whole at the step to restore, if there is
    one; `agents` the addresses of agents by node, which are shown the pass of the epoch that fetches; `open_store` is
    called once, if anything comes from the store."""

    job: str
    step: int
    old: LiveState | None
    agents: Mapping[str, tuple[str, int]]
    open_store: Callable[[], Store]
    shown: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A transfer whose source did not give what it was said to hold; `silent`: it did not answer at all."""

    transfer: Transfer
    problem: str
    silent: bool = False


@dataclass(slots=True, kw_only=True)
class Brought:
    """By tier, the bytes that really came and the time from the first to the last of them; the same of each shard that
    was not in own memory; and what did not come."""

    num_bytes: Counter[str] = field(default_factory=lambda: Counter({tier.value: 0 for tier in Tier}))
    source_s: dict[str, float] = field(default_factory=lambda: {tier.value: 0.0 for tier in Tier})
    shards: dict[Source, tuple[int, float]] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)

    def add(self, other: Brought) -> None:
        """What was brought after this."""
        self.num_bytes.update(other.num_bytes)
        for tier, took_s in other.source_s.items():
            self.source_s[tier] += took_s
        for source, (num_bytes, took_s) in other.shards.items():
            before_bytes, before_s = self.shards.get(source, (0, 0.0))
            self.shards[source] = before_bytes + num_bytes, before_s + took_s
        self.failed.extend(other.failed)

    def largest_shards(self) -> list[Row]:
        """As in the message Ready."""
        rows: list[Row] = [[tier.value, node, name, *brought] for (tier, node, name), brought in self.shards.items()]
        return sorted(rows, key=lambda row: (-row[3], row[:3]))[:_TOLD_SHARDS]


@dataclass(slots=True)
class _Fetched:
    """`num_settled`: how many transfers, in order, have come or were refused."""

    num_bytes: int = 0
    num_settled: int = 0
    failed: list[Failed] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0


class Fetcher:
    """One rank's fetching in one epoch; `abandon` ends it from another thread. `progressed` is called now and then
    while bytes come, by any thread."""

    def __init__(self, sources: Sources, progressed: Callable[[], None] = lambda: None) -> None:
        self._sources = sources
        self._arrivals = Arrivals(progressed)
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._store: PatientReader | None = None

    def bring(self, live: LiveState, transfers: Iterable[Transfer]) -> Brought:
        """Fills `live`, but for what failed. Weights that are made of masters come last: with them, nothing must have
        failed that they are made of. Raises FetchFailed where own memory lacks what it should have, and always once it
        is abandoned: whoever abandons may still need what own memory has."""
        brought = Brought()
        by_source: defaultdict[Source, list[Transfer]] = defaultdict(list)
        derived: list[Transfer] = []
        in_place: list[Transfer] = []
        for transfer in transfers:
            if transfer.tier is not Tier.OWN:
                by_source[transfer.tier, transfer.node or "", transfer.name or ""].append(transfer)
            else:
                (derived if transfer.is_derived else in_place).append(transfer)
        self._copy(live, in_place, brought)
        self._arrivals.begin()
        spans: defaultdict[Tier, list[_Fetched]] = defaultdict(list)
        shards: defaultdict[Source, list[_Fetched]] = defaultdict(list)
        for source, fetched in self._fetch_groups(live, _groups(by_source)):
            brought.num_bytes[source[0].value] += fetched.num_bytes
            brought.failed.extend(fetched.failed)
            spans[source[0]].append(fetched)
            shards[source].append(fetched)
        brought.source_s |= {tier.value: _span_s(parts) for tier, parts in spans.items()}
        for source, parts in shards.items():
            if num_bytes := sum(part.num_bytes for part in parts):
                brought.shards[source] = num_bytes, _span_s(parts)
        self._go_on()
        self._copy(live, derived, brought)
        self._go_on()
        return brought

    def abandon(self) -> None:
        """What is not asked for yet never will be."""
        self._abandoned.set()
        with self._lock:
            for connection in self._connections:
                connection.close()

    def _go_on(self) -> None:
        """Raises FetchFailed if nobody waits any more."""
        if self._abandoned.is_set():
            raise FetchFailed("rank", "what it fetches is not waited for any more")

    def _copy(self, live: LiveState, transfers: Iterable[Transfer], brought: Brought) -> None:
        """From own memory: of before, or what has just come."""
        began_s = time.monotonic()
        for transfer in transfers:
            source = live if transfer.is_derived else self._sources.old
            if source is None:
                raise FetchFailed("own memory", f"holds nothing of step {self._sources.step}")
            found, place = source.view(transfer.source_key), live.view(transfer.key)
            if found.data_ptr() != place.data_ptr():  # what was lent is there
                place.copy_(found)
            brought.num_bytes[Tier.OWN.value] += found.numel() * found.element_size()
        brought.source_s[Tier.OWN.value] += time.monotonic() - began_s

    def _fetch_groups(
        self, live: LiveState, groups: Sequence[tuple[Source, Sequence[Transfer]]]
    ) -> Iterator[tuple[Source, _Fetched]]:
        """Each group's source and what came; all groups are under way before the first is waited for. Where one fails
        the others are not begun any more."""
        pool = ThreadPoolExecutor(max_workers=max(1, min(4, len(groups))))
        try:
            under_way = [(source, pool.submit(self._fetch_group, live, *source, group)) for source, group in groups]
            for source, done in under_way:
                yield source, done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch_group(self, live: LiveState, tier: Tier, node: str, name: str, group: Sequence[Transfer]) -> _Fetched:
        self._go_on()
        fetched = _Fetched()
        if tier is Tier.STORE:
            self._read_store(live, group, fetched)
        else:
            self._ask_agent(live, node, name, group, fetched)
        fetched.ended_s = time.monotonic()
        return fetched

    def _read_store(self, live: LiveState, group: Sequence[Transfer], fetched: _Fetched) -> None:
        """One read for all of the group, which lie side by side in one object."""
        places = [_place(live, transfer) for transfer in group]
        parts = [
            memoryview(bytearray(transfer.num_bytes)) if place is None else place
            for transfer, place in zip(group, places, strict=True)
        ]
        try:
            found = read_transfers(self._open_store(), tuple(zip(group, parts, strict=True)))
            for (transfer, problem), place, part in zip(found, places, parts, strict=True):
                self._go_on()
                if problem is not None:
                    fetched.failed.append(Failed(transfer=transfer, problem=str(problem)))
                    continue
                if place is None:
                    _fill(live, transfer, part)
                fetched.num_bytes += transfer.shard_bytes
        except StoreUnreachable as error:
            self._go_on()
            raise FetchFailed("object store", str(error)) from error

    def _open_store(self) -> PatientReader:
        with self._lock:
            if self._store is None:
                self._store = PatientReader(self._sources.open_store(), self._arrivals, self._abandoned)
            return self._store

    def _ask_agent(self, live: LiveState, node: str, name: str, group: Sequence[Transfer], fetched: _Fetched) -> None:
        try:
            connection = self._connect(node)
            for first in range(0, len(group), _MAX_RANGES):
                self._fetch_ranges(connection, live, name, group[first : first + _MAX_RANGES], fetched)
        except (ConnectionClosed, m.ProtocolError) as error:
            self._go_on()
            fetched.failed.extend(
                Failed(transfer=transfer, problem=str(error), silent=isinstance(error, ConnectionClosed))
                for transfer in group[fetched.num_settled :]
            )

    def _fetch_ranges(
        self, connection: Connection, live: LiveState, name: str, group: Sequence[Transfer], fetched: _Fetched
    ) -> None:
        ranges = [[transfer.offset, transfer.num_bytes] for transfer in group]
        request = m.Fetch(job=self._sources.job, name=name, step=self._sources.step, ranges=ranges)
        connection.send(m.encode(request))
        wire, payload_bytes = connection.receive()
        answer = m.decode(wire)
        if isinstance(answer, m.Done) and answer.problem:
            raise m.ProtocolError(answer.problem)
        answer = m.decode_as(m.Fetched, wire)
        if answer.problem:
            fetched.failed.extend(Failed(transfer=transfer, problem=answer.problem) for transfer in group)
            fetched.num_settled += len(group)
            return
        wanted = sum(transfer.num_bytes for transfer in group)
        if (payload_bytes, len(answer.around)) != (wanted, len(group)):
            raise m.ProtocolError(f"{name}: {payload_bytes} bytes came where {wanted} were asked for")
        for transfer, (before, after) in zip(group, answer.around, strict=True):
            place = _place(live, transfer)
            part = memoryview(bytearray(transfer.num_bytes)) if place is None else place
            found = _receive(connection, part, self._arrivals)
            fetched.num_settled += 1
            if _verified(transfer, found, before, after):
                if place is None:
                    _fill(live, transfer, part)
                fetched.num_bytes += transfer.num_bytes
            else:
                fetched.failed.append(Failed(transfer=transfer, problem="what came is not what was sealed"))

    def _connect(self, node: str) -> Connection:
        if node not in self._sources.agents:
            raise ConnectionClosed(f"no agent of {node} is known")
        connection = connect(self._sources.agents[node], shown=self._sources.shown)
        connection.set_timeout(_PATIENCE_S)
        with self._lock:
            if self._abandoned.is_set():
                connection.close()
            self._connections.append(connection)
        return connection


def _span_s(parts: Collection[_Fetched]) -> float:
    return max(part.ended_s for part in parts) - min(part.began_s for part in parts)


def _groups(by_source: Mapping[Source, list[Transfer]]) -> list[tuple[Source, Sequence[Transfer]]]:
    """What is fetched in one conversation: all of a snapshot, and some of an object."""
    found: list[tuple[Source, Sequence[Transfer]]] = []
    for source, transfers in by_source.items():
        runs = side_by_side(transfers, _READ_BYTES) if source[0] is Tier.STORE else (transfers,)
        found.extend((source, run) for run in runs)
    return found


def _place(live: LiveState, transfer: Transfer) -> memoryview | None:
    """Where the bytes can come to lie at once, if they can. What is not as it should be is brought again before anybody
    takes the state for whole."""
    view = live.view(transfer.key)
    if view.device.type != "cpu" or view.dtype != torch.float32:
        return None
    return view.numpy().data.cast("B")


def _receive(connection: Connection, part: memoryview, arrivals: Arrivals) -> int:
    """Fills `part`; its CRC-32, taken while the bytes are near the processor."""
    found = 0
    for first in range(0, part.nbytes, _CHUNK_BYTES):
        chunk = part[first : first + _CHUNK_BYTES]
        connection.read_into(chunk)
        arrivals.came()
        found = crc32(chunk, found)
    return found


def _verified(transfer: Transfer, found: int, before: int, after: int) -> bool:
    """Whether bytes with this CRC-32, among what is said to be around them, are the shard that was sealed."""
    runs = ((before, transfer.before_bytes), (found, transfer.num_bytes), (after, transfer.after_bytes))
    return joined(runs) == transfer.checksum


def _fill(live: LiveState, transfer: Transfer, data: memoryview) -> None:
    source: Tensor = torch.frombuffer(data, dtype=torch.float32, count=len(data) // ELEMENT_BYTES)
    live.view(transfer.key).copy_(source)
