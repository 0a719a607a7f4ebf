"""Documents that are seen by themselves, on a CUDA device: one kernel for all of them in 16 bits, one by one in 32, and
both with the numbers of a CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from document_ground import document_job
from engine_runs import assert_same_bits, worst_difference
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shoal_workers.attention import attend
from shoal_workers.borders import BEGINS, borders_of
from shoal_workers.exchange import SoloExchange
from shoal_workers.solo import RunRequest, build_rank, run_rank, run_solo, solo_plan, whole_state

STEPS = 10
GPU = torch.device("cuda", 0)
KERNEL = "torch_attn::_varlen_attn"
LENGTHS = (70, 1, 57, 100, 28)  # of two sequences


def test_one_device_has_the_numbers_of_a_cpu(tmp_path: Path) -> None:
    spec = document_job(tmp_path, tied=False)
    ours, reference = run_solo(spec, STEPS, device="cuda:0"), run_solo(spec, STEPS)
    np.testing.assert_allclose(ours.losses, reference.losses, rtol=1e-4)
    assert worst_difference(ours.weights, reference.weights) <= 1e-4


def test_bf16_goes_through_one_kernel_and_follows_the_losses_of_fp32(tmp_path: Path) -> None:
    spec = document_job(tmp_path, precision="bf16")
    reference = run_solo(replace(spec, train=replace(spec.train, precision="fp32")), STEPS)
    np.testing.assert_allclose(run_solo(spec, STEPS, device="cuda:0").losses, reference.losses, rtol=0.02)
    built = build_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=1, device="cuda:0"), 0, SoloExchange())
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        built.engine.run(until_step=1, report=lambda report: None, stop_after=lambda: None)
    assert KERNEL in {event.key for event in seen.key_averages()}


def test_deterministic_kernels_give_the_same_bits(tmp_path: Path) -> None:
    spec = document_job(tmp_path, precision="bf16")
    spec = replace(spec, train=replace(spec.train, deterministic=True))
    request = RunRequest(job=spec, plan=solo_plan(spec), until_step=3, device="cuda:0")
    one, other = (whole_state(spec, [run_rank(request, 0, SoloExchange())]) for _ in range(2))
    assert_same_bits(one, other)


@pytest.mark.parametrize("window", [None, 1, 16, 500])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_kernel_sees_what_a_cpu_sees(window: int | None, kv_heads: int) -> None:
    """Forward and backward, within what bf16 rounds."""
    torch.manual_seed(1)
    given = [torch.randn(2, heads, 128, 64) for heads in (4, kv_heads, kv_heads)]
    slope_BSC = torch.randn(2, 128, 256)
    ids = torch.arange(256)
    starts = list(itertools.accumulate(LENGTHS, initial=0))[:-1]
    ids[starts] = ~(ids[starts] | BEGINS)
    rows = torch.cat((ids.view(2, 128), torch.zeros(2, 1, dtype=torch.long)), dim=1)

    def passed(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        borders = borders_of(rows, device)
        assert borders.lengths == LENGTHS
        # As heads come out of a product: positions before heads in memory.
        heads = [tensor.transpose(1, 2).contiguous().to(device, dtype).requires_grad_() for tensor in given]
        out = attend(*(tensor.transpose(1, 2) for tensor in heads), window=window, borders=borders)
        out.backward(slope_BSC.to(device, dtype))
        return [out.detach().float().cpu(), *(one.grad.float().cpu() for one in heads if one.grad is not None)]

    for ours, expected in zip(passed(GPU, torch.bfloat16), passed(torch.device("cpu"), torch.float32), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.05)
