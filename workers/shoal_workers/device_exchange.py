"""The exchange of ranks that compute on devices which reach each other without their hosts.

Owns which message is which. Wires have no tags, so a letter from host to host announces each message, in the order of
the wire. What it announces is received when the letter comes: into the tensor that waits for it, or, if nobody has
asked for it yet, into a new one. So nothing is received that was not sent, no thread waits inside a device for a peer,
and no send waits for what its peer has yet to get to.

All else is the host's exchange: ballots, commits, who has left. If one of the ranks has no such device, or two share
one, messages go through the hosts too, as all ranks find out when they connect.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.exchange import Arriving, Exchange, Passing, Pending
from shoal_workers.fence import Fence
from shoal_workers.hand import CalledAway, Hand
from shoal_workers.letters import Letter, Letters
from shoal_workers.nccl import TICKET_BYTES
from shoal_workers.tags import Purpose, tag
from shoal_workers.wire import ConnectionClosed
from shoal_workers.wires import Wires, Work

_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # between two looks at what is waited for: longer the longer it takes
_TICKET = tag(Purpose.TICKET, 0)
_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.int64)
_Key = tuple[int, int]  # peer, tag


@dataclass(slots=True, kw_only=True)
class _Message:
    """On its wire, which may touch the tensor until the work is done."""

    tensor: Tensor
    work: Work


class DeviceExchange:
    """`host` has the fence given here, and the same tp groups; this rank's peers reach it at `address`."""

    def __init__(
        self,
        host: Exchange,
        wires: Wires,
        tp_groups: tuple[tuple[int, ...], ...],
        timeout_s: float,
        fence: Fence,
        address: str,
    ) -> None:
        self.rank, self.size, self.epoch = host.rank, host.size, host.epoch
        self._host = host
        self._wires = wires
        self._group = next((group for group in tp_groups if host.rank in group), (host.rank,))
        self._timeout_s = timeout_s
        self._fence = fence
        self._address = address
        self._hand = Hand()
        self._agreed: bool | None = None
        self._letters: Letters | None = None
        self._lock = threading.Lock()  # around what follows: letters are heard in threads of their own
        self._posted: defaultdict[_Key, deque[_Arriving]] = defaultdict(deque)
        self._early: defaultdict[_Key, deque[_Message]] = defaultdict(deque)
        self._under_way: dict[int, _Message] = {}
        self._lost: dict[int, str] = {}

    @property
    def on_device(self) -> bool:
        self._ready()
        return bool(self._agreed)

    def connect(self) -> None:
        self._host.connect()
        identity = self._wires.identity()
        if identity[0]:
            self._letters = Letters(self._address, self._hear, self._lose)
            identity = [*identity, *self._letters.address]
        said = self._host.all_gather(torch.tensor([*identity, 0, 0][:5], dtype=torch.int64))
        able, device, alike = (set(column.tolist()) for column in said[:, :3].unbind(dim=1))
        self._agreed = able == {1} and len(device) == self.size and len(alike) == 1
        if self._agreed and self._letters is not None:
            self._letters.meet([(host, port) for host, port in said[:, 3:].tolist()])
            if len(self._group) > 1:
                self._join()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        if not self.on_device:
            return self._host.isend(tensor, peer, tag)
        self._fence.check()
        message = self._begin(tensor, lambda: self._wires.send(tensor, peer))
        ticket, dtype = self._wires.ticket(peer).hex(), _DTYPES.index(tensor.dtype)
        assert self._letters is not None
        with self._errors_named("a send"):
            self._letters.send(
                peer, Letter(sender=self.rank, tag=tag, numel=tensor.numel(), dtype=dtype, ticket=ticket)
            )
        return _Sending(self, message)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        if not self.on_device:
            return self._host.irecv(tensor, peer, tag)
        self._fence.check()
        arriving = _Arriving(self, tensor, peer)
        with self._lock:
            if early := self._early[peer, tag]:
                arriving.message = early.popleft()
            else:
                self._posted[peer, tag].append(arriving)
        return arriving

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return None if self.on_device else self._host.room(numel, dtype, peers)

    def all_gather(self, vector: Tensor) -> Tensor:
        self._ready()
        return self._host.all_gather(vector)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        if not self.on_device:
            self._host.all_reduce_sum(tensor)
        elif len(self._group) > 1:
            self._all_reduce(tensor, largest=False)

    def all_reduce_max(self, tensor: Tensor) -> None:
        if not self.on_device:
            self._host.all_reduce_max(tensor)
        elif len(self._group) > 1:
            self._all_reduce(tensor, largest=True)

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        if not self.on_device or len(self._group) == 1:
            return self._host.start_all_reduce_sum(tensor)
        return self._start_all_reduce(tensor, largest=False)

    def commit(self) -> AbstractContextManager[None]:
        return self._host.commit()

    def abandon(self) -> None:
        """What is under way is kept until the wires have let go of it."""
        self._host.abandon()
        self._hand.call_away()
        if self._letters is not None:
            self._letters.close()
        self._wires.abort()
        with self._lock:
            self._under_way.clear()

    def _ready(self) -> None:
        """Connected once, by this: the host's exchange must not connect by itself first."""
        if self._agreed is None:
            self.connect()

    def _all_reduce(self, tensor: Tensor, *, largest: bool) -> None:
        whole = tensor.contiguous()
        self._start_all_reduce(whole, largest=largest).wait()
        if whole is not tensor:
            tensor.copy_(whole)

    def _start_all_reduce(self, tensor: Tensor, *, largest: bool) -> Pending:
        """It is the device that waits for it. If it never ends, the vote does not begin."""
        self._fence.check()
        with self._errors_named("an all-reduce"):
            return self._wires.all_reduce(tensor, largest=largest)

    def _join(self) -> None:
        """The first rank of the group gives the others its ticket."""
        words, first = torch.empty(TICKET_BYTES // 8, dtype=torch.int64), self._group[0]
        if self.rank == first:
            words = torch.frombuffer(bytearray(self._wires.group_ticket()), dtype=torch.int64)
            told = [self._host.isend(words, peer, _TICKET) for peer in self._group[1:]]
        else:
            told = [self._host.irecv(words, first, _TICKET)]
        for pending in told:
            pending.wait()
        with self._errors_named("meeting a tensor-parallel group"):
            self._hand.wait(lambda: self._wires.join(self._group, words.numpy().tobytes()))

    def _hear(self, letter: Letter) -> None:
        """In the thread of its sender: what was posted or asked for meanwhile is in the order of letters."""
        key, dtype = (letter.sender, letter.tag), _DTYPES[letter.dtype]
        ticket = bytes.fromhex(letter.ticket)
        try:
            with self._lock:
                posted = self._posted[key]
                arriving = posted.popleft() if posted else None
                tensor = (
                    torch.empty(letter.numel, dtype=dtype, device=self._wires.device)
                    if arriving is None
                    else arriving.tensor
                )
                assert (tensor.numel(), tensor.dtype) == (letter.numel, dtype), (letter, tensor.shape)
                message = _Message(tensor=tensor, work=self._wires.receive(tensor, letter.sender, ticket))
                self._under_way[id(message)] = message
                if arriving is None:
                    self._early[key].append(message)
                else:
                    arriving.message = message
        except Exception as error:  # whoever waits for this sender gets it
            self._lost[letter.sender] = f"{type(error).__name__}: {error}"

    def _lose(self, sender: int) -> None:
        self._lost.setdefault(sender, f"rank {sender} is gone")

    def _begin(self, tensor: Tensor, start: Callable[[], Work]) -> _Message:
        with self._errors_named("a message"):
            message = _Message(tensor=tensor, work=start())
        with self._lock:
            self._under_way[id(message)] = message
        return message

    def _is_over(self, is_over: Callable[[], bool], during: str) -> bool:
        self._fence.check()
        with self._errors_named(during):
            return is_over()

    def _await(self, is_over: Callable[[], bool], during: str) -> None:
        deadline_s, pause_s = time.monotonic() + self._timeout_s, _SHORTEST_S
        with self._errors_named(during):
            while not is_over():
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"no word in {self._timeout_s} s")
                self._fence.pause(pause_s)
                pause_s = min(1.2 * pause_s, _LONGEST_S)
            self._fence.check()

    def _finish(self, message: _Message, during: str) -> None:
        self._await(message.work.done, during)
        with self._lock:
            self._under_way.pop(id(message), None)

    @contextmanager
    def _errors_named(self, during: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, CalledAway, ConnectionClosed) as error:  # RuntimeError is all that wires raise
            if self._fence.fallen:
                raise EpochAbandoned(f"epoch {self.epoch} was abandoned during {during}") from error
            raise PeerLost(self.epoch, during, str(error)) from error


class _Sending:
    def __init__(self, exchange: DeviceExchange, message: _Message) -> None:
        self._exchange = exchange
        self._message: _Message | None = message

    def wait(self) -> None:
        if self._message is not None:
            self._exchange._finish(self._message, "a send")
            self._message = None

    def has_passed(self) -> bool:
        return self._message is None or self._exchange._is_over(self._message.work.done, "a send")


class _Arriving:
    def __init__(self, exchange: DeviceExchange, tensor: Tensor, peer: int) -> None:
        self.tensor = tensor
        self.message: _Message | None = None
        self._exchange = exchange
        self._peer = peer
        self._is_here = False

    def wait(self) -> None:
        if self._is_here:
            return
        self._exchange._await(self._is_announced, "a receive")
        assert self.message is not None
        self._exchange._finish(self.message, "a receive")
        if self.message.tensor is not self.tensor:
            self.tensor.copy_(self.message.tensor.view_as(self.tensor))
        self.message, self._is_here = None, True

    def has_passed(self) -> bool:
        return self._is_here or self._exchange._is_over(
            lambda: self._is_announced() and self.message is not None and self.message.work.done(), "a receive"
        )

    def content(self) -> Tensor:
        self.wait()
        return self.tensor

    def _is_announced(self) -> bool:
        """Raises RuntimeError if it never will be."""
        lost = self._exchange._lost.get(self._peer)
        if self.message is None and lost is not None:
            raise RuntimeError(lost)
        return self.message is not None
