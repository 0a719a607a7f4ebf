"""Carries out a rank's part of a RecoveryPlan: brings every interval into a new live state, nearest source first.

Owns the requests and the counting of bytes really taken, by tier. What comes from where was decided before.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_recovery.checkpoints import read_transfer
from shoal_recovery.state import Kind, ShardKey, Tier, Transfer
from shoal_recovery.store import Store
from shoal_workers import messages as m
from shoal_workers.live import LiveState
from shoal_workers.shards import checksum
from shoal_workers.wire import Connection, ConnectionClosed, connect

_MAX_RANGES = 2000


class FetchFailed(Exception):
    """A source did not deliver what it was said to hold. `source` says which."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(source, problem)
        self.source = source
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a rank may fetch from. `old` is its own live state of before, whole at the step to restore, if there is
    one; `agents` the addresses of agents by node; `open_store` is called once, if anything comes from the store."""

    job: str
    step: int
    old: LiveState | None
    agents: Mapping[str, tuple[str, int]]
    open_store: Callable[[], Store]


class Fetcher:
    """One rank's fetching in one epoch; `abandon` ends it from another thread."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        self._abandoned = False

    def bring(self, live: LiveState, transfers: Iterable[Transfer]) -> dict[str, int]:
        """Fills `live`; answers the bytes that really came, by tier. Raises FetchFailed, StoreError."""
        taken: Counter[str] = Counter({tier.value: 0 for tier in Tier})
        groups: defaultdict[tuple[Tier, str, str], list[Transfer]] = defaultdict(list)
        derived: list[Transfer] = []
        for transfer in transfers:
            if transfer.tier is not Tier.OWN:
                groups[transfer.tier, transfer.node or "", transfer.name or ""].append(transfer)
            elif _from_new_master(transfer):
                derived.append(transfer)
            else:
                taken[Tier.OWN.value] += _copy(live, transfer, self._old())
        for tier, num_bytes in self._fetch_groups(live, groups):
            taken[tier.value] += num_bytes
        for transfer in derived:  # after everything else: the master they come from must be there
            taken[Tier.OWN.value] += _copy(live, transfer, live)
        return dict(taken)

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            for connection in self._connections:
                connection.close()

    def _old(self) -> LiveState:
        if self._sources.old is None:
            raise FetchFailed("own memory", f"holds nothing of step {self._sources.step}")
        return self._sources.old

    def _fetch_groups(
        self, live: LiveState, groups: Mapping[tuple[Tier, str, str], list[Transfer]]
    ) -> Iterator[tuple[Tier, int]]:
        """Each group's tier and bytes; all groups are under way before the first is waited for."""
        with ThreadPoolExecutor(max_workers=max(1, min(4, len(groups)))) as pool:
            under_way = [(key[0], pool.submit(self._fetch_group, live, *key, group)) for key, group in groups.items()]
            for tier, done in under_way:
                yield tier, done.result()

    def _fetch_group(self, live: LiveState, tier: Tier, node: str, name: str, group: list[Transfer]) -> int:
        if tier is Tier.STORE:
            store = self._sources.open_store()
            return sum(_fill(live, transfer, bytearray(read_transfer(store, transfer))) for transfer in group)
        try:
            connection = self._connect(node)
            parts = [group[first : first + _MAX_RANGES] for first in range(0, len(group), _MAX_RANGES)]
            return sum(self._fetch_ranges(connection, live, node, name, part) for part in parts)
        except ConnectionClosed as error:
            raise FetchFailed(f"agent of {node}", str(error)) from error

    def _fetch_ranges(
        self, connection: Connection, live: LiveState, node: str, name: str, group: list[Transfer]
    ) -> int:
        ranges = [[transfer.offset, transfer.num_bytes] for transfer in group]
        request = m.Fetch(job=self._sources.job, name=name, step=self._sources.step, ranges=ranges)
        connection.send(m.encode(request))
        wire, payload_bytes = connection.receive()
        answer = m.decode_as(m.Fetched, wire)
        if answer.problem:
            raise FetchFailed(f"agent of {node}", answer.problem)
        data = bytearray(payload_bytes)
        connection.read_into(memoryview(data))
        if checksum(memoryview(data)) != answer.checksum:
            raise FetchFailed(f"agent of {node}", f"{name} changed on the way")
        position = 0
        for transfer in group:
            part = memoryview(data)[position : position + transfer.num_bytes]
            if transfer.checksum is not None and checksum(part) != transfer.checksum:
                raise FetchFailed(f"agent of {node}", f"{transfer.key} in {name} is not what was sealed")
            _fill(live, transfer, part)
            position += transfer.num_bytes
        return position

    def _connect(self, node: str) -> Connection:
        connection = connect(self._sources.agents[node])
        with self._lock:
            if self._abandoned:
                connection.close()
            self._connections.append(connection)
        return connection


def _from_new_master(transfer: Transfer) -> bool:
    return transfer.key.kind is Kind.WEIGHT and transfer.source_kind is Kind.MASTER


def _source_key(transfer: Transfer) -> ShardKey:
    key = transfer.key
    return ShardKey(fqn=key.fqn, kind=transfer.source_kind, first=key.first, last=key.last)


def _copy(live: LiveState, transfer: Transfer, source: LiveState) -> int:
    """The bytes that were in place."""
    found = source.view(_source_key(transfer))
    live.view(transfer.key).copy_(found)
    return found.numel() * found.element_size()


def _fill(live: LiveState, transfer: Transfer, data: bytearray | memoryview) -> int:
    source: Tensor = torch.frombuffer(data, dtype=torch.float32)
    live.view(transfer.key).copy_(source)
    return len(data)
