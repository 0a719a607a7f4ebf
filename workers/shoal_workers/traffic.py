"""What a rank sends and receives in a step, and how long it is at it, counted where it passes: what it is for, and by
which link.

Owns the counts. Both ends of a message count it, so over all ranks what was sent is what was received. All time inside
the exchange counts, waiting and copying alike: it is what exchanges take from computing, however they are hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from shoal_planner.circles import device_group
from shoal_planner.plan import Plan
from shoal_workers.exchange import Arriving, Exchange, Passing, Pending
from shoal_workers.tags import Purpose, purpose_of


class Link(StrEnum):
    """The narrowest that two devices have in common."""

    GROUP = "group"
    NODE = "node"
    ZONE = "zone"
    WORLD = "world"


class Wait(StrEnum):
    """What a rank is in an exchange for: what passes between stages, weights and gradients that are split within a
    step, once a step the sums of gradients and then weights, tensor parallelism, the vote; and, which is none, what it
    waits for until the state of the step before is safe."""

    STAGES = "stages"
    SHARDS = "shards"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    TENSOR = "tensor"
    VOTE = "vote"
    SAFETY = "safety"


_WAITS: Mapping[Purpose, Wait] = {
    Purpose.ACTIVATION: Wait.STAGES,
    Purpose.GRADIENT: Wait.STAGES,
    Purpose.FETCH: Wait.SHARDS,
    Purpose.SCATTER: Wait.SHARDS,
    Purpose.RELAY: Wait.SHARDS,
    Purpose.REDUCE: Wait.GRADIENTS,
    Purpose.SPREAD: Wait.GRADIENTS,
    Purpose.GATHER: Wait.WEIGHTS,
}


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
    what was sent since that was; `take_waited` the seconds since it was called last, and those of them that were spent
    in exchanges. `waited_s` only grows; `clock` counts seconds."""

    def __init__(self, exchange: Exchange, link_to: tuple[Link, ...], clock: Callable[[], float]) -> None:
        self._exchange = exchange
        self._link_to = link_to
        self._clock = clock
        self.waited_s = dict.fromkeys(Wait, 0.0)
        self._taken_s = clock()
        self._waited_by_then_s = dict(self.waited_s)
        self._sent: Counter[tuple[Purpose, Link]] = Counter()
        self._received: Counter[tuple[Purpose, Link]] = Counter()
        self._sent_by_link = dict.fromkeys(Link, 0)

    def take_sent(self) -> dict[Link, int]:
        sent, self._sent_by_link = self._sent_by_link, dict.fromkeys(Link, 0)
        return sent

    def take_waited(self) -> tuple[float, dict[Wait, float]]:
        now_s, before_s, waited_s = self._clock(), self._waited_by_then_s, dict(self.waited_s)
        elapsed_s = now_s - self._taken_s
        self._taken_s, self._waited_by_then_s = now_s, waited_s
        return elapsed_s, {wait: waited_s[wait] - before_s[wait] for wait in Wait}

    @property
    def waited_but_for_tensors_s(self) -> float:
        return sum(self.waited_s.values()) - self.waited_s[Wait.TENSOR]

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

    @property
    def on_device(self) -> bool:
        return self._exchange.on_device

    def connect(self) -> None:
        self._exchange.connect()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        self._sent[purpose_of(tag), self._link_to[peer]] += tensor.nbytes
        self._sent_by_link[self._link_to[peer]] += tensor.nbytes
        wait = _WAITS[purpose_of(tag)]
        with self.timed(wait):
            return _TimedPassing(self._exchange.isend(tensor, peer, tag), self, wait)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        self._received[purpose_of(tag), self._link_to[peer]] += tensor.nbytes
        wait = _WAITS[purpose_of(tag)]
        with self.timed(wait):
            return _TimedArriving(self._exchange.irecv(tensor, peer, tag), self, wait)

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return self._exchange.room(numel, dtype, peers)

    def all_gather(self, vector: Tensor) -> Tensor:
        with self.timed(Wait.VOTE):
            return self._exchange.all_gather(vector)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        with self.timed(Wait.TENSOR):
            self._exchange.all_reduce_sum(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        with self.timed(Wait.TENSOR):
            self._exchange.all_reduce_max(tensor)

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        with self.timed(Wait.TENSOR):
            return _Timed(self._exchange.start_all_reduce_sum(tensor), self, Wait.TENSOR)

    @contextmanager
    def timed(self, wait: Wait) -> Iterator[None]:
        began_s = self._clock()
        yield
        self.waited_s[wait] += self._clock() - began_s

    def commit(self) -> AbstractContextManager[None]:
        return self._exchange.commit()

    def abandon(self) -> None:
        self._exchange.abandon()


class _Timed:
    """A message under way whose waits are timed."""

    def __init__(self, pending: Pending, metered: Metered, wait: Wait) -> None:
        self._pending = pending
        self._metered = metered
        self._wait = wait

    def wait(self) -> None:
        with self._metered.timed(self._wait):
            self._pending.wait()


class _TimedPassing(_Timed):
    def __init__(self, passing: Passing, metered: Metered, wait: Wait) -> None:
        super().__init__(passing, metered, wait)
        self._passing = passing

    def has_passed(self) -> bool:
        with self._metered.timed(self._wait):
            return self._passing.has_passed()


class _TimedArriving(_TimedPassing):
    def __init__(self, arriving: Arriving, metered: Metered, wait: Wait) -> None:
        super().__init__(arriving, metered, wait)
        self._arriving = arriving

    def content(self) -> Tensor:
        with self._metered.timed(self._wait):
            return self._arriving.content()
