"""What a new live state takes over of the one before: buffers that lie as the new ones would, as they are.

Most of a survivor's state stays what it is when a plan changes, and memory that is new costs more than any copy into
it. Until the new state is whole the old one may be fallen back on, so nothing is lent that is written before that: of a
kind of which anything comes from elsewhere, all buffers that it comes into are new. Owns that rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal_recovery.state import Kind, Span, Tier, Transfer
from shoal_workers.flat import FlatBuffer, UnitBuffers

_IN_WEIGHTS = (Kind.WEIGHT, Kind.MASTER)  # masters in fp32 lie in the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Of a state that is whole. `coming`: the parameters of which some of that kind comes from elsewhere."""

    weights: UnitBuffers
    gradients: UnitBuffers
    owned: Mapping[Kind, FlatBuffer]
    coming: frozenset[tuple[str, Kind]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Gives buffers for spans on this device, lent ones where it can, and else blank ones: all of a state is written
    before it is whole, and memory is not to be touched twice. `dtype` is that of weights."""

    lent: Lent | None
    dtype: torch.dtype
    device: torch.device

    def weights(self, unit: int | None, spans: Sequence[Span]) -> FlatBuffer:
        before = None if self.lent is None or unit is None else self.lent.weights.buffer_of(unit)
        return self._same(before, spans, self.dtype, _IN_WEIGHTS)

    def gradients(self, unit: int | None, spans: Sequence[Span]) -> FlatBuffer:
        """They are no state: what is in them is over when a step begins."""
        before = None if self.lent is None or unit is None else self.lent.gradients.buffer_of(unit)
        return self._same(before, spans, torch.float32, ())

    def owned(self, kind: Kind, spans: Sequence[Span]) -> FlatBuffer:
        before = None if self.lent is None else self.lent.owned[kind]
        return self._same(before, spans, torch.float32, (kind,))

    def _same(
        self, before: FlatBuffer | None, spans: Sequence[Span], dtype: torch.dtype, kinds: Iterable[Kind]
    ) -> FlatBuffer:
        if before is not None and self.lent is not None:
            coming = any((span.fqn, kind) in self.lent.coming for span in spans for kind in kinds)
            fits = (before.spans, before.tensor.dtype, before.tensor.device) == (tuple(spans), dtype, self.device)
            if fits and not coming:
                return before
        return FlatBuffer(spans, dtype, self.device, blank=True)


def coming(transfers: Iterable[Transfer]) -> frozenset[tuple[str, Kind]]:
    """What these transfers bring that the rank does not have as it is to be."""
    return frozenset((one.key.fqn, one.key.kind) for one in transfers if one.tier is not Tier.OWN or one.is_derived)
