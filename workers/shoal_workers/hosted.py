"""Optimizer state that a plan keeps in the memory of the node's host, and what passes between it and the device.

Owns these tensors and one buffer, through which a unit at a time gradients come and new weights go. On a CPU both ends
are the same memory, and all is done alike. Does not own the arithmetic of an update (`optimizer`) nor the charges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, Kind, Span
from shoal_workers.flat import FlatBuffer

_HOST = torch.device("cpu")


class HostedState:
    """Zeros at first; `units` are the spans by unit. The masters here are never the weights of a device."""

    def __init__(self, units: Mapping[int, Sequence[Span]], device: torch.device) -> None:
        self.units = tuple(tuple(spans) for _, spans in sorted(units.items()))
        spans = [span for unit in self.units for span in unit]
        self._owned = {kind: FlatBuffer(spans, torch.float32, _HOST) for kind in OWNED_KINDS}
        # Pinned, or copies are several times slower. Nothing else is, as pinned memory is rounded up by far.
        self._passing = torch.empty(largest(units), dtype=torch.float32, pin_memory=device.type == "cuda")

    def __contains__(self, span: Span) -> bool:
        return span in self._owned[Kind.MASTER]

    def view(self, kind: Kind, span: Span) -> Tensor:
        """KeyError unless all of the span lies here."""
        return self._owned[kind].view(span)

    def slots(self, unit: Sequence[Span]) -> Sequence[Tensor]:
        """Where the gradients of a unit's spans come: the same place for each unit."""
        numels = [span.numel for span in unit]
        return torch.split(self._passing[: sum(numels)], numels)

    def bring(self, unit: Sequence[Span], gradient: Callable[[Span], Tensor]) -> None:
        """The gradients of a unit, from wherever `gradient` has them, into its slots."""
        for span, slot in zip(unit, self.slots(unit), strict=True):
            slot.copy_(gradient(span))

    def give(self, span: Span, weight: Tensor) -> None:
        """`weight` becomes what the master of these elements is. The gradients of its unit are used up by then."""
        passing = self._passing.view(weight.dtype)[: span.numel]
        weight.copy_(passing.copy_(self.view(Kind.MASTER, span)))


def largest(units: Mapping[int, Sequence[Span]]) -> int:
    """Elements of the unit that has most."""
    return max((sum(span.numel for span in spans) for spans in units.values()), default=0)


def passing_bytes(units: Mapping[int, Sequence[Span]]) -> int:
    """Of the buffer through which gradients and weights pass."""
    return largest(units) * ELEMENT_BYTES
