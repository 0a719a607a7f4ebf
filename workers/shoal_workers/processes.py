"""Plans in plain processes on this machine, without Ray: for checks of numerics, of devices and of failures.

Owns the processes. Each serves one call after the other, in a group of its own each time, so many layouts can share the
seconds that importing torch takes; and a process outlives the epochs in which it took part, as ranks do in training.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, but untyped

from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_recovery.state import Kind
from shoal_workers.allocator import keep_memory, keep_modules
from shoal_workers.devices import current
from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.exchange import Exchange, GlooExchange
from shoal_workers.node_exchange import nodes_of, open_exchange
from shoal_workers.solo import Array, RankRun, RunRequest, WholeState, run_rank, whole_state
from shoal_workers.tensor_parallel import tp_groups

P = ParamSpec("P")
T = TypeVar("T")

_HOST = "127.0.0.1"
_ABANDON = "abandon"


@dataclass(slots=True)
class Seat:
    """What a call finds in its process: its rank among `size`, and the way to the others."""

    rank: int
    size: int
    epoch: int
    store: Any
    timeout_s: float
    _exchanges: list[Exchange] = field(default_factory=list)

    def connect(
        self,
        groups: tuple[tuple[int, ...], ...] = (),
        *,
        nodes: tuple[str, ...] | None = None,
        name: str = "main",
        device: torch.device | None = None,
    ) -> Exchange:
        """A new exchange among the ranks of this call; `name` tells several of one call apart. They pose as being on
        these nodes, one for each rank; by default all are on one."""
        exchange = open_exchange(
            self.store,
            f"epoch-{self.epoch}-{name}",
            self.rank,
            ("here",) * self.size if nodes is None else nodes,
            groups,
            self.timeout_s,
            epoch=self.epoch,
            host=_HOST,
            device=device,
        )
        self._exchanges.append(exchange)
        return exchange

    def abandon(self) -> None:
        """From any thread: ends every exchange of this call."""
        for exchange in list(self._exchanges):
            exchange.abandon()


class Processes:
    """`num` processes, each with `threads` torch threads, from `with` to its end. One thread calls."""

    def __init__(self, num: int, *, threads: int = 1, timeout_s: float = 60.0) -> None:
        self._num = num
        self._threads = threads
        self._timeout_s = timeout_s
        self._epoch = 0
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-store-")
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> Processes:
        context = multiprocessing.get_context("spawn")  # never fork: threads of a store do not survive it
        path = os.path.join(self._folder.name, "store")
        for index in range(self._num):
            ours, theirs = context.Pipe()
            arguments = (theirs, index, path, self._threads, self._timeout_s)
            process = context.Process(target=_serve, args=arguments, name=f"rank-{index}", daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, connection in self._members:
            connection.close()  # a process whose parent has gone away ends
        for process, _ in self._members:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def pid(self, rank: int) -> int:
        pid = self._members[rank][0].pid
        assert pid is not None
        return pid

    def start(
        self, size: int, function: Callable[Concatenate[Seat, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Call[T]:
        """`function(seat, ...)` in the first `size` processes at once; it must be importable by name."""
        assert 0 < size <= self._num, size
        self._epoch += 1
        for rank, (_, connection) in enumerate(self._members[:size]):
            connection.send((rank, size, self._epoch, function, args, kwargs))
        return Call([connection for _, connection in self._members[:size]], self._timeout_s)

    def call(
        self, size: int, function: Callable[Concatenate[Seat, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """The results, by rank. If one rank raises, the others are abandoned, and the error is raised here."""
        return self.start(size, function, *args, **kwargs).results()

    def run(self, request: RunRequest) -> PlanRun:
        runs = self.call(sum(1 for _ in request.plan.places()), run_seat, request)
        return PlanRun(ranks=tuple(runs), state=whole_state(request.job, runs))


class Call(Generic[T]):
    """A call under way in several processes."""

    def __init__(self, connections: list[Connection], timeout_s: float) -> None:
        self._connections = connections
        self._timeout_s = timeout_s
        self._answers: dict[int, tuple[bool, Any]] = {}

    def abandon(self, rank: int) -> None:
        """Ends the exchanges of this rank, from another thread than the one that uses them."""
        self._connections[rank].send(_ABANDON)

    def answer(self, rank: int) -> T:
        """What this rank returned. Raises what it raised, TimeoutError or ProcessLost."""
        if rank not in self._answers and not self._connections[rank].poll(self._timeout_s):
            raise TimeoutError(f"rank {rank} did not answer within {self._timeout_s} s")
        self._collect(rank)
        succeeded, value = self._answers[rank]
        if not succeeded:
            raise value
        result: T = value
        return result

    def results(self) -> list[T]:
        deadline_s = time.monotonic() + self._timeout_s
        while len(self._answers) < len(self._connections):
            waiting = {self._connections[rank]: rank for rank in self._missing()}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {self._missing()} did not answer within {self._timeout_s} s")
            for connection in ready:
                self._collect(waiting[connection])  # type: ignore[index]
            if not all(succeeded for succeeded, _ in self._answers.values()):
                for rank in self._missing():
                    self.abandon(rank)
        errors = [value for succeeded, value in self._answers.values() if not succeeded]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost | EpochAbandoned)), errors[0])
        return [self._answers[rank][1] for rank in range(len(self._connections))]

    def _missing(self) -> list[int]:
        return [rank for rank in range(len(self._connections)) if rank not in self._answers]

    def _collect(self, rank: int) -> None:
        if rank in self._answers:
            return
        try:
            self._answers[rank] = self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            self._answers[rank] = (False, ProcessLost(rank))


class ProcessLost(Exception):
    """The process of a rank ended in the middle of a call."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank

    def __str__(self) -> str:
        return f"the process of rank {self.rank} ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRun:
    """What all ranks of a plan did, by rank, and the state that they own together."""

    ranks: tuple[RankRun, ...]
    state: WholeState

    @property
    def losses(self) -> tuple[float, ...]:
        return self.ranks[0].losses

    @property
    def weights(self) -> Mapping[str, Array]:
        """The master weights, in their stored shapes."""
        return self.state.values[Kind.MASTER]


def run_plan(job: JobSpec, plan: Plan, steps: int, *, limits_bytes: int | None = None) -> PlanRun:
    """The plan in as many new processes as it has ranks, up to step `steps`."""
    with Processes(sum(1 for _ in plan.places())) as processes:
        return processes.run(RunRequest(job=job, plan=plan, until_step=steps, limit_bytes=limits_bytes))


def run_seat(seat: Seat, request: RunRequest) -> RankRun:
    """The engine on this seat's rank of the plan."""
    plan, device = request.plan, request.device_of(seat.rank)
    accelerated = None if device.type == "cpu" else device
    with current(device):
        exchange = seat.connect(tp_groups(plan), nodes=nodes_of(plan), device=accelerated)
        return run_rank(request, seat.rank, exchange)


def _serve(connection: Connection, index: int, path: str, threads: int, timeout_s: float) -> None:
    """The life of a process: calls, one after the other, until the parent closes the connection."""
    keep_memory()
    keep_modules()
    torch.set_num_threads(threads)
    store = FileStore(path, -1)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    seats: list[Seat] = []
    threading.Thread(target=_listen, args=(connection, calls, seats), name="listen", daemon=True).start()
    while (call := calls.get()) is not None:
        _clear(seats)  # every rank is done with the groups of the call before
        rank, size, epoch, function, args, kwargs = call
        seats.append(Seat(rank=rank, size=size, epoch=epoch, store=store, timeout_s=timeout_s))
        connection.send(_answer(partial(function, seats[0], *args, **kwargs)))
    _clear(seats)


def _clear(seats: list[Seat]) -> None:
    for seat in seats:
        seat.abandon()
    seats.clear()
    GlooExchange.forget()


def _listen(connection: Connection, calls: queue.SimpleQueue[Any], seats: list[Seat]) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            calls.put(None)
            return
        if message == _ABANDON:
            for seat in list(seats):
                seat.abandon()
        else:
            calls.put(message)


def _answer(work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, work()
    except Exception as error:  # whatever it is, the caller gets it
        return False, error
