"""Causal attention over whole sequences, or over each of the documents within them.

Owns which tokens see which, and by which kernels. Documents (`Borders`) go through one kernel for sequences of any
length where torch has it: on CUDA devices from Ampere on, in 16 bits. Elsewhere each goes through the usual kernel by
itself, so no mask is made and nothing is computed that would be masked; the backward computes each again, so that no
more is kept of many documents than of one sequence.

Shapes: B sequences, S positions, T = B * S tokens, N heads and K key-value heads of this rank, D head size, C = N * D,
L positions of one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_workers.borders import Borders
from shoal_workers.slopes import gradients

_MOST_HEAD_SIZE = 256  # of flash attention
_HEAD_SIZE_STEP = 8
_AMPERE = (8, 0)


def attend(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, window: int | None, borders: Borders | None = None
) -> Tensor:
    """[B, S, C]. A query sees itself and the `window` - 1 keys before it, of its own document where there are
    borders."""
    if borders is None or borders.is_trivial:
        return _whole(q_BNSD, k_BKSD, v_BKSD, window).transpose(1, 2).flatten(2)
    q_TND, k_TKD, v_TKD = (heads.transpose(1, 2).flatten(0, 1) for heads in (q_BNSD, k_BKSD, v_BKSD))
    if _has_kernel(q_TND):
        mixed_TND = _at_once(q_TND, k_TKD, v_TKD, window, borders)
    else:
        found = _OneByOne.apply(q_TND, k_TKD, v_TKD, window, borders.lengths)  # type: ignore[no-untyped-call]
        mixed_TND = cast(Tensor, found)
    return mixed_TND.flatten(1).view(*borders.positions_BS.shape, -1)


def _whole(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, window: int | None) -> Tensor:
    times = q_BNSD.shape[1] // k_BKSD.shape[1]
    near_SS = _near(q_BNSD, window)
    if times > 1 and q_BNSD.is_cuda and q_BNSD.dtype == torch.float32:
        # No fused kernel of CUDA devices for 32 bits knows groups, and what is left keeps S x S numbers of each head.
        k_BKSD, v_BKSD, times = *for_all_heads(k_BKSD, v_BKSD, times), 1
    return F.scaled_dot_product_attention(
        q_BNSD, k_BKSD, v_BKSD, attn_mask=near_SS, is_causal=near_SS is None, enable_gqa=times > 1
    )


def for_all_heads(k_BKSD: Tensor, v_BKSD: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """Copies of keys and values, one for each of the `times` heads in a row that share them."""
    return k_BKSD.repeat_interleave(times, 1), v_BKSD.repeat_interleave(times, 1)


def _near(q_BNSD: Tensor, window: int | None) -> Tensor | None:
    """Which keys a query of this window sees, [S, S]; None where these are all before it. Jobs do not train on longer
    sequences than the window: this is for those that look further."""
    length = q_BNSD.shape[-2]
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=q_BNSD.device).tril().triu(1 - window)


def _has_kernel(q_TND: Tensor) -> bool:
    size = q_TND.shape[-1]
    return (
        q_TND.is_cuda
        and q_TND.dtype in (torch.bfloat16, torch.float16)
        and size <= _MOST_HEAD_SIZE
        and size % _HEAD_SIZE_STEP == 0
        and torch.cuda.get_device_capability(q_TND.device) >= _AMPERE
        and torch.backends.cuda.is_flash_attention_available()
    )


def _at_once(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int | None, borders: Borders) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # registers operators, which only this needs

    longest, firsts = max(borders.lengths), borders.firsts
    before = -1 if window is None or longest <= window else window - 1
    mixed = varlen_attn(
        q_TND,
        k_TKD,
        v_TKD,
        firsts,
        firsts,
        longest,
        longest,
        window_size=(before, 0),
        enable_gqa=q_TND.shape[1] != k_TKD.shape[1],
    )
    return cast(Tensor, mixed)


class _OneByOne(torch.autograd.Function):
    """Keeps queries, keys and values alone."""

    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int | None, lengths: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(q_TND, k_TKD, v_TKD)
        ctx.window, ctx.lengths = window, lengths
        mixed_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
        for mixed_LND, q_LND, k_LKD, v_LKD in _documents(lengths, mixed_TND, q_TND, k_TKD, v_TKD):
            mixed_LND.copy_(_one(q_LND, k_LKD, v_LKD, window))
        return mixed_TND

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        saved = ctx.saved_tensors
        found = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in saved)
        for slope_LND, q_LND, k_LKD, v_LKD, *targets in _documents(ctx.lengths, slopes[0], *saved, *found):
            heads = tuple(one.detach().requires_grad_() for one in (q_LND, k_LKD, v_LKD))
            with torch.enable_grad():
                mixed_LND = _one(heads[0], heads[1], heads[2], ctx.window)
            for target, gradient in zip(targets, gradients(mixed_LND, heads, slope_LND), strict=True):
                target.copy_(gradient)
        return *found, None, None


def _documents(lengths: tuple[int, ...], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each in all of them."""
    return zip(*(torch.split(tensor, list(lengths)) for tensor in tensors), strict=True)


def _one(q_LND: Tensor, k_LKD: Tensor, v_LKD: Tensor, window: int | None) -> Tensor:
    q_BNLD, k_BKLD, v_BKLD = (heads.transpose(0, 1).unsqueeze(0) for heads in (q_LND, k_LKD, v_LKD))
    return _whole(q_BNLD, k_BKLD, v_BKLD, window).squeeze(0).transpose(0, 1)
