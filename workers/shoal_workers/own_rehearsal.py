"""Rehearses a module of a user's own as ranks will run it: on views of weights that Shoal keeps, and split between two.

What a module declares, or does with its weights, may be something that Shoal cannot follow: a weight that is kept in a
plain list too, a product whose outputs mean different things in its halves, a norm on heads that are split. All of
these train, to another loss. So every kind of module is run once as it is and once as ranks have it, and both must give
the same outputs and gradients. Owns this comparison, and threads that pose as the ranks of a group.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from shoal_workers.blueprint import trained
from shoal_workers.errors import UserCodeError
from shoal_workers.exchange import Pending, SoloExchange
from shoal_workers.own_modules import Split, described, on_weights, stored
from shoal_workers.tensor_parallel import TensorGroup

_TOLERANCE = 1e-4  # of the largest value; sums are taken in another order
_NOISE = 1e-6  # of the largest gradient of all: what else there is of one that should be zero
_WAIT_S = 120.0


def rehearse(module: nn.Module, split: Split, entering: Tensor, name: str, degrees: tuple[int, ...]) -> None:
    """Raises UserCodeError where outputs or gradients differ at any of these degrees of tensor parallelism, 1 among
    them. `entering` are tokens, or activations of some samples."""
    plain = copy.deepcopy(module)
    slope, expected = _passed(plain, entering, None)
    wanted = {key: _or_zeros(value.grad, value) for key, value in trained(plain)}
    noise = _NOISE * max((float(value.abs().max()) for value in wanted.values() if value.numel()), default=0.0)
    cuts = {one.name: one.cut for one in described(module, split)}
    for degree in degrees:
        group = _Group(degree)
        weights = {key: stored(cuts[key], value.detach()) for key, value in trained(module)}
        parts = [_parts(weights, cuts, rank, degree) for rank in range(degree)]

        def one(rank: int, group: _Group = group, parts: list[dict[str, Tensor]] = parts) -> Tensor:
            tensors = TensorGroup(rank=rank, size=len(parts), reducer=group.reducer())
            return group.guarded(
                lambda: _passed(
                    on_weights(copy.deepcopy(module), split, parts[rank], tensors), entering.detach(), slope
                )[1]
            )

        with ThreadPoolExecutor(max_workers=degree) as pool:
            outs = list(pool.map(one, range(degree)))
        how = "on weights that Shoal keeps" if degree == 1 else f"split between {degree} devices"
        for out in outs:
            _compare(out, expected, 0.0, f"{name} gives other outputs {how}")
        for key, whole in wanted.items():
            found = [_or_zeros(part[key].grad, part[key]) for part in parts]
            ours = stored(cuts[key], torch.cat(found)) if cuts[key] != "whole" else found[0]
            _compare(ours, whole, noise, f"{name} gives {key!r} another gradient {how}")


def _passed(module: nn.Module, entering: Tensor, slope: Tensor | None) -> tuple[Tensor, Tensor]:
    """The slope that was gone back from (drawn where none is given), and what came out."""
    begin = entering.clone().requires_grad_() if entering.is_floating_point() else entering
    out = module(begin)
    if slope is None:
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    if slope.shape == out.shape:
        out.backward(slope)
    return slope, out.detach()


def _parts(weights: Mapping[str, Tensor], cuts: Mapping[str, str], rank: int, degree: int) -> dict[str, Tensor]:
    found = {}
    for key, value in weights.items():
        rows = len(value) if value.dim() else 1
        low, high = rows * rank // degree, rows * (rank + 1) // degree
        part = value if cuts[key] == "whole" else value[low:high]
        found[key] = part.clone(memory_format=torch.contiguous_format).requires_grad_()
    return found


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _compare(ours: Tensor, expected: Tensor, noise: float, problem: str) -> None:
    if ours.shape != expected.shape:
        raise UserCodeError(f"{problem}: {list(ours.shape)} instead of {list(expected.shape)}")
    difference = float((ours - expected).abs().max()) if ours.numel() else 0.0
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    if not difference <= max(_TOLERANCE * largest, noise):
        hint = "see what docs/own-models.md says of weights and of tensor_parallel"
        raise UserCodeError(f"{problem} (they differ by {difference:.2g} where {largest:.2g} is the largest): {hint}")


class _Group:
    """Threads that pose as ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor] = []
        self._lock = threading.Lock()

    def reducer(self) -> SoloExchange | _Reducer:
        return SoloExchange() if self._size == 1 else _Reducer(self)

    def guarded(self, work: Callable[[], Tensor]) -> Tensor:
        """An error of one ends all others."""
        try:
            return work()
        except BaseException:
            self._barrier.abort()
            raise

    def sum(self, tensor: Tensor) -> None:
        with self._lock:
            self._given.append(tensor.detach().clone())
        self._barrier.wait(_WAIT_S)
        total = torch.stack(self._given).sum(0)
        self._barrier.wait(_WAIT_S)
        with self._lock:
            self._given.clear()
        tensor.detach().copy_(total)
        self._barrier.wait(_WAIT_S)


class _Reducer:
    def __init__(self, group: _Group) -> None:
        self._group = group

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._group.sum(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        raise AssertionError("modules of a user's own take no maximum over a group")

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        self._group.sum(tensor)
        return _Done()


class _Done:
    def wait(self) -> None:
        pass
