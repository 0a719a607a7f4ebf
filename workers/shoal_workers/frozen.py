"""Weights that a rank computes with and nobody trains: those of a job's base, in the precision of the job.

They are no state: no step changes them, so no snapshot has them, and whoever lacks some reads them again from where the
job begins (`first_values`). What a survivor has of them it keeps, whatever became of its state. Owns the buffers, one
for each unit. Does not own the charges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import Parameter, frozen
from shoal_recovery.state import Span, common, without
from shoal_workers.first_values import FirstValues
from shoal_workers.flat import FlatBuffer

_AT_ONCE = 1 << 26  # elements that are read at a time


class FrozenWeights:
    """By unit the spans of what `known` describes, by name; of `before` whatever fits is taken over."""

    def __init__(
        self,
        spans: Mapping[int, Sequence[Span]],
        known: Mapping[str, Parameter],
        dtype: torch.dtype,
        device: torch.device,
        before: FrozenWeights | None = None,
    ) -> None:
        self._known = known
        self._before = before
        self._units: dict[int, FlatBuffer] = {}
        self._lacking: list[tuple[FlatBuffer, Span]] = []
        for unit, some in spans.items():
            same = None if before is None else before.same(unit, some, dtype, device)
            self._units[unit] = same or FlatBuffer(some, dtype, device, blank=True)
            if same is None:
                self._lacking.extend((self._units[unit], span) for span in some)
        self._leaves: dict[str, Tensor] = {}

    @property
    def is_whole(self) -> bool:
        return not self._lacking

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._units.values())

    def same(self, unit: int, spans: Sequence[Span], dtype: torch.dtype, device: torch.device) -> FlatBuffer | None:
        """What lies here as these would lie."""
        found = self._units.get(unit)
        if found is None or any(span.fqn == lacked.fqn for span in spans for _, lacked in self._lacking):
            return None
        fits = (found.spans, found.tensor.dtype, found.tensor.device) == (tuple(spans), dtype, device)
        return found if fits else None

    def fill(self, values: Callable[[], FirstValues], go_on: Callable[[], None] = lambda: None) -> None:
        """With what is lacking: what lies elsewhere in memory, and else what `values`, asked for where there is need,
        read. `go_on` is called before each part, and may raise."""
        read: FirstValues | None = None
        while self._lacking:
            buffer, span = self._lacking[0]
            here = () if self._before is None else self._before.spans_of(span)
            for part in here:
                buffer.view(part).copy_(self._before_view(part))
            for gap in without((span,), here):
                read = values() if read is None else read
                for first in range(gap.first, gap.last, _AT_ONCE):
                    go_on()
                    part = Span(fqn=gap.fqn, first=first, last=min(gap.last, first + _AT_ONCE))
                    buffer.view(part).copy_(read(self._known[part.fqn], part.first, part.last))
            del self._lacking[0]
        self._before = None

    def spans_of(self, span: Span) -> tuple[Span, ...]:
        """What of it lies here, and has been filled."""
        lacking = {lacked for _, lacked in self._lacking}
        held = (one for buffer in self._units.values() for one in buffer.spans)
        return common((span,), tuple(one for one in held if one.fqn == span.fqn and one not in lacking))

    def view(self, span: Span) -> Tensor:
        """Flat. KeyError unless all of it lies here."""
        for buffer in self._units.values():
            if span in buffer:
                return buffer.view(span)
        raise KeyError(span)

    def _before_view(self, span: Span) -> Tensor:
        assert self._before is not None
        return self._before.view(span)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._known

    def parameter(self, fqn: str) -> Tensor:
        """All rows that this rank holds. KeyError if it holds none."""
        if fqn not in self._leaves:
            span = next((one for buffer in self._units.values() for one in buffer.spans if one.fqn == fqn), None)
            if span is None:
                raise KeyError(fqn)
            self._leaves[fqn] = self.view(span).view(-1, *self._known[fqn].shape[1:])
        return self._leaves[fqn]

    def copies(self) -> dict[Span, Tensor]:
        """By span, fp32 on the host."""
        spans = (span for buffer in self._units.values() for span in buffer.spans)
        return {span: self.view(span).detach().float().cpu().clone() for span in spans}


def frozen_weights(
    model: ModelSpec, spans: Sequence[Span], dtype: torch.dtype, device: torch.device, before: FrozenWeights | None
) -> FrozenWeights:
    """Of a rank that computes with these spans of a model."""
    known = {parameter.fqn: parameter for parameter in frozen(model)}
    by_unit: dict[int, list[Span]] = {}
    for span in spans:
        by_unit.setdefault(known[span.fqn].units[0], []).append(span)
    return FrozenWeights(by_unit, known, dtype, device, before)
