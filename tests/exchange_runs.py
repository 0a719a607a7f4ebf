"""What runs in the processes of the tests of shared memory."""

from __future__ import annotations

import os
import signal
import time

import torch

from shoal_workers.errors import PeerLost
from shoal_workers.exchange import GlooExchange
from shoal_workers.processes import Seat
from shoal_workers.shared_exchange import SharedExchange

MANY = 1500


def exchange_many(seat: Seat) -> bool:
    """Both send more than a socket keeps before they receive anything; small ones and large ones in turn."""
    exchange = seat.connect()
    peer = 1 - seat.rank
    sizes = [1 if number % 50 else 3000 for number in range(MANY)]
    for number, size in enumerate(sizes):
        exchange.isend(torch.full((size,), float(number)), peer, number).wait()
    right = True
    for number, size in reversed(list(enumerate(sizes))):
        found = torch.empty(size)
        exchange.irecv(found, peer, number).wait()
        right = right and bool((found == number).all())
    exchange.all_gather(torch.zeros(1))
    return right


def read_in_place(seat: Seat) -> tuple[list[float], bool]:
    """Rank 0 makes messages where the other two can read them, and does so again once both have. What came, and whether
    the sender has its memory back."""
    exchange = seat.connect()
    assert isinstance(exchange, SharedExchange)
    found = []
    for number in range(3):
        if seat.rank == 0:
            room = exchange.room(5000, torch.float32, (1, 2))
            assert room is not None
            room.fill_(float(number))
            for peer in (1, 2):
                exchange.isend(room, peer, number).wait()
        else:
            kept = torch.full((50, 100), -1.0)
            arriving = exchange.irecv(kept, 0, number)
            content = arriving.content()
            assert content.shape == kept.shape
            found += [content.min().item(), content.max().item(), kept.max().item()]
            arriving.wait()
            arriving.wait()
        exchange.all_gather(torch.zeros(1))  # behind what says that it was read
    return found, exchange._neighbours.arena.used_bytes == 0


def sum_of_three(seat: Seat, numel: int) -> list[float]:
    """A sum of which rounding shows the order."""
    exchange = seat.connect(((0, 1, 2),))
    total = torch.full((numel,), (1e8, 1.0, -1e8)[seat.rank])
    exchange.all_reduce_sum(total)
    return sorted(set(total.tolist()))


def sums_two_under_way(seat: Seat, numel: int, over_gloo: bool) -> bool:
    """Each is started before the one before it is waited for, as often as blocks are used again."""
    group = ((0, 1, 2),)
    exchange = seat.connect(group)
    if over_gloo:
        far = (f"gloo-{seat.epoch}", seat.rank, seat.size, group, seat.timeout_s)
        exchange = GlooExchange(seat.store, *far, epoch=seat.epoch, host="127.0.0.1")
    rows = torch.arange(40.0).unsqueeze(1) + torch.full((40, numel), float(10**seat.rank))
    expected = 3 * torch.arange(40.0).unsqueeze(1) + 111.0
    started = exchange.start_all_reduce_sum(rows[0])
    for row in rows[1:]:
        before, started = started, exchange.start_all_reduce_sum(row)
        before.wait()
    started.wait()
    started.wait()
    exchange.all_reduce_max(rows[0])
    return bool((rows == expected).all())


def receive_from_the_dead(seat: Seat) -> tuple[float, str, float]:
    """Rank 1 sends a message and is killed; rank 0 asks for that message, then for another one."""
    exchange = seat.connect()
    exchange.all_gather(torch.zeros(1))
    if seat.rank == 1:
        exchange.isend(torch.full((100_000,), 7.0), 0, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    found = torch.empty(100_000)
    exchange.irecv(found, 1, 1).wait()
    began_s = time.perf_counter()
    try:
        exchange.irecv(found, 1, 2).wait()
    except PeerLost as error:
        return found.sum().item(), str(error), time.perf_counter() - began_s
    raise AssertionError("a message came from a process that is dead")
