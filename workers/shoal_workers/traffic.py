"""What a rank sends and receives in a step, counted where it passes: what it is for, and by which link.

Owns the counts. Both ends of a message count it, so over all ranks what was sent is what was received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from shoal_planner.circles import device_group
from shoal_planner.plan import Plan
from shoal_workers.exchange import Exchange, Pending
from shoal_workers.tags import Purpose, purpose_of


class Link(StrEnum):
    """The narrowest that two devices have in common."""

    GROUP = "group"
    NODE = "node"
    ZONE = "zone"
    WORLD = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes of one rank in one step. Votes are not counted, nor are all-reduces within a tensor-parallel replica: what
    these move is up to the exchange."""

    purpose: Purpose
    link: Link
    sent_bytes: int
    received_bytes: int


def links(plan: Plan, rank: int, zones: Mapping[str, str]) -> tuple[Link, ...]:
    """To each rank, by rank; `zones` are those of nodes, one zone for all that are not in it."""
    places = tuple(plan.places())
    here = places[rank]

    def group(other: int) -> tuple[str, int] | None:
        place = places[other]
        replica = plan.pipelines[place.pipeline].stages[place.stage].replicas[place.replica]
        found = device_group(replica, plan.group_size)
        return None if found is None else (replica.node, found)

    def link(other: int) -> Link:
        node = places[other].device.node
        if node == here.device.node:
            return Link.GROUP if group(other) is not None and group(other) == group(rank) else Link.NODE
        return Link.ZONE if zones.get(node) == zones.get(here.device.node) else Link.WORLD

    return tuple(link(other) for other in range(len(places)))


class Metered:
    """An exchange that counts what passes through it. `take` gives the counts since it was called last, and `take_sent`
    what was sent since that was."""

    def __init__(self, exchange: Exchange, link_to: tuple[Link, ...]) -> None:
        self._exchange = exchange
        self._link_to = link_to
        self._sent: Counter[tuple[Purpose, Link]] = Counter()
        self._received: Counter[tuple[Purpose, Link]] = Counter()
        self._sent_by_link = dict.fromkeys(Link, 0)

    def take_sent(self) -> dict[Link, int]:
        sent, self._sent_by_link = self._sent_by_link, dict.fromkeys(Link, 0)
        return sent

    def take(self) -> tuple[Moved, ...]:
        sent, received = self._sent, self._received
        self._sent, self._received = Counter(), Counter()
        return tuple(
            Moved(purpose=purpose, link=link, sent_bytes=sent[purpose, link], received_bytes=received[purpose, link])
            for purpose, link in sorted({*sent, *received})
        )

    @property
    def rank(self) -> int:
        return self._exchange.rank

    @property
    def size(self) -> int:
        return self._exchange.size

    @property
    def epoch(self) -> int:
        return self._exchange.epoch

    def connect(self) -> None:
        self._exchange.connect()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self._sent[purpose_of(tag), self._link_to[peer]] += tensor.nbytes
        self._sent_by_link[self._link_to[peer]] += tensor.nbytes
        return self._exchange.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self._received[purpose_of(tag), self._link_to[peer]] += tensor.nbytes
        return self._exchange.irecv(tensor, peer, tag)

    def all_gather(self, vector: Tensor) -> Tensor:
        return self._exchange.all_gather(vector)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._exchange.all_reduce_sum(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._exchange.all_reduce_max(tensor)

    def commit(self) -> AbstractContextManager[None]:
        return self._exchange.commit()

    def abandon(self) -> None:
        self._exchange.abandon()
