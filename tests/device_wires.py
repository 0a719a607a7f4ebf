"""Wires of the host in the place of NCCL's: without tags, and what is sent first comes first. What runs over them in
the processes of tests."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from shoal_workers.device_exchange import DeviceExchange
from shoal_workers.devices import CPU, current
from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.exchange import Exchange, GlooExchange, Passing, Pending, Settled
from shoal_workers.fence import Fence
from shoal_workers.nccl import TICKET_BYTES
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Seat
from shoal_workers.shared_exchange import SharedExchange
from shoal_workers.solo import RankRun, RunRequest, run_rank
from shoal_workers.tensor_parallel import tp_groups
from shoal_workers.wires import Work

_ONE_TAG = 7


class _Line:
    """One direction between two ranks."""

    def __init__(self) -> None:
        self._waiting = deque[_OnWire]()

    def put(self, passing: Passing) -> _OnWire:
        self._waiting.append(_OnWire(passing, self))
        return self._waiting[-1]

    def advance(self) -> None:
        while self._waiting and self._waiting[0].passing.has_passed():
            first = self._waiting.popleft()
            first.passing.wait()
            first.is_over = True


@dataclass(slots=True)
class _OnWire:
    passing: Passing
    line: _Line
    is_over: bool = False

    def done(self) -> bool:
        self.line.advance()
        return self.is_over


class HostWires:
    def __init__(self, exchange: Exchange, identity: list[int]) -> None:
        self.device = CPU
        self._exchange = exchange
        self._identity = identity
        self._lines = defaultdict[tuple[int, bool], _Line](_Line)

    def identity(self) -> list[int]:
        self._exchange.connect()  # all ranks ask for it at once; later only some would
        return self._identity

    def ticket(self, peer: int) -> bytes:
        return bytes([self._exchange.rank, peer])

    def send(self, tensor: Tensor, peer: int) -> Work:
        return self._lines[peer, True].put(self._exchange.isend(tensor, peer, _ONE_TAG))

    def receive(self, tensor: Tensor, peer: int, ticket: bytes) -> Work:
        assert ticket == bytes([peer, self._exchange.rank])
        return self._lines[peer, False].put(self._exchange.irecv(tensor, peer, _ONE_TAG))

    def group_ticket(self) -> bytes:
        return b"group".ljust(TICKET_BYTES, b"\0")

    def join(self, group: tuple[int, ...], ticket: bytes) -> None:
        assert ticket == self.group_ticket()
        assert self._exchange.rank in group

    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Pending:
        if largest:
            self._exchange.all_reduce_max(tensor)
        return Settled() if largest else self._exchange.start_all_reduce_sum(tensor)

    def abort(self) -> None:
        self._exchange.abandon()


def over_wires(
    seat: Seat, groups: tuple[tuple[int, ...], ...] = (), *, able: bool = True, timeout_s: float = 60.0
) -> DeviceExchange:
    fence, address = Fence(seat.epoch), "127.0.0.1"
    store, size, epoch = PrefixStore(f"wires-{seat.epoch}", seat.store), seat.size, seat.epoch
    hosts = GlooExchange(store, "hosts", seat.rank, size, groups, timeout_s, epoch=epoch, host=address, fence=fence)
    shared = SharedExchange(store, "wires", seat.rank, size, tuple(range(size)), groups, timeout_s, epoch=epoch)
    wires = HostWires(shared, [int(able), seat.rank, 1])
    exchange = DeviceExchange(hosts, wires, groups, timeout_s, fence, address)
    seat._exchanges.append(exchange)
    return exchange


def run_over_wires(seat: Seat, request: RunRequest) -> RankRun:
    return run_rank(request, seat.rank, over_wires(seat, tp_groups(request.plan)))


def receive_out_of_order(seat: Seat, able: bool) -> tuple[bool, list[float]]:
    """Three messages under way at once; taken in another order than sent, one before it was asked for."""
    exchange = over_wires(seat, able=able)
    peer = 1 - seat.rank
    sent = [exchange.isend(torch.full((3 + number,), float(number)), peer, number) for number in range(3)]
    last = torch.empty(5)
    exchange.irecv(last, peer, 2).wait()
    others = [torch.empty(3), torch.empty(4)]
    pending = [exchange.irecv(tensor, peer, number) for number, tensor in enumerate(others)]
    for one in (*reversed(pending), *sent):
        one.wait()
        one.wait()
    exchange.all_gather(torch.zeros(1))
    return exchange.on_device, [float(tensor.mean()) for tensor in (*others, last)]


def wait_until_abandoned(seat: Seat) -> float:
    """The seconds that a wait for what nobody sends took to wake."""
    exchange = over_wires(seat)
    exchange.connect()
    pending = exchange.irecv(torch.zeros(4), 1 - seat.rank, 1)
    began_s: list[float] = []

    def abandon() -> None:
        began_s.append(time.perf_counter())
        exchange.abandon()

    threading.Timer(0.1, abandon).start()
    try:
        pending.wait()
    except PeerLost:  # the other rank was quicker: its sockets are gone
        return 0.0
    except EpochAbandoned:
        return time.perf_counter() - began_s[0]
    raise AssertionError("nothing was sent, yet something arrived")


def run_and_way(seat: Seat, request: RunRequest) -> tuple[bool, RankRun]:
    """On CUDA: whether messages went from device to device, and the run."""
    device = request.device_of(seat.rank)
    with current(device):
        exchange = seat.connect(tp_groups(request.plan), nodes=nodes_of(request.plan), device=device)
        run = run_rank(request, seat.rank, exchange)
    return exchange.on_device, run
