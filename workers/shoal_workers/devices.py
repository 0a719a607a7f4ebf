"""What differs between a CPU and a CUDA device: which of them a rank computes on, and how tensors come to it and leave.

Owns everything that only CUDA has, but for NCCL (`nccl`): on a CPU each function here does nothing, or the obvious. All
else is the same code on both. Work for a CUDA device is put into its current stream, and done later in that order; the
host waits only where it says so.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal_workers.errors import DeviceMissing

CPU = torch.device("cpu")
_STAGED = 1 << 23  # elements of a pinned buffer: 32 MiB, well above what starting a copy costs


def num_shown() -> int:
    """How many CUDA devices this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def compute_device(name: str, *, is_cpu: bool, simulated: bool) -> torch.device:
    """What device `name` (`node:index`) of a plan computes on: CUDA, but the CPU if its type is one (`is_cpu`), or if
    it may be `simulated` and there is no CUDA at all. Raises DeviceMissing."""
    shown = 0 if is_cpu else num_shown()
    if is_cpu or (simulated and not shown):
        return CPU
    index = int(name.rpartition(":")[2])
    if index >= shown:
        raise DeviceMissing(name, shown)
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Inside, what this thread puts into streams and events is this device's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronise(device: torch.device) -> None:
    """Returns when all that was put into its streams is done: before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """From the host, or not at all if it is there. The device copies from pinned memory by itself, in its turn; torch
    keeps that until it has."""
    if tensor.device == device:
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def return_memory(device: torch.device) -> None:
    """What tensors have given back goes to whoever else computes on this device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Where messages lie that are sent and received: on the `device` that computes, or else on the host, which is
    pinned memory if the device is not the host itself."""

    device: torch.device
    on_device: bool

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """For what will be received."""
        if self.on_device or self.device.type == "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def leaving(self, tensor: Tensor) -> Tensor:
        """A tensor as it may be sent: contiguous, and on the host whole when this returns. Not copied if it lies right
        already."""
        if self.on_device:
            return upload(tensor, self.device).contiguous()
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        host = self.empty(*tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor)
        return host

    def arrived(self, tensor: Tensor) -> Tensor:
        """What was received, on the device."""
        return tensor if self.on_device else upload(tensor, self.device)


HOST = Wire(device=CPU, on_device=False)


class Pace:
    """Keeps the host no more than one call ahead of the device, so that it can see what of the rest has come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: Any = None

    def keep(self) -> None:
        """Returns when the device has done what was put into its stream before the last call."""
        if self._device.type != "cuda":
            return
        before, self._before = self._before, torch.cuda.current_stream(self._device).record_event()
        if before is not None:
            before.synchronize()


class Downloads:
    """Copies of state into memory of the host, beside what the device computes; from a CUDA device through two pinned
    buffers, on a stream of their own. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._staging = [torch.empty(_STAGED, dtype=torch.float32, pin_memory=True) for _ in range(2)]

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copies each second one, as it is in its turn, into the first; fp32 and flat. Any thread then calls what this
        returns, and when that returns it is done; nobody may write the sources before."""
        pairs = tuple(pairs)
        if self._stream is None:
            return partial(_move, pairs)
        return partial(self._finish, pairs, torch.cuda.current_stream(self._stream.device).record_event())

    def _finish(self, pairs: tuple[tuple[Tensor, Tensor], ...], is_there: Any) -> None:
        """One buffer is emptied while the other one is filled."""
        self._stream.wait_event(is_there)
        before: Callable[[], None] = _nothing
        for number, (target, source) in enumerate(_pieces(pairs)):
            staged = self._staging[number % 2][: len(source)]
            with torch.cuda.stream(self._stream):
                staged.copy_(source, non_blocking=True)
            before()
            before = partial(_land, target, staged, self._stream.record_event())
        before()


def _move(pairs: tuple[tuple[Tensor, Tensor], ...]) -> None:
    for target, source in pairs:
        assert target.nbytes == source.nbytes and target.is_contiguous() and source.is_contiguous()
        # Half as fast again as `copy_`: what is written is not read before. It lets other threads of Python run.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


class Stopwatch:
    """Seconds that a device computes. A CPU does what it is told at once, and `clock` tells; of what a CUDA device does
    later, events in its stream do."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._is_cuda = device.type == "cuda"
        self._clock = clock
        self._taken_s = 0.0
        self._under_way: deque[tuple[Any, Any]] = deque()

    def run(self, work: Callable[[], None], waited_s: Callable[[], float]) -> None:
        """Does the work. By what `waited_s` grows meanwhile, a CPU was not at it; where a device waits, that counts."""
        if self._is_cuda:
            begun = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            work()
            ended = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._under_way.append((begun, ended))
            return
        began_s, before_s = self._clock(), waited_s()
        work()
        self._taken_s += self._clock() - began_s - (waited_s() - before_s)

    def take(self) -> float:
        """Of all that has ended since this was called last; nothing is waited for."""
        while self._under_way and self._under_way[0][1].query():
            begun, ended = self._under_way.popleft()
            self._taken_s += begun.elapsed_time(ended) / 1e3
        taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s


def _pieces(pairs: tuple[tuple[Tensor, Tensor], ...]) -> Iterator[tuple[Tensor, Tensor]]:
    for target, source in pairs:
        yield from zip(torch.split(target, _STAGED), torch.split(source, _STAGED), strict=True)


def _land(target: Tensor, staged: Tensor, is_there: Any) -> None:
    is_there.synchronize()
    target.copy_(staged)


def _nothing() -> None:
    """There is nothing to wait for."""
