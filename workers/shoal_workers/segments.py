"""The units of a stage, each an autograd graph of its own: forward one after the other, backward in reverse.

Owns what is kept of a unit between its forward and its backward, and its charge. Between two units activations are
detached, which copies nothing. So there is plain code before and after each unit in both directions: a unit's weights
are needed in `_forward` and in `_backward` and nowhere else. When the latter returns for the last micro-batch of a
step, its gradients are complete, but for those of weights that are put off: they are with `weight_gradients`. A unit
that is recomputed in full keeps its input alone, and its graph is made in `_backward`. Does not own what travels
between stages (`stage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal_workers.borders import Borders
from shoal_workers.circulation import Circulation
from shoal_workers.memory import DeviceMemory
from shoal_workers.model import Unit
from shoal_workers.products import WeightProduct
from shoal_workers.remaking import Remaking
from shoal_workers.samples import Samples
from shoal_workers.scattering import Part
from shoal_workers.slopes import backward

ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A unit between its forward and its backward, for one micro-batch."""

    entering: Tensor  # a leaf: token ids, or activations with a gradient to come
    leaving: Tensor
    borders: Borders | None


class Segments:
    """`units` follow each other. The last of them, if it is the model's last, gives its summed loss divided by
    `num_tokens`. Their weights come and their gradients go by way of `circulation`."""

    def __init__(self, units: Sequence[Unit], num_tokens: int, memory: DeviceMemory, circulation: Circulation) -> None:
        self._circulation = circulation
        self._units = tuple(units)
        self._num_tokens = num_tokens
        self._memory = memory
        self._kept_bytes: dict[int, int] = {}  # of one micro-batch, by unit; measured in its first forward
        self._later_bytes: dict[int, int] = {}  # the same, for gradients of weights that are put off
        self._flights: dict[int, list[_Flight]] = {}
        self._later: dict[int, list[tuple[int, tuple[WeightProduct, ...]]]] = {}  # with the number of their unit

    @property
    def takes_tokens(self) -> bool:
        return self._units[0].takes_tokens

    @property
    def gives_loss(self) -> bool:
        return self._units[-1].gives_loss

    def reads(self, samples: Samples) -> bool:
        """Whether it needs to know more of a micro-batch than what enters: tokens, targets, where documents begin."""
        return self.takes_tokens or self.gives_loss or samples.by_document

    def begin(self) -> None:
        """Before each step: forgets what a refused one left behind."""
        self._flights.clear()
        self._later.clear()

    def forward(
        self, micro_batch: int, entering: Tensor, targets_BS: Tensor | None, borders: Borders | None = None
    ) -> Tensor:
        """Activations, or this micro-batch's part of the loss; detached."""
        flights = self._flights[micro_batch] = []
        for unit in self._units:
            with self._circulation.weights(unit.number):
                leaving = self._forward(unit, entering, targets_BS, borders)
            flights.append(_Flight(entering=entering, leaving=leaving, borders=borders))
            entering = leaving.detach()
            if unit is not self._units[-1]:
                entering.requires_grad_()
        self._memory.charge(ACTIVATIONS, _num_bytes(borders))
        return entering

    def backward(self, micro_batch: int, slope: Tensor | None) -> Tensor | None:
        """From the gradient of what left (none where that is the loss) to that of what entered (none where that is
        tokens). Gradients of weights that are not put off add up in the live state."""
        flights = self._flights.pop(micro_batch)
        borders = flights[0].borders
        for unit in reversed(self._units):
            part = Part.ALL if unit.put_off is None else Part.VECTORS
            with self._circulation.weights(unit.number), self._circulation.gradients(unit.number, part):
                slope = self._backward(unit, flights.pop(), slope)
            if unit.put_off is not None:
                products = unit.put_off.take()
                self._charge_later(unit, products)
                self._later.setdefault(micro_batch, []).append((unit.number, products))
        self._memory.release(ACTIVATIONS, _num_bytes(borders))
        return slope

    def forward_only(
        self,
        entering: Tensor,
        targets_BS: Tensor | None,
        seen: Callable[[int, Tensor], None],
        borders: Borders | None = None,
    ) -> Tensor:
        """As `forward`, with no backward to come: nothing is kept. `seen` is told what comes out of each unit."""
        with torch.no_grad():
            for unit in self._units:
                with self._circulation.weights(unit.number):
                    entering = unit(entering, targets_BS, borders)
                seen(unit.number, entering)
        return entering / self._num_tokens if self.gives_loss else entering

    def weight_gradients(self, micro_batch: int) -> None:
        """What was put off in the backward of this micro-batch, in the same order."""
        for number, products in self._later.pop(micro_batch, []):
            with self._circulation.gradients(number, Part.MATRICES):
                for product in products:
                    product.add()
            self._memory.release(ACTIVATIONS, self._later_bytes[number])

    def _forward(self, unit: Unit, entering: Tensor, targets_BS: Tensor | None, borders: Borders | None) -> Tensor:
        if unit.recompute != "full":
            return self._graph(unit, entering, targets_BS, borders)
        self._memory.charge(ACTIVATIONS, self._input_bytes(unit, entering))
        with torch.no_grad():
            return unit(entering, targets_BS, borders)

    def _backward(self, unit: Unit, flight: _Flight, slope: Tensor | None) -> Tensor | None:
        leaving = flight.leaving
        if unit.recompute == "full":
            self._memory.release(ACTIVATIONS, self._input_bytes(unit, flight.entering))
            leaving = self._graph(unit, flight.entering, None, flight.borders)
        if leaving.requires_grad:  # else nothing is trained from here down
            backward(leaving, slope)
        self._memory.release(ACTIVATIONS, self._kept_bytes[unit.number])
        return flight.entering.grad

    def _graph(self, unit: Unit, entering: Tensor, targets_BS: Tensor | None, borders: Borders | None) -> Tensor:
        """A forward that autograd can go back through; the first one of a unit finds out how much it keeps for that."""
        num_bytes = self._kept_bytes.get(unit.number)
        if num_bytes is not None:
            self._memory.charge(ACTIVATIONS, num_bytes)
            return self._run(unit, entering, targets_BS, borders)
        noted: dict[int, int] = {}
        leaving = self._run(unit, entering, targets_BS, borders, noted)
        elsewhere = unit.lasting if unit is not self._units[0] else (entering, *unit.lasting)
        for tensor in (*elsewhere, *(() if borders is None else borders.tensors)):  # charged by others
            noted.pop(tensor.untyped_storage().data_ptr(), None)
        self._kept_bytes[unit.number] = sum(noted.values())
        self._memory.charge(ACTIVATIONS, self._kept_bytes[unit.number])
        return leaving

    def _charge_later(self, unit: Unit, products: tuple[WeightProduct, ...]) -> None:
        if unit.number not in self._later_bytes:
            kept = [tensor.untyped_storage() for product in products for tensor in (product.left_TR, product.right_TC)]
            self._later_bytes[unit.number] = sum({entry.data_ptr(): entry.nbytes() for entry in kept}.values())
        self._memory.charge(ACTIVATIONS, self._later_bytes[unit.number])

    def _run(
        self,
        unit: Unit,
        entering: Tensor,
        targets_BS: Tensor | None,
        borders: Borders | None,
        noted: dict[int, int] | None = None,
    ) -> Tensor:
        with _hooks(unit.remaking, noted):
            leaving = unit(entering, targets_BS, borders)
        return leaving / self._num_tokens if unit.gives_loss else leaving

    def _input_bytes(self, unit: Unit, entering: Tensor) -> int:
        """What enters the first unit is charged as what travels."""
        return 0 if unit is self._units[0] else entering.untyped_storage().nbytes()


def _num_bytes(borders: Borders | None) -> int:
    """All units of a micro-batch have the same."""
    return 0 if borders is None else sum(tensor.nbytes for tensor in borders.tensors)


def _hooks(remaking: Remaking | None, noted: dict[int, int] | None) -> AbstractContextManager[object]:
    """On what autograd saves inside; into `noted` go the storages that it keeps so, by address, with their bytes."""
    if noted is None:
        if remaking is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(remaking.pack, Remaking.unpack)

    def pack(tensor: Tensor) -> Any:
        saved = tensor if remaking is None else remaking.pack(tensor)
        if saved is tensor:
            storage = tensor.untyped_storage()
            noted[storage.data_ptr()] = storage.nbytes()
        return saved

    return torch.autograd.graph.saved_tensors_hooks(pack, Remaking.unpack)
