"""The exchange of ranks on one node: through memory that they map, instead of sockets.

Owns what is copied when. A sender copies a tensor into its own arena, or has made it there, and tells where; the
receiver copies it from there into its buffer when it waits for it, or reads it there. So no send waits for anything,
nobody ever writes into another process, and a receiver that was called away has written nothing it was not waiting for.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but untyped

from shoal_workers.errors import PeerLost
from shoal_workers.exchange import Arriving, Passing, Pending, Settled
from shoal_workers.fence import Fence
from shoal_workers.neighbours import INLINE_BYTES, Kind, Letter, Neighbours

# Tags of messages are not negative.
_ALL_GATHER = -1
_ALL_REDUCE = -2

_REDUCING = "an all-reduce"
_RECEIVING = "a receive"

_Combine = Callable[[Tensor, Tensor], Tensor]


class SharedExchange:
    """Among `ranks`, all on this node, of a world of `size`. The other arguments are those of GlooExchange; `fence` is
    that of an exchange that this one is a part of."""

    on_device = False

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        size: int,
        ranks: tuple[int, ...],
        tp_groups: tuple[tuple[int, ...], ...],
        timeout_s: float,
        *,
        epoch: int = 0,
        fence: Fence | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.epoch = epoch
        self._fence = Fence(epoch) if fence is None else fence
        self._ranks = ranks
        self._group = next((group for group in tp_groups if rank in group), (rank,))
        self._neighbours = Neighbours(rank, ranks, PrefixStore(prefix, store), timeout_s, self._fence)
        self._connected = False
        self._rooms: dict[int, tuple[int, int]] = {}  # by address: the block, and how many sends of it are to come
        # Blocks of the last two all-reduces, which others may still read: None where it took none.
        self._reduced: deque[int | None] = deque()
        weakref.finalize(self, self._neighbours.close)

    def connect(self) -> None:
        """Waits for the other ranks. Raises EpochAbandoned or PeerLost."""
        self._fence.check()
        self._neighbours.connect()
        self._connected = True
        if self._fence.fallen:  # abandoned before the last socket was there: nobody else will shut it
            self._neighbours.wake()
        self._fence.check()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        self._send(tensor, (peer,), tag, Kind.KEPT, "a send")
        return _Sent()

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        self._ready()
        return _Receiving(self, tensor, peer, tag)

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        num_bytes = numel * dtype.itemsize
        if num_bytes <= INLINE_BYTES or not peers:
            return None
        offset = self._neighbours.arena.allocate(num_bytes, len(peers))
        room = self._neighbours.arena.view(offset, numel, dtype)
        self._rooms[room.data_ptr()] = (offset, len(peers))
        return room

    def all_gather(self, vector: Tensor) -> Tensor:
        assert len(self._ranks) == self.size, "an all-gather is among all ranks of the world"
        matrix = torch.empty(self.size, vector.numel(), dtype=vector.dtype)
        matrix[self.rank] = vector
        others = [rank for rank in self._ranks if rank != self.rank]
        for rank in others:
            self._send(vector, (rank,), _ALL_GATHER, Kind.KEPT, "an all-gather")
        for rank in others:
            self._receive(matrix[rank], rank, _ALL_GATHER, "an all-gather")
        return matrix

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._start_all_reduce(tensor, torch.Tensor.add_).wait()

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._start_all_reduce(tensor, lambda total, part: torch.maximum(total, part, out=total)).wait()

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        return self._start_all_reduce(tensor, torch.Tensor.add_)

    def commit(self) -> AbstractContextManager[None]:
        return self._fence.commit()

    def abandon(self) -> None:
        self._fence.fall()
        self._neighbours.wake()

    def _start_all_reduce(self, tensor: Tensor, combine: _Combine) -> Pending:
        others = tuple(rank for rank in self._group if rank != self.rank)
        if not others:
            self._fence.check()
            return Settled()
        host = tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else tensor.cpu().contiguous()
        offset = self._send(host, others, _ALL_REDUCE, Kind.LENT, _REDUCING)
        return _AllReduce(self, tensor, host, combine, offset)

    def _finish_all_reduce(self, host: Tensor, combine: _Combine, offset: int | None) -> None:
        """Every rank combines all parts, in the order of ranks, so that all have the same bits."""
        others = tuple(rank for rank in self._group if rank != self.rank)
        parts = {
            rank: self._content(rank, self._neighbours.take(rank, _ALL_REDUCE, _REDUCING), host, _REDUCING)
            for rank in others
        }
        total = host.view(-1)
        if self.rank != min(self._group) and len(parts) > 1:  # a sum of two has no order
            parts[self.rank] = total.clone()
            total.copy_(parts.pop(min(parts)))
        for rank in sorted(parts):
            combine(total, parts[rank])
        # Whoever has begun this one has waited for the one before the one before, as two may be under way.
        self._reduced.append(offset)
        if len(self._reduced) > 2 and (block := self._reduced.popleft()) is not None:
            self._neighbours.arena.free(block)

    def _send(self, tensor: Tensor, ranks: tuple[int, ...], tag: int, kind: Kind, during: str) -> int | None:
        """The block of the arena, if it took one."""
        assert tensor.is_contiguous() and tensor.device.type == "cpu", during
        self._ready()
        flat, offset = tensor.detach().view(-1), None
        num_bytes = flat.numel() * flat.itemsize
        if num_bytes <= INLINE_BYTES:
            letter = Letter(kind=Kind.INLINE, tag=tag, num_bytes=num_bytes, content=_content(flat))
        else:
            offset = self._leave(flat) if (made := self._made(flat)) is None else made
            letter = Letter(kind=kind, tag=tag, offset=offset, num_bytes=num_bytes)
        for rank in ranks:
            self._neighbours.send(rank, letter, during)
        return offset

    def _leave(self, flat: Tensor) -> int:
        """Its copy in the arena."""
        offset = self._neighbours.arena.allocate(flat.numel() * flat.itemsize)
        self._neighbours.arena.view(offset, flat.numel(), flat.dtype).copy_(flat)
        return offset

    def _made(self, flat: Tensor) -> int | None:
        """The block of the arena that it was made in."""
        offset, sends = self._rooms.pop(flat.data_ptr(), (None, 0))
        if offset is not None and sends > 1:
            self._rooms[flat.data_ptr()] = (offset, sends - 1)
        return offset

    def _receive(self, tensor: Tensor, rank: int, tag: int, during: str) -> None:
        letter = self._neighbours.take(rank, tag, during)
        flat = tensor.view(-1)
        flat.copy_(self._content(rank, letter, flat, during))
        self._taken(rank, letter, during)

    def _taken(self, rank: int, letter: Letter, during: str) -> None:
        if letter.kind is Kind.KEPT:
            try:
                self._neighbours.send(rank, Letter(kind=Kind.TAKEN, tag=letter.tag, offset=letter.offset), during)
            except PeerLost:
                pass  # it left after its last message, and needs the memory no longer

    def _content(self, rank: int, letter: Letter, like: Tensor, during: str) -> Tensor:
        assert letter.num_bytes == like.numel() * like.itemsize, (during, rank, letter)
        if letter.kind is Kind.INLINE:
            return torch.frombuffer(bytearray(letter.content), dtype=like.dtype) if letter.content else like.view(-1)
        return self._neighbours.lent(rank).view(letter.offset, like)

    def _ready(self) -> None:
        self._fence.check()
        if not self._connected:
            self.connect()


def _content(flat: Tensor) -> bytes:
    """Past torch and numpy: storage that an array has seen can be neither closed nor opened any more."""
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)


class _Sent:
    """The tensor was copied when it was sent."""

    def wait(self) -> None:
        pass

    def has_passed(self) -> bool:
        return True


class _Receiving:
    def __init__(self, exchange: SharedExchange, tensor: Tensor, peer: int, tag: int) -> None:
        self._exchange = exchange
        self._tensor: Tensor | None = tensor
        self._letter: Letter | None = None
        self._peer = peer
        self._tag = tag

    def content(self) -> Tensor:
        assert self._tensor is not None, "it was waited for, and the sender may have used its memory again"
        exchange, flat = self._exchange, self._tensor.view(-1)
        self._letter = exchange._neighbours.take(self._peer, self._tag, _RECEIVING)
        return exchange._content(self._peer, self._letter, flat, _RECEIVING).view_as(self._tensor)

    def wait(self) -> None:
        tensor, self._tensor = self._tensor, None
        if self._letter is not None:
            letter, self._letter = self._letter, None
            self._exchange._taken(self._peer, letter, _RECEIVING)
        elif tensor is not None:
            self._exchange._receive(tensor, self._peer, self._tag, _RECEIVING)

    def has_passed(self) -> bool:
        here = self._tensor is None or self._letter is not None
        return here or self._exchange._neighbours.has(self._peer, self._tag)


class _AllReduce:
    def __init__(
        self, exchange: SharedExchange, tensor: Tensor, host: Tensor, combine: _Combine, offset: int | None
    ) -> None:
        self._exchange = exchange
        self._tensor: Tensor | None = tensor
        self._host = host
        self._combine = combine
        self._offset = offset

    def wait(self) -> None:
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._exchange._finish_all_reduce(self._host, self._combine, self._offset)
            if self._host is not tensor:
                tensor.copy_(self._host)
