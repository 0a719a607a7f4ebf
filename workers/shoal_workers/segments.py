"""The units of a stage, each an autograd graph of its own: forward one after the other, backward in reverse.

Owns what is kept of a unit between its forward and its backward, and its charge. Between two units activations are
detached, which copies nothing. So there is plain code before and after each unit in both directions: a unit's weights
are needed in `_forward` and in `_backward` and nowhere else, and when the latter returns for the last micro-batch of a
step, its gradients are complete. Does not own what travels between stages (`stage`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal_workers.memory import DeviceMemory
from shoal_workers.model import Unit

ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A unit between its forward and its backward, for one micro-batch."""

    entering: Tensor  # a leaf: token ids, or activations with a gradient to come
    leaving: Tensor


class Segments:
    """`units` follow each other. The last of them, if it is the model's last, gives its summed loss divided by
    `num_tokens`."""

    def __init__(self, units: Sequence[Unit], num_tokens: int, memory: DeviceMemory) -> None:
        self._units = tuple(units)
        self._num_tokens = num_tokens
        self._memory = memory
        self._kept_bytes: dict[int, int] = {}  # of one micro-batch, by unit; measured in its first forward
        self._flights: dict[int, list[_Flight]] = {}

    def begin(self) -> None:
        """Before each step: forgets what a refused one left behind."""
        self._flights.clear()

    def forward(self, micro_batch: int, entering: Tensor, targets_BS: Tensor | None) -> Tensor:
        """Activations, or this micro-batch's part of the loss; detached."""
        flights = self._flights[micro_batch] = []
        for unit in self._units:
            flights.append(self._forward(unit, entering, targets_BS))
            entering = flights[-1].leaving.detach()
            if unit is not self._units[-1]:
                entering.requires_grad_()
        return entering

    def backward(self, micro_batch: int, slope: Tensor | None) -> Tensor | None:
        """From the gradient of what left (none where that is the loss) to that of what entered (none where that is
        tokens). Gradients of weights add up in the live state."""
        flights = self._flights.pop(micro_batch)
        for unit in reversed(self._units):
            slope = self._backward(unit, flights.pop(), slope)
        return slope

    def _forward(self, unit: Unit, entering: Tensor, targets_BS: Tensor | None) -> _Flight:
        if unit.number not in self._kept_bytes:
            return self._measured(unit, entering, targets_BS)
        self._memory.charge(ACTIVATIONS, self._kept_bytes[unit.number])
        return self._run(unit, entering, targets_BS)

    def _backward(self, unit: Unit, flight: _Flight, slope: Tensor | None) -> Tensor | None:
        torch.autograd.backward(flight.leaving, slope)
        self._memory.release(ACTIVATIONS, self._kept_bytes[unit.number])
        return flight.entering.grad

    def _run(self, unit: Unit, entering: Tensor, targets_BS: Tensor | None) -> _Flight:
        leaving = unit(entering, targets_BS)
        if unit.gives_loss:
            leaving = leaving / self._num_tokens
        return _Flight(entering=entering, leaving=leaving)

    def _measured(self, unit: Unit, entering: Tensor, targets_BS: Tensor | None) -> _Flight:
        """A forward that also finds out how much of it stays in memory until its backward."""
        kept: dict[int, int] = {}
        with _noting(kept):
            flight = self._run(unit, entering, targets_BS)
        elsewhere = unit.weights if unit is not self._units[0] else (entering, *unit.weights)
        for tensor in elsewhere:  # charged already
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        self._kept_bytes[unit.number] = sum(kept.values())
        self._memory.charge(ACTIVATIONS, self._kept_bytes[unit.number])
        return flight


@contextmanager
def _noting(kept: dict[int, int]) -> Iterator[None]:
    """Into `kept` go the storages that autograd saves inside, by address, with their bytes."""

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, _as_it_is):
        yield


def _as_it_is(saved: Any) -> Any:
    return saved
