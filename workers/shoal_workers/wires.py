"""Wires between the devices of ranks: what is sent first comes first, and nothing has a tag.

Owns the interface and its form over NCCL. Each direction between two ranks is a communicator of two with a stream and
a thread of its own, made when first used. So what one rank has sent and nobody has received yet holds up nothing else,
and no thread that somebody needs is ever inside NCCL for long.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal_workers import nccl
from shoal_workers.exchange import Pending

_SENDER, _RECEIVER = 0, 1


class Work(Protocol):
    """A message on its wire."""

    def done(self) -> bool:
        """Whether the tensor is filled, or may be written again. Raises RuntimeError if it never will."""


class Wires(Protocol):
    """Of one rank. Work waits for what the device was to do before it was asked for, as the current stream says."""

    device: torch.device

    def identity(self) -> list[int]:
        """Three numbers of this rank: whether it can use its wires at all (0 or 1), one that no other device has, and
        one that must be the same on all ranks."""

    def ticket(self, peer: int) -> bytes:
        """Bytes that `peer` needs to receive from this rank; always the same ones."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """The tensor stays as it is until the work is done."""

    def receive(self, tensor: Tensor, peer: int, ticket: bytes) -> Work: ...

    def group_ticket(self) -> bytes:
        """128 bytes, new ones."""

    def join(self, group: tuple[int, ...], ticket: bytes) -> None:
        """Meets the ranks of a group, one of which gave the ticket; waits for them."""

    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Pending:
        """In place over the joined group. What the device is to do after `wait` waits for it; the host does not."""

    def abort(self) -> None:
        """From any thread. When it returns, nothing is read or written any more."""


class NcclWires:
    """Opens nothing before it is used."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.device = device
        self._rank = rank
        self._tickets: dict[int, bytes] = {}
        self._lanes: dict[tuple[int, int], _Lane] = {}  # by peer and own end
        self._group: nccl.Communicator | None = None
        self._group_stream: Any = None
        self._aborted = False
        self._lock = threading.Lock()  # around what is open, and whether more may be

    def identity(self) -> list[int]:
        version = nccl.version() if self.device.type == "cuda" else None
        if version is None:
            return [0, self._rank, 0]
        named = str(torch.cuda.get_device_properties(self.device).uuid).encode()
        return [1, int.from_bytes(hashlib.blake2b(named, digest_size=7).digest(), "little"), version]

    def ticket(self, peer: int) -> bytes:
        if peer not in self._tickets:
            self._tickets[peer] = nccl.new_ticket()
        return self._tickets[peer]

    def send(self, tensor: Tensor, peer: int) -> Work:
        return self._lane(peer, _SENDER, self.ticket(peer)).put(tensor)

    def receive(self, tensor: Tensor, peer: int, ticket: bytes) -> Work:
        return self._lane(peer, _RECEIVER, ticket).put(tensor)

    def group_ticket(self) -> bytes:
        return nccl.new_ticket()

    def join(self, group: tuple[int, ...], ticket: bytes) -> None:
        with torch.cuda.device(self.device):
            made = nccl.Communicator(ticket, group.index(self._rank), len(group))
            self._group_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with self._lock:
            self._group = made
            aborted = self._aborted
        if aborted:
            made.abort()

    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Pending:
        assert self._group is not None, "no group was joined"
        computing = torch.cuda.current_stream(self.device)
        self._group_stream.wait_event(computing.record_event())
        self._group.all_reduce(tensor, self._group_stream, largest=largest)
        return _Summing(computing, self._group_stream.record_event())

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            lanes, group = tuple(self._lanes.values()), self._group
        if group is not None:
            group.abort()
        for lane in lanes:
            lane.abort()

    def _lane(self, peer: int, end: int, ticket: bytes) -> _Lane:
        with self._lock:
            if self._aborted:
                raise RuntimeError("the wires of this epoch are cut")
            if (peer, end) not in self._lanes:
                self._lanes[peer, end] = _Lane(ticket, end, self.device)
            return self._lanes[peer, end]


class _Summing:
    def __init__(self, computing: Any, over: Any) -> None:
        self._computing = computing
        self._over = over

    def wait(self) -> None:
        self._computing.wait_event(self._over)


@dataclass(slots=True, kw_only=True)
class _Job:
    """`is_ready`: an event, after which the device has done what comes before. `over`: one after the transfer."""

    lane: _Lane
    tensor: Tensor
    is_ready: Any
    over: Any = field(default=None)

    def done(self) -> bool:
        if self.over is not None and self.over.query():
            return True
        self.lane.check()
        return False


class _Lane:
    """One end of one direction, with a thread in which all transfers begin."""

    def __init__(self, ticket: bytes, end: int, device: torch.device) -> None:
        self._ticket = ticket
        self._end = end
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._communicator: nccl.Communicator | None = None
        self._failure: Exception | None = None
        self._aborted = False
        self._lock = threading.Lock()  # between having a communicator and aborting it
        threading.Thread(target=self._serve, name="lane", daemon=True).start()

    def put(self, tensor: Tensor) -> _Job:
        is_ready = torch.cuda.current_stream(self._device).record_event()
        job = _Job(lane=self, tensor=tensor, is_ready=is_ready)
        self._jobs.put(job)
        return job

    def check(self) -> None:
        """Raises RuntimeError if nothing more comes over this lane."""
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure
        if self._communicator is not None:
            self._communicator.check()

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            communicator = self._communicator
        self._jobs.put(None)
        if communicator is not None:
            communicator.abort()
            self._stream.synchronize()

    def _serve(self) -> None:
        try:
            with torch.cuda.device(self._device):
                communicator = nccl.Communicator(self._ticket, self._end, 2)
                with self._lock:
                    self._communicator = communicator
                    aborted = self._aborted
                if aborted:  # while the peer was waited for: nobody else will
                    communicator.abort()
                    return
                self._transfer_all(communicator)
        except Exception as error:  # whoever waits for a transfer of this lane gets it
            self._failure = error

    def _transfer_all(self, communicator: nccl.Communicator) -> None:
        transfer = communicator.send if self._end == _SENDER else communicator.receive
        while (job := self._jobs.get()) is not None and not self._aborted:
            self._stream.wait_event(job.is_ready)
            transfer(job.tensor, 1 - self._end, self._stream)
            job.over = self._stream.record_event()
