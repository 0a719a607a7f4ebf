"""Norms and rotary positions with gradients of their own give what autograd finds for the plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_workers.fewer_passes import rms_norm, turned

EPS = 1e-5


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def plain_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def results(compute: Callable[..., Tensor], *arguments: Tensor | float) -> list[Tensor]:
    """What it gives, and the gradients of what has one, of a sum with weights."""
    leaves = [it.detach().requires_grad_(it.requires_grad) if isinstance(it, Tensor) else it for it in arguments]
    found = compute(*leaves)
    (found.float() * torch.linspace(-1, 2, found.numel()).view(found.shape)).sum().backward()
    return [found.detach(), *(it.grad for it in leaves if isinstance(it, Tensor) and it.grad is not None)]


def assert_close(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    assert len(found) == len(expected) > 1
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape
        assert (ours.double() - plain.double()).abs().max() <= bound * plain.double().abs().max()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_norms_are_those_of_torch(dtype: torch.dtype, bound: float, scale: float) -> None:
    """Also where `eps` decides, and of inputs that are not contiguous."""
    torch.manual_seed(1)
    x = (scale * torch.randn(3, 24, 5, dtype=torch.float64)).transpose(1, 2).to(dtype).requires_grad_()
    weight = torch.randn(24, dtype=torch.float64).to(dtype).requires_grad_()
    assert_close(results(rms_norm, x, weight, EPS), results(plain_norm, x, weight, EPS), bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_positions_are_turned_as_pairs(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 7, 3, 8).to(dtype).transpose(1, 2).requires_grad_()  # as heads come: B, S, N, D
    angles = torch.randn(7, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    assert_close(results(turned, x, cos, sin), results(plain_turn, x, cos, sin), bound)


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_what_cannot_be_squared_is_not_passed_on_as_a_number(value: float) -> None:
    """torch gives nought, and no number in the backward alone."""
    x = torch.ones(2, 8)
    x[1, 3] = value
    found = rms_norm(x, torch.ones(8), EPS)
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_a_norm_keeps_its_input_alone() -> None:
    kept: list[Tensor] = []
    x = torch.randn(4, 16, 8).bfloat16().requires_grad_()
    weight = torch.ones(8).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        rms_norm(x, weight, EPS)
    assert {tensor.data_ptr() for tensor in kept if tensor.numel() == x.numel()} == {x.data_ptr()}
