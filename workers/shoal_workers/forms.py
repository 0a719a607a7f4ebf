"""How tensors lie in the buffers of the wire: as they are, or in blocks of few bits with a scale each.

Owns the forms, both ways. Block-wise symmetric quantisation after ZeRO++ (Wang et al. 2023): each block of a matrix is
rounded to whole multiples of its largest absolute value / 127 (8 bits: an error of at most max|x| / 254) or / 7 (4
bits). Vectors and spans that are small fall back to what they are; lengths need not divide into blocks. What is not
finite stays so: it has to stop the step, not vanish. Receivers sum what they unpack, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_recovery.state import Span

Source = Callable[[Span], Tensor]
Parts = Iterator[tuple[Span, Tensor]]

_BLOCKS = {8: 2048, 4: 512}  # elements with one scale: the scales add 0.2 and 1.6 per cent
_LARGEST = {8: 127, 4: 7}
_SCALE_BYTES = 4
_SMALL = 64  # elements


class Form(Protocol):
    def size(self, spans: Sequence[Span]) -> tuple[int, torch.dtype]:
        """Of a buffer for what these spans take."""

    def pack(self, spans: Sequence[Span], source: Source, room: Tensor | None = None) -> Tensor:
        """One contiguous tensor of this size: `room`, or else anywhere on the device of the source."""

    def unpack(self, buffer: Tensor, spans: Sequence[Span]) -> Parts:
        """What was packed of these spans, in their order."""


class Plain:
    """In `dtype`. A single span that has it already is not copied, unless `lasting` is false: its memory may go."""

    def __init__(self, dtype: torch.dtype, *, lasting: bool = True) -> None:
        self._dtype = dtype
        self._lasting = lasting

    def size(self, spans: Sequence[Span]) -> tuple[int, torch.dtype]:
        return sum(span.numel for span in spans), self._dtype

    def pack(self, spans: Sequence[Span], source: Source, room: Tensor | None = None) -> Tensor:
        parts = [source(span) for span in spans]
        if room is not None:
            return torch.cat(parts, out=room)
        whole = parts[0] if len(parts) == 1 and self._lasting else torch.cat(parts)
        return whole.to(self._dtype)

    def unpack(self, buffer: Tensor, spans: Sequence[Span]) -> Parts:
        yield from zip(spans, torch.split(buffer, [span.numel for span in spans]), strict=True)


class Blocks:
    """So many `bits` an element; what falls back is in `dtype`. The buffer has scales, what fell back, and the rest."""

    def __init__(self, bits: Literal[4, 8], dtype: torch.dtype, model: ModelSpec) -> None:
        self._bits = bits
        self._dtype = dtype
        self._matrices = frozenset(parameter.fqn for parameter in parameters(model) if len(parameter.shape) > 1)

    def size(self, spans: Sequence[Span]) -> tuple[int, torch.dtype]:
        return sum(self._sizes(spans)), torch.uint8

    def pack(self, spans: Sequence[Span], source: Source, room: Tensor | None = None) -> Tensor:
        scales, plain, codes = [], [], []
        for span in spans:
            if self._is_coded(span):
                scale, code = encode(source(span).float(), self._bits)
                scales.append(scale)
                codes.append(code)
            else:
                plain.append(source(span).to(self._dtype))
        return torch.cat([torch.cat(some).view(torch.uint8) for some in (scales, plain, codes) if some], out=room)

    def unpack(self, buffer: Tensor, spans: Sequence[Span]) -> Parts:
        scale_bytes, plain_bytes, code_bytes = torch.split(buffer, self._sizes(spans))
        scales, plain = scale_bytes.view(torch.float32), plain_bytes.view(self._dtype)
        for span in spans:
            if self._is_coded(span):
                count, size = num_blocks(span.numel, self._bits), _code_bytes(span.numel, self._bits)
                yield span, decode(scales[:count], code_bytes[:size], span.numel, self._bits)
                scales, code_bytes = scales[count:], code_bytes[size:]
            else:
                yield span, plain[: span.numel]
                plain = plain[span.numel :]

    def _is_coded(self, span: Span) -> bool:
        return span.fqn in self._matrices and span.numel >= _SMALL

    def _sizes(self, spans: Sequence[Span]) -> list[int]:
        """Bytes of the three parts of a buffer."""
        coded = [span.numel for span in spans if self._is_coded(span)]
        plain = sum(span.numel for span in spans) - sum(coded)
        return [
            sum(num_blocks(count, self._bits) for count in coded) * _SCALE_BYTES,
            plain * self._dtype.itemsize,
            sum(_code_bytes(count, self._bits) for count in coded),
        ]


def num_blocks(count: int, bits: int) -> int:
    return -(-count // _BLOCKS[bits])


def _code_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scale of each block, and the elements as bytes."""
    x_KB = _in_blocks(x, bits)
    scale_K = x_KB.abs().amax(dim=1) / _LARGEST[bits]
    scale_K = torch.where(scale_K.isfinite(), scale_K, torch.nan)
    whole_KB = torch.nan_to_num(x_KB / scale_K[:, None], nan=0.0).round_()
    code = whole_KB.flatten()[: len(x)].to(torch.int8)
    if bits == 8:
        return scale_K, code.view(torch.uint8)
    nibbles = torch.nn.functional.pad((code + 8).view(torch.uint8), (0, len(x) % 2))
    return scale_K, nibbles[0::2] | (nibbles[1::2] << 4)


def decode(scale_K: Tensor, code: Tensor, count: int, bits: int) -> Tensor:
    """In fp32."""
    if bits == 8:
        whole = code.view(torch.int8).float()
    else:
        whole = torch.stack((code & 15, code >> 4), dim=1).flatten()[:count].float() - 8
    return (_in_blocks(whole, bits) * scale_K[:, None]).flatten()[:count]


def _in_blocks(x: Tensor, bits: int) -> Tensor:
    """Rows of blocks, the last one filled up with zeros."""
    block = _BLOCKS[bits]
    return torch.nn.functional.pad(x, (0, num_blocks(len(x), bits) * block - len(x))).view(-1, block)
