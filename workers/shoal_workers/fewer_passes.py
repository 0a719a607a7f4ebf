"""Norms and rotary positions with gradients of their own, which pass through memory less often than autograd's.

On a CPU both take as long as memory does: this norm needs two fifths of the time of one that autograd goes back
through, and positions three fifths. GPUs have a kernel for norms, and a compiler makes one of anything: what they are
given is written plainly.

Shapes: B sequences, S positions, T = B * S tokens, H hidden, N heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """As F.rms_norm; keeps its input alone for the backward, in whatever precision."""
    if x_BSH.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x_BSH, weight_H.shape, weight_H, eps)
    normed_BSH: Tensor = _RmsNorm.apply(x_BSH, weight_H, eps)  # type: ignore[no-untyped-call]
    return normed_BSH


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float) -> Tensor:
    """torch has a kernel of its own for it, and a backward, on all devices."""
    return F.layer_norm(x_BSH, weight_H.shape, weight_H, bias_H, eps)


def turned(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Every pair (i, i + D/2) by the angle of its position; tables may be [B, 1, S, D], too."""
    if torch.compiler.is_compiling():
        low, high = x_BNSD.chunk(2, dim=-1)
        return (x_BNSD * cos_SD + torch.cat((-high, low), dim=-1) * sin_SD).to(x_BNSD.dtype)
    turned_BNSD: Tensor = _Turned.apply(x_BNSD, cos_SD, sin_SD)  # type: ignore[no-untyped-call]
    return turned_BNSD


class _RmsNorm(torch.autograd.Function):
    """Computes in fp32."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_TH = x_BSH.flatten(0, -2).float()
        square_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True).square_().div_(x_TH.shape[-1]).add_(eps)
        scale_T1 = square_T1.rsqrt() + 0 * square_T1  # not nought where no float can square x: nobody would notice
        ctx.save_for_backward(x_BSH, weight_H, scale_T1)
        normed_TH: Tensor = (x_TH * scale_T1).mul_(weight_H)
        return normed_TH.to(x_BSH.dtype).view(x_BSH.shape)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        """With y = x s w and s = (mean(x^2) + eps)^(-1/2), the slope of x is s (w g - x s mean(w g x s))."""
        x_BSH, weight_H, scale_T1 = ctx.saved_tensors
        slope_TH = slopes[0].flatten(0, -2).float()
        scaled_TH = x_BSH.flatten(0, -2).float() * scale_T1
        product_TH = slope_TH * scaled_TH
        mean_T1 = (product_TH @ weight_H.float()).unsqueeze(-1).div_(product_TH.shape[-1])
        weight_slope_H = product_TH.sum(0).to(weight_H.dtype) if ctx.needs_input_grad[1] else None
        x_slope_TH = torch.mul(slope_TH, scale_T1, out=product_TH).mul_(weight_H)
        x_slope_TH.addcmul_(scaled_TH, mean_T1.mul_(scale_T1), value=-1)
        return x_slope_TH.to(x_BSH.dtype).view(x_BSH.shape), weight_slope_H, None


class _Turned(torch.autograd.Function):
    """The backward turns by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        ctx.tables = cos_SD, sin_SD
        return _turn(x_BNSD, cos_SD, sin_SD, 1)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        cos_SD, sin_SD = ctx.tables
        return _turn(slopes[0], cos_SD, sin_SD, -1), None, None


def _turn(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor, sign: int) -> Tensor:
    out_BNSD = x_BNSD * cos_SD  # fp32, as the tables are
    (x_low, x_high), (out_low, out_high), (sin_low, sin_high) = (
        tensor.chunk(2, dim=-1) for tensor in (x_BNSD, out_BNSD, sin_SD)
    )
    out_low.addcmul_(x_high, sin_low, value=-sign)
    out_high.addcmul_(x_low, sin_high, value=sign)
    return out_BNSD.to(x_BNSD.dtype)
