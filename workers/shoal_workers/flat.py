"""Spans of parameters laid side by side in flat tensors, addressed by their global coordinates.

Owns the storage: what is needed only now and then is closed in between, and takes no memory. Does not own when that
is, nor the charges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shoal_planner.slices import Portion
from shoal_recovery.state import Span


class FlatBuffer:
    """Zeros at first; where it is `blank`, whatever the memory has. Neighbouring spans of one parameter, given one
    after the other, become one interval."""

    def __init__(self, spans: Iterable[Span], dtype: torch.dtype, device: torch.device, *, blank: bool = False) -> None:
        self.spans = tuple(spans)
        self._intervals: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)  # first, last, offset
        offset = 0
        for span in self.spans:
            intervals = self._intervals[span.fqn]
            if intervals and intervals[-1][1] == span.first and self._end(intervals[-1]) == offset:
                intervals[-1] = (intervals[-1][0], span.last, intervals[-1][2])
            else:
                intervals.append((span.first, span.last, offset))
            offset += span.numel
        self.tensor = (torch.empty if blank else torch.zeros)(offset, dtype=dtype, device=device)

    def view(self, span: Span) -> Tensor:
        """The elements of `span`, flat and contiguous. KeyError unless all of them lie here as one interval."""
        offset = self._find(span)
        if offset is None:
            raise KeyError(span)
        return self.tensor[offset : offset + span.numel]

    def __contains__(self, span: Span) -> bool:
        """Whether `view` has it."""
        return self._find(span) is not None

    @property
    def num_bytes(self) -> int:
        """When open."""
        return self.tensor.numel() * self.tensor.itemsize

    def close(self) -> None:
        """The elements are lost. Tensors that share the storage, those that autograd saved among them, stay valid for
        when it is open again; nothing may be on its way into it."""
        self.tensor.untyped_storage().resize_(0)

    def open(self) -> None:
        """With whatever the memory has; what is open stays as it is."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != self.num_bytes:  # to its own size would be a copy
            storage.resize_(self.num_bytes)

    def _find(self, span: Span) -> int | None:
        for first, last, offset in self._intervals.get(span.fqn, ()):
            if first <= span.first and span.last <= last:
                return offset + span.first - first
        return None

    @staticmethod
    def _end(interval: tuple[int, int, int]) -> int:
        first, last, offset = interval
        return offset + last - first


class UnitBuffers:
    """One kind of state: per unit a buffer of what is `kept`, and per portion one of what is `whole` while it is used.
    Units that are not `split` keep all of it; of the others the whole is closed at first. `buffer` makes each,
    for what is kept of a unit or (None) for something else."""

    def __init__(
        self,
        kept: Mapping[int, Sequence[Span]],
        whole: Mapping[Portion, Sequence[Span]],
        split: frozenset[int],
        buffer: Callable[[int | None, Sequence[Span]], FlatBuffer],
    ) -> None:
        self.split = split
        self._kept = {unit: buffer(unit, spans) for unit, spans in kept.items()}
        self._whole: dict[Portion, FlatBuffer] = {}
        for portion, spans in whole.items():
            self._whole[portion] = buffer(None, spans)
            self._whole[portion].close()

    def kept(self, unit: int, span: Span) -> Tensor:
        return self._kept[unit].view(span)

    def buffer_of(self, unit: int) -> FlatBuffer | None:
        """Where what is kept of it lies."""
        return self._kept.get(unit)

    def whole(self, portion: Portion, span: Span) -> Tensor:
        """The same tensor to autograd's eyes whatever is written: who writes sees to it that it fits."""
        return self._buffer(portion).view(span)

    def whole_now_or_later(self, portion: Portion, span: Span) -> Tensor:
        """As `whole`, also of a portion that is closed: the tensor may be used when it is open. (A view of no memory
        can not be made, but one may lose its memory.)"""
        buffer = self._buffer(portion)
        closed = not buffer.tensor.untyped_storage().nbytes()
        if closed:
            buffer.open()
        view = buffer.view(span)
        if closed:
            buffer.close()
        return view

    def num_bytes(self, portion: Portion) -> int:
        """What it takes while it is open, beside what is kept."""
        return self._whole[portion].num_bytes if portion in self._whole else 0

    def open(self, portion: Portion) -> None:
        if portion in self._whole:
            self._whole[portion].open()

    def close(self, portion: Portion) -> None:
        if portion in self._whole:
            self._whole[portion].close()

    def clear(self) -> None:
        """What is kept of the split units becomes zeros. What is kept of others is lost, and takes no memory until
        `reopen`."""
        for unit, buffer in self._kept.items():
            if unit in self.split:
                buffer.open()
                buffer.tensor.zero_()
            else:
                buffer.close()

    def reopen(self, unit: int) -> None:
        """After `clear`, with whatever the memory has; again, it changes nothing."""
        self._kept[unit].open()

    def zero_whole(self, portion: Portion) -> None:
        if portion in self._whole:
            self._whole[portion].tensor.zero_()

    def _buffer(self, portion: Portion) -> FlatBuffer:
        return self._whole[portion] if portion.unit in self.split else self._kept[portion.unit]
