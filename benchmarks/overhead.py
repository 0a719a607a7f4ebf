"""What of a step of the engine is neither kernel nor communication, by torch's profiler.

Owns what counts as what. A kernel is an operator of PyTorch that has a kernel of its own, unlike those that only call
others; communication is every call of the exchange, waits and copies included. All else of the thread that steps is
overhead: Python, autograd, operators that only call others, and what the profiler itself takes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.duel import Ours
from benchmarks.peers.contender import Contender
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_workers.exchange import Arriving, Exchange, Passing, Pending
from shoal_workers.processes import Seat

_P = ParamSpec("_P")
_T = TypeVar("_T")

_WARM_UP, _PROFILED = 2, 3
_STEP = "benchmark: step"
_EXCHANGE = "exchange"
_SHOWN = 12


class Noted:
    """An exchange whose calls the profiler sees."""

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner
        self.rank, self.size, self.epoch = inner.rank, inner.size, inner.epoch
        self.on_device = inner.on_device

    def connect(self) -> None:
        self._inner.connect()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        return _NotedPassing(_noted(self._inner.isend, tensor, peer, tag))

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        return _NotedArriving(_noted(self._inner.irecv, tensor, peer, tag))

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return self._inner.room(numel, dtype, peers)

    def all_gather(self, vector: Tensor) -> Tensor:
        return _noted(self._inner.all_gather, vector)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        _noted(self._inner.all_reduce_sum, tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        _noted(self._inner.all_reduce_max, tensor)

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        return _NotedPending(_noted(self._inner.start_all_reduce_sum, tensor))

    def commit(self) -> AbstractContextManager[None]:
        return self._inner.commit()

    def abandon(self) -> None:
        self._inner.abandon()


class _NotedPending:
    def __init__(self, inner: Pending) -> None:
        self._inner = inner

    def wait(self) -> None:
        _noted(self._inner.wait)


class _NotedPassing(_NotedPending):
    def __init__(self, inner: Passing) -> None:
        super().__init__(inner)
        self._passing = inner

    def has_passed(self) -> bool:
        return _noted(self._passing.has_passed)


class _NotedArriving(_NotedPassing):
    def __init__(self, inner: Arriving) -> None:
        super().__init__(inner)
        self._arriving = inner

    def content(self) -> Tensor:
        return _noted(self._arriving.content)


def _noted(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    with record_function(_EXCHANGE):
        return call(*args, **kwargs)


def profiled(seat: Seat, make: Callable[[Seat], Contender]) -> dict[str, Any]:
    """Seconds of a step in this process by what they went into, and the operators that took most: of several steps the
    one in the middle by its overhead."""
    side = make(seat)
    for number in range(1, _WARM_UP + 1):
        side.step(number)
    accounts = []
    for number in range(_WARM_UP + 1, _WARM_UP + _PROFILED + 1):
        with profile(activities=[ProfilerActivity.CPU]) as watched, record_function(_STEP):
            side.step(number)
        accounts.append(_account(watched.events()))
    return sorted(accounts, key=_overhead_share)[_PROFILED // 2]


def noted(seat: Seat, job: JobSpec, plan: Plan) -> Contender:
    """The engine, each call of its exchange seen by the profiler."""
    return Ours(seat, job, plan, observed=Noted)


def overhead_share(accounts: Iterable[dict[str, Any]]) -> float:
    """Of the process with the most."""
    return max(map(_overhead_share, accounts))


def _overhead_share(account: dict[str, Any]) -> float:
    return float(account["overhead_s"] / account["step_s"])


def _account(events: Iterable[Any]) -> dict[str, Any]:
    found = list(events)
    step = next(event for event in found if event.name == _STEP)
    within = [event for event in found if event.thread == step.thread and event is not step]
    exchanges = [event for event in within if event.name == _EXCHANGE]
    kernels = [event for event in within if _is_kernel(event.name)]
    seconds: Counter[str] = Counter()
    for event in kernels:  # those within others count twice here, though not below
        seconds[event.name] += event.time_range.elapsed_us() / 1e6
    step_s = step.time_range.elapsed_us() / 1e6
    counted_s = _union_s([*kernels, *exchanges])
    return {
        "step_s": step_s,
        "exchange_s": _union_s(exchanges),
        "kernels_s": counted_s - _union_s(exchanges),
        "overhead_s": step_s - counted_s,
        "num_kernels": len(kernels),
        "kernels": dict(seconds.most_common(_SHOWN)),
        "threads": torch.get_num_threads(),
    }


@functools.cache
def _is_kernel(name: str) -> bool:
    if not name.startswith("aten::"):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    try:  # some have both: a kernel, and a way over others where there is none
        return has_kernel(name, "CPU") or not has_kernel(name, "CompositeImplicitAutograd")
    except RuntimeError:  # it has several forms and no default one, as arithmetic has
        return True


def _union_s(events: list[Any]) -> float:
    total_us, reached_us = 0.0, 0.0
    for first_us, last_us in sorted((event.time_range.start, event.time_range.end) for event in events):
        total_us += max(0.0, last_us - max(first_us, reached_us))
        reached_us = max(reached_us, last_us)
    return total_us / 1e6
