"""How ranks of one epoch exchange tensors: the interface that the engine uses, its form over gloo, and for one rank.

Owns what being abandoned means. An exchange belongs to one epoch. `abandon()` ends it from any thread: every blocked
wait wakes within milliseconds, and all further use raises EpochAbandoned. What was received by then may be torn, so
nothing is ever received into parameters or optimizer state: it goes into buffers of the epoch and is copied under
`commit()`, which an abandoned exchange refuses and which `abandon()` waits for. Once `abandon()` has returned, no such
copy is under way.

Owns waking up, too. Nothing in gloo wakes every wait whose peer is stopped or whose host has vanished, so no wait of
gloo is waited for directly (`hand`). Besides, the connected sockets are shut down, so that nothing more comes in. They
are told from all other sockets of the process by their ports: each rank publishes the port that its gloo device listens
on, and every connection of gloo has its own rank's port at this end or the peer's port at the other. The listening
socket itself is never touched: gloo aborts the process if that closes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but untyped

from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.fence import Fence
from shoal_workers.hand import CalledAway, Hand

_POLL_S = 0.002
_GLANCE_S = 1e-4  # for another thread to say that it need not wait
_LISTENERS = "listeners"


class Pending(Protocol):
    """A message or a sum under way."""

    def wait(self) -> None:
        """Returns when the tensor is filled (receive) or may be written again (send). Waiting twice does no harm."""


class Passing(Pending, Protocol):
    """A message under way, of which one can ask where it is."""

    def has_passed(self) -> bool:
        """Whether `wait` would return at once. Where nobody can know without waiting, a thread waits from the first
        time that this is asked, for one message of the exchange at a time. Raises what `wait` does."""


class Arriving(Passing, Protocol):
    """A receive under way."""

    def content(self) -> Tensor:
        """Waits, and returns what came where it lies, for reading until `wait` is called. That may be memory of the
        sender's, and then the tensor that it was to be received into is never filled."""


class Exchange(Protocol):
    """All ranks call collectives in the same order; a send's peer receives as many elements under the same tag."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def on_device(self) -> bool:
        """Whether messages lie on the device that computes; else on the host. The same on all ranks."""

    def connect(self) -> None:
        """Waits for the other ranks; the first use does it otherwise. Raises EpochAbandoned or PeerLost."""

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        """The tensor, contiguous, is read any time until `wait` returns: leave it as it is."""

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        """The tensor, contiguous, is written any time until `wait` returns."""

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        """Memory on the host from which one send to each of these peers takes no copy, or None where any memory does.
        It is to be sent whole, and left alone from then on."""

    def all_gather(self, vector: Tensor) -> Tensor:
        """The vectors (one dimension, equal lengths, on the host) of all ranks, as rows in the order of ranks."""

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """In place, over this rank's tensor-parallel group."""

    def all_reduce_max(self, tensor: Tensor) -> None:
        """In place, over this rank's tensor-parallel group."""

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        """As `all_reduce_sum`, whose sum is there once `wait` has returned. Two may be under way at a time, and are
        waited for in the order in which they were started."""

    def commit(self) -> AbstractContextManager[None]:
        """Inside it live state may be written. Keep it short: `abandon()` waits for it."""

    def abandon(self) -> None:
        """Any thread may call it, any number of times."""


class Settled:
    """Nothing is under way."""

    def wait(self) -> None:
        pass


class SoloExchange:
    """A world of one rank: nothing to exchange, yet it can be abandoned like any other."""

    rank = 0
    size = 1
    on_device = False

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._fence = Fence(epoch)

    def connect(self) -> None:
        self._fence.check()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        raise AssertionError(f"a single rank has no peer {peer}")

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        raise AssertionError(f"a single rank has no peer {peer}")

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return None

    def all_gather(self, vector: Tensor) -> Tensor:
        self._fence.check()
        return torch.stack([vector])

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._fence.check()

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._fence.check()

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        self._fence.check()
        return Settled()

    def commit(self) -> AbstractContextManager[None]:
        return self._fence.commit()

    def abandon(self) -> None:
        self._fence.fall()


class GlooExchange:
    """`store` is connected and outlives epochs; `prefix` names this epoch in it, the same for all its ranks and never
    used before. `tp_groups` are the ranks of each tensor-parallel replica, in tp order; groups of one may be left out.

    `timeout_s` is the last net under every wait. `host` is the address of this node that gloo binds to, by default what
    the host's name resolves to. `fence` is that of an exchange that this one is a part of.
    """

    on_device = False
    _graveyard: ClassVar[list[GlooExchange]] = []

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        size: int,
        tp_groups: tuple[tuple[int, ...], ...],
        timeout_s: float,
        *,
        epoch: int = 0,
        host: str | None = None,
        fence: Fence | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.epoch = epoch
        self._store = PrefixStore(prefix, store)
        self._tp_groups = tp_groups
        self._timeout_s = timeout_s
        self._host = host
        self._fence = Fence(epoch) if fence is None else fence
        self._hand = Hand()
        self._scout = Hand()
        self._scouted: Any = None  # what the scout waits for
        self._world: Any = None
        self._tp: Any = None
        self._own_ports: frozenset[int] = frozenset()
        self._peer_ports: frozenset[int] = frozenset()
        self._under_way: dict[int, tuple[Any, Tensor]] = {}  # what gloo may still read or write

    @classmethod
    def forget(cls) -> None:
        """Drops the groups and buffers of abandoned epochs, but for those that gloo still waits in. It takes a while:
        not while a recovery is under way."""
        cls._graveyard[:] = [exchange for exchange in cls._graveyard if exchange._hand.busy or exchange._scout.busy]

    def connect(self) -> None:
        device, self._own_ports = _open_device(self._host)
        self._store.set(f"{_LISTENERS}/{self.rank}", ",".join(map(str, sorted(self._own_ports))))
        self._peer_ports = self._await_peers()
        own_group = next((group for group in self._tp_groups if self.rank in group and len(group) > 1), None)

        def build() -> None:
            self._world = self._group(device, "world", self.rank, self.size)
            if own_group is not None:
                name = f"tp{own_group[0]}"
                self._tp = self._group(device, name, own_group.index(self.rank), len(own_group))

        self._wait("connecting", build)
        if self._fence.fallen:  # abandoned before the last socket was there: nobody else will shut it
            self._shut()
        self._fence.check()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        return self._start("a send", tensor, lambda: self._connected().send([tensor], peer, tag))

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        return self._start("a receive", tensor, lambda: self._connected().recv([tensor], peer, tag))

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return None

    def all_gather(self, vector: Tensor) -> Tensor:
        matrix = torch.empty(self.size, vector.numel(), dtype=vector.dtype)
        rows = list(matrix.unbind(0))
        self._start("an all-gather", matrix, lambda: self._connected().allgather([rows], [vector])).wait()
        return matrix

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.SUM).wait()

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.MAX).wait()

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def commit(self) -> AbstractContextManager[None]:
        return self._fence.commit()

    def abandon(self) -> None:
        self._fence.fall()
        if self not in self._graveyard:
            self._graveyard.append(self)
        self._hand.call_away()
        self._scout.call_away()
        self._shut()

    def _all_reduce(self, tensor: Tensor, operation: Any) -> Pending:
        self._fence.check()
        self._connected()
        if self._tp is None:
            return Settled()
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        host = tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else tensor.cpu().contiguous()
        pending = self._start("an all-reduce", host, lambda: self._tp.allreduce([host], options))
        return pending if host is tensor else _CopiedBack(pending, host, tensor)

    def _connected(self) -> Any:
        if self._world is None:
            self._fence.check()
            self.connect()
        return self._world

    def _await_peers(self) -> frozenset[int]:
        """The ports of all other ranks. Asks instead of waiting, so that it can be abandoned."""
        keys = [f"{_LISTENERS}/{peer}" for peer in range(self.size) if peer != self.rank]
        deadline_s = time.monotonic() + self._timeout_s
        while keys and not self._store.check(keys):
            if time.monotonic() > deadline_s:
                raise PeerLost(self.epoch, "connecting", f"not all of {self.size} ranks came in {self._timeout_s} s")
            self._fence.pause(_POLL_S)
        return frozenset(int(port) for key in keys for port in self._store.get(key).decode().split(","))

    def _group(self, device: Any, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stubs
        options._devices = [device]
        options._timeout = timedelta(seconds=self._timeout_s)
        return dist.ProcessGroupGloo(PrefixStore(name, self._store), rank, size, options)

    def _start(self, during: str, tensor: Tensor, begin: Callable[[], Any]) -> _GlooPending:
        assert tensor.is_contiguous() and tensor.device.type == "cpu", during
        self._fence.check()
        with self._errors_named(during):
            work = begin()
        self._under_way[id(work)] = (work, tensor)
        return _GlooPending(self, work, tensor, during)

    def _finish(self, work: Any, during: str) -> None:
        if work is self._scouted:
            self._scout_answers(during)
        else:
            self._wait(during, work.wait)
        del self._under_way[id(work)]

    def _has_passed(self, work: Any, during: str) -> bool:
        """Once it says so the work is finished."""
        self._fence.check()
        if self._scouted is None:
            self._scouted = work
            self._scout.ask(work.wait)
        if work is not self._scouted or not self._scout.has_answered(_GLANCE_S):
            return False
        self._finish(work, during)
        return True

    def _scout_answers(self, during: str) -> None:
        self._fence.check()
        with self._errors_named(during):
            self._scout.answer()
        self._scouted = None

    def _wait(self, during: str, action: Callable[[], Any]) -> None:
        self._fence.check()
        with self._errors_named(during):
            self._hand.wait(action)

    @contextmanager
    def _errors_named(self, during: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, CalledAway) as error:  # RuntimeError is all that gloo raises
            if self._fence.fallen:
                raise EpochAbandoned(f"epoch {self.epoch} was abandoned during {during}") from error
            raise PeerLost(self.epoch, during, str(error)) from error

    def _shut(self) -> None:
        for sock in _sockets_of_this_process():
            with sock, suppress(OSError):  # not connected, or gone meanwhile: nothing waits on it
                if _port(sock.getsockname()) in self._own_ports or _port(sock.getpeername()) in self._peer_ports:
                    sock.getpeername()  # fails for the listener, which must stay as it is
                    sock.shutdown(socket.SHUT_RDWR)


class _GlooPending:
    def __init__(self, exchange: GlooExchange, work: Any, tensor: Tensor, during: str) -> None:
        self._exchange = exchange
        self._work = work
        self._tensor = tensor
        self._during = during

    def content(self) -> Tensor:
        self.wait()
        return self._tensor

    def wait(self) -> None:
        if self._work is not None:
            self._exchange._finish(self._work, self._during)
            self._work = None

    def has_passed(self) -> bool:
        if self._work is not None and self._exchange._has_passed(self._work, self._during):
            self._work = None
        return self._work is None


class _CopiedBack:
    """A sum under way on the host, of a tensor that is elsewhere."""

    def __init__(self, pending: Pending, host: Tensor, tensor: Tensor) -> None:
        self._pending = pending
        self._host = host
        self._tensor = tensor

    def wait(self) -> None:
        self._pending.wait()
        self._tensor.copy_(self._host)


def _open_device(host: str | None) -> tuple[Any, frozenset[int]]:
    """A gloo device and the ports that it listens on. A listener that another thread opens in the same moment counts
    as ours: its connections would be shut down with ours, which costs that thread a reconnect."""
    before = _listening_ports()
    if host is None:
        device = dist.ProcessGroupGloo.create_default_device()
    else:
        device = dist.ProcessGroupGloo.create_device(hostname=host)
    opened = _listening_ports() - before
    assert opened, "gloo opened no listener"
    return device, opened


def _listening_ports() -> frozenset[int]:
    ports = set()
    for sock in _sockets_of_this_process():
        with sock, suppress(OSError):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(_port(sock.getsockname()))
    return frozenset(ports) - {0}


def _sockets_of_this_process() -> Iterator[socket.socket]:
    """Duplicates: closing one leaves the original open."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield socket.socket(fileno=os.dup(int(name)))


def _port(address: Any) -> int:
    """0 for what has none, such as a Unix socket."""
    return int(address[1]) if isinstance(address, tuple) and len(address) >= 2 else 0
