"""Spans of parameters laid side by side in one flat tensor, addressed by their global coordinates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from shoal_recovery.state import Span


class FlatBuffer:
    """Zeros at first. Neighbouring spans of one parameter, given one after the other, become one interval."""

    def __init__(self, spans: Iterable[Span], dtype: torch.dtype, device: torch.device) -> None:
        self._intervals: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)  # first, last, offset
        offset = 0
        for span in spans:
            intervals = self._intervals[span.fqn]
            if intervals and intervals[-1][1] == span.first and self._end(intervals[-1]) == offset:
                intervals[-1] = (intervals[-1][0], span.last, intervals[-1][2])
            else:
                intervals.append((span.first, span.last, offset))
            offset += span.numel
        self.tensor = torch.zeros(offset, dtype=dtype, device=device)

    def view(self, span: Span) -> Tensor:
        """The elements of `span`, flat and contiguous. KeyError unless all of them lie here as one interval."""
        for first, last, offset in self._intervals.get(span.fqn, ()):
            if first <= span.first and span.last <= last:
                return self.tensor[offset + span.first - first : offset + span.last - first]
        raise KeyError(span)

    @staticmethod
    def _end(interval: tuple[int, int, int]) -> int:
        first, last, offset = interval
        return offset + last - first
