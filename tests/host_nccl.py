"""What runs in the processes of tests over `host_nccl.cpp`: NCCL's wires, with streams in which all is done at once."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch._C._distributed_c10d import PrefixStore

from shoal_workers import nccl
from shoal_workers.device_exchange import DeviceExchange
from shoal_workers.devices import CPU
from shoal_workers.errors import EpochAbandoned
from shoal_workers.exchange import GlooExchange
from shoal_workers.fence import Fence
from shoal_workers.processes import Seat
from shoal_workers.solo import RankRun, RunRequest, run_rank
from shoal_workers.tensor_parallel import tp_groups
from shoal_workers.wires import NcclWires

_EVENT = SimpleNamespace(query=lambda: True)


class _Stream:
    cuda_stream = 0

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> object:
        return _EVENT

    def synchronize(self) -> None:
        pass


class HostNccl(NcclWires):
    def identity(self) -> list[int]:
        version = nccl.version()
        assert version is not None
        return [1, self._rank, version]


def over_nccl(seat: Seat, library: str, groups: tuple[tuple[int, ...], ...] = ()) -> DeviceExchange:
    ctypes.CDLL(library)  # whoever asks for libnccl.so.2 from here on gets this one
    cuda = {"Stream": lambda device: _Stream(), "current_stream": lambda device: _Stream(), "device": nullcontext}
    for name, stand_in in cuda.items():
        setattr(torch.cuda, name, stand_in)
    fence, host = Fence(seat.epoch), "127.0.0.1"
    store = PrefixStore(f"nccl-{seat.epoch}", seat.store)
    inner = GlooExchange(store, "hosts", seat.rank, seat.size, groups, 60.0, epoch=seat.epoch, host=host, fence=fence)
    exchange = DeviceExchange(inner, HostNccl(seat.rank, CPU), groups, 60.0, fence, host)
    seat._exchanges.append(exchange)
    return exchange


def run_over_nccl(seat: Seat, library: str, request: RunRequest) -> RankRun:
    return run_rank(request, seat.rank, over_nccl(seat, library, tp_groups(request.plan)))


def send_what_nobody_takes(seat: Seat, library: str) -> float:
    """Rank 0's message is more than sockets keep, and rank 1 has not asked for it when rank 0 abandons the epoch: how
    long that and waking took."""
    exchange = over_nccl(seat, library)
    first = exchange.irecv(torch.zeros(4), 1 - seat.rank, 0)
    exchange.isend(torch.zeros(4), 1 - seat.rank, 0).wait()
    first.wait()
    if seat.rank == 1:  # it must be there, or its going would wake rank 0
        seat.store.wait(["woken"], timedelta(seconds=seat.timeout_s))
        exchange.abandon()
        return 0.0
    pending = exchange.irecv(torch.zeros(4), 1, 1)
    exchange.isend(torch.zeros(1 << 24), 1, 2)
    began_s: list[float] = []

    def abandon() -> None:
        began_s.append(time.perf_counter())
        exchange.abandon()

    threading.Timer(0.3, abandon).start()
    try:
        pending.wait()
    except EpochAbandoned:
        return time.perf_counter() - began_s[0]
    finally:
        seat.store.set("woken", b"")
    raise AssertionError("nothing was sent, yet something arrived")
