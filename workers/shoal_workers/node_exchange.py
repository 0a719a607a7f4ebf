"""Which way tensors go: from device to device where all ranks can; else through shared memory to ranks on the same
node, and over gloo to all others.

Owns the choice alone. The plan says which ranks share a node, and no replica spans two, so all-reduces stay on one.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed has it too, but untyped

from shoal_planner.plan import Plan
from shoal_workers.device_exchange import DeviceExchange
from shoal_workers.exchange import Arriving, Exchange, GlooExchange, Passing, Pending, SoloExchange
from shoal_workers.fence import Fence
from shoal_workers.shared_exchange import SharedExchange
from shoal_workers.wires import NcclWires


def nodes_of(plan: Plan) -> tuple[str, ...]:
    """The node of each rank."""
    return tuple(place.device.node for place in plan.places())


def open_exchange(
    store: Store,
    prefix: str,
    rank: int,
    nodes: tuple[str, ...],
    tp_groups: tuple[tuple[int, ...], ...],
    timeout_s: float,
    *,
    epoch: int,
    host: str | None = None,
    device: torch.device | None = None,
) -> Exchange:
    """Among as many ranks as `nodes` names, one for each; all else as for GlooExchange. `device` is what this rank
    computes on, given by all ranks or, where a CPU is among their devices, by none."""
    if len(nodes) == 1:
        return SoloExchange(epoch)
    fence = Fence(epoch)
    by_host = _by_host(store, prefix, rank, nodes, tp_groups, timeout_s, epoch, host, fence)
    if device is None:
        return by_host
    return DeviceExchange(by_host, NcclWires(rank, device), tp_groups, timeout_s, fence, host or "127.0.0.1")


def _by_host(
    store: Store,
    prefix: str,
    rank: int,
    nodes: tuple[str, ...],
    tp_groups: tuple[tuple[int, ...], ...],
    timeout_s: float,
    epoch: int,
    host: str | None,
    fence: Fence,
) -> Exchange:
    size = len(nodes)
    near = tuple(other for other in range(size) if nodes[other] == nodes[rank])
    assert all(set(group) <= set(near) for group in tp_groups if rank in group), "a replica spans nodes"
    if len(near) == 1:
        return GlooExchange(store, prefix, rank, size, (), timeout_s, epoch=epoch, host=host, fence=fence)
    shared = SharedExchange(store, prefix, rank, size, near, tp_groups, timeout_s, epoch=epoch, fence=fence)
    if len(near) == size:
        return shared
    gloo = GlooExchange(store, prefix, rank, size, (), timeout_s, epoch=epoch, host=host, fence=fence)
    return NodeExchange(frozenset(near), shared, gloo)


class NodeExchange:
    """For a rank with others on its node, `near`, and elsewhere. Both exchanges have the same fence."""

    on_device = False

    def __init__(self, near: frozenset[int], shared: SharedExchange, gloo: GlooExchange) -> None:
        self.rank, self.size, self.epoch = gloo.rank, gloo.size, gloo.epoch
        self._near = near
        self._shared = shared
        self._gloo = gloo
        self._connected = False

    def connect(self) -> None:
        """Always both ways, in one order: a rank that first uses the one would wait for a rank that first uses the
        other."""
        self._shared.connect()
        self._gloo.connect()
        self._connected = True

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        return self._to(peer).isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        return self._to(peer).irecv(tensor, peer, tag)

    def room(self, numel: int, dtype: torch.dtype, peers: Collection[int]) -> Tensor | None:
        return self._shared.room(numel, dtype, peers) if self._near.issuperset(peers) else None

    def all_gather(self, vector: Tensor) -> Tensor:
        self._ready()
        return self._gloo.all_gather(vector)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._ready()
        self._shared.all_reduce_sum(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._ready()
        self._shared.all_reduce_max(tensor)

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        self._ready()
        return self._shared.start_all_reduce_sum(tensor)

    def commit(self) -> AbstractContextManager[None]:
        return self._gloo.commit()

    def abandon(self) -> None:
        self._shared.abandon()
        self._gloo.abandon()

    def _ready(self) -> None:
        if not self._connected:
            self.connect()

    def _to(self, peer: int) -> Exchange:
        self._ready()
        return self._shared if peer in self._near else self._gloo
