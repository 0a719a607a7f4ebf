"""Backwards that begin with a slope are autograd's own, and no first step of a process waits for imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from shoal_workers.slopes import backward, gradients

FIRST_STEPS = """
import dataclasses
import sys
from engine_runs import job
import shoal_workers.rank
from shoal_workers.exchange import SoloExchange
from shoal_workers.solo import RunRequest, run_rank, solo_plan

before = set(sys.modules)
spec = job(steps=2)
whole = solo_plan(spec)
(pipeline,) = whole.pipelines
(stage,) = pipeline.stages
stage = dataclasses.replace(stage, recompute="selective")
plan = dataclasses.replace(whole, pipelines=(dataclasses.replace(pipeline, stages=(stage,)),))
run_rank(RunRequest(job=spec, plan=plan, until_step=2), 0, SoloExchange())
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch")))
"""


def test_slopes_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 7, requires_grad=True)
    x, slope = torch.randn(3, 5, requires_grad=True), torch.randn(3, 7)
    expected = torch.autograd.grad((x @ weight).tanh(), (x, weight), slope)
    assert all(map(torch.equal, gradients((x @ weight).tanh(), (x, weight), slope), expected))
    backward((x @ weight).tanh(), slope)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])
    loss = (x * 2.0).sum()
    x.grad = None
    backward(loss, None)
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_the_first_steps_of_a_process_import_nothing_of_torch() -> None:
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEPS], cwd=tests, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
