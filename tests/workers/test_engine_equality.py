"""Every layout computes what one process computes, and one process computes what plain PyTorch does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_runs import LAYOUTS, assert_holders_agree, assert_same_bits, job, part, plan, worst_difference
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from shoal_planner.job import EVAL_BATCHES, JobSpec, ModelSpec, TrainSpec
from shoal_planner.parameters import parameters
from shoal_recovery.state import Kind
from shoal_workers.data import evaluation_samples, open_samples
from shoal_workers.exchange import SoloExchange
from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, SoloRun, run_rank, run_solo, solo_plan, whole_state

STEPS = 20
BOUND = 1e-5
CLIP_NORM = 0.3


@pytest.fixture(scope="module")
def solo() -> dict[bool, SoloRun]:
    return {tied: run_solo(job(tied=tied), STEPS) for tied in (True, False)}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(processes: Processes, solo: dict[bool, SoloRun], layout: str, tied: bool) -> None:
    spec = job(tied=tied)
    run = processes.run(RunRequest(job=spec, plan=LAYOUTS[layout], until_step=STEPS))
    assert worst_difference(run.weights, solo[tied].weights) <= BOUND
    np.testing.assert_allclose(run.losses, solo[tied].losses, rtol=1e-5)
    for rank in run.ranks:
        assert [(report.loss, report.grad_norm) for report in rank.reports] == [
            (report.loss, report.grad_norm) for report in run.ranks[0].reports
        ]
    assert_holders_agree(run, spec)


def test_pipeline_split_does_not_change_a_bit(processes: Processes) -> None:
    """With the same micro-batches, only where layers run differs."""
    spec = job(tied=False)  # a tied gradient is summed in another order where embedding and head are apart
    split = processes.run(RunRequest(job=spec, plan=LAYOUTS["layers 1+5"], until_step=5))
    whole = processes.run(RunRequest(job=spec, plan=plan((4, (part(6, (1, 2)),))), until_step=5))
    assert_same_bits(split.state, whole.state)
    assert split.losses == whole.losses


def test_sums_are_taken_in_the_order_of_ranks(processes: Processes) -> None:
    """Four pipelines of one micro-batch each add up exactly as one pipeline of four does, whoever owns the sum."""
    spec = job(tied=False)  # a tied gradient is the sum of two in each micro-batch, and each is added by itself
    apart = processes.run(RunRequest(job=spec, plan=plan(*[(1, (part(6, (1, 2)),))] * 4), until_step=5))
    together = processes.run(RunRequest(job=spec, plan=plan((4, (part(6, (1, 2)),))), until_step=5))
    assert_same_bits(apart.state, together.state)


def test_same_layout_again_gives_the_same_bits(processes: Processes) -> None:
    request = RunRequest(job=job(), plan=LAYOUTS["3 stages beside 1"], until_step=5)
    assert_same_bits(processes.run(request).state, processes.run(request).state)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_one_process_equals_plain_pytorch(solo: dict[bool, SoloRun], tied: bool) -> None:
    """Ordinary modules, autograd and optimizer, the whole batch at once."""
    spec = job(tied=tied)
    reference = _Reference(spec.model)
    reference.load(run_solo(spec, 0))
    losses = _train(reference, spec)
    np.testing.assert_allclose(solo[tied].losses, losses, rtol=1e-5)
    assert worst_difference(solo[tied].weights, reference.stored()) <= BOUND


@pytest.mark.parametrize("layout", ["3 stages beside 1", "uneven state, head alone"])
def test_gradients_are_clipped_by_the_norm_of_all_of_them_whoever_owns_them(processes: Processes, layout: str) -> None:
    spec = clipped_job()
    run = processes.run(RunRequest(job=spec, plan=LAYOUTS[layout], until_step=STEPS))
    alone = run_solo(spec, STEPS)
    assert worst_difference(run.weights, alone.weights) <= BOUND
    assert all(report.grad_norm > CLIP_NORM for report in run.ranks[0].reports), "each step is clipped"
    assert_holders_agree(run, spec)


def test_clipping_and_schedules_are_those_of_plain_pytorch() -> None:
    spec = clipped_job()
    reference = _Reference(spec.model)
    reference.load(run_solo(spec, 0))
    losses = _train(reference, spec)
    run = run_solo(spec, STEPS)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)
    assert worst_difference(run.weights, reference.stored()) <= BOUND


def clipped_job() -> JobSpec:
    spec = job(tied=False)
    train = replace(spec.train, clip_norm=CLIP_NORM, lr_schedule="cosine", min_lr=1e-4)
    return replace(spec, train=train)


@pytest.mark.parametrize("layout", ["3 stages beside 1", "uneven state, head alone"])
def test_evaluations_are_the_same_whatever_the_plan_and_take_no_more_memory(processes: Processes, layout: str) -> None:
    spec = evaluated_job()
    request = RunRequest(job=spec, plan=LAYOUTS[layout], until_step=5)
    run = processes.run(request)
    alone = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=5), 0, SoloExchange())
    for rank in run.ranks:
        assert [(found.step, found.tokens) for found in rank.evaluations] == [(2, 768), (4, 768), (5, 768)]
        np.testing.assert_allclose(
            [found.loss for found in rank.evaluations], [found.loss for found in alone.evaluations], rtol=1e-5
        )
    assert len({tuple(found.loss for found in rank.evaluations) for rank in run.ranks}) == 1
    never = replace(spec, train=replace(spec.train, eval_every=None, eval_batches=EVAL_BATCHES))
    without = processes.run(replace(request, job=never))
    assert [rank.peak_bytes for rank in run.ranks] == [rank.peak_bytes for rank in without.ranks]


def test_an_evaluation_is_the_mean_loss_over_what_is_held_out() -> None:
    """Also where an epoch begins at the step, and has not had a forward yet."""
    spec = evaluated_job()
    held_out = evaluation_samples(spec)
    assert held_out is not None
    rows = held_out.read(range(24))
    whole = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=5), 0, SoloExchange())
    first = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=4), 0, SoloExchange())
    reference = _Reference(spec.model)
    reference.load(SoloRun((), whole_state(spec, [first]).values[Kind.MASTER], ()))
    loss = F.cross_entropy(reference(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    assert whole.evaluations[1].loss == pytest.approx(loss.item(), rel=1e-5)
    start = whole_state(spec, [first])
    rest = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=5, start=start), 0, SoloExchange())
    assert [(found.step, found.loss) for found in rest.evaluations] == [
        (found.step, found.loss) for found in whole.evaluations[1:]
    ]


def evaluated_job() -> JobSpec:
    spec = job(tied=False, steps=5)
    return replace(spec, train=replace(spec.train, eval_every=2, eval_batches=3))


def test_a_plain_mlp_equals_plain_pytorch_under_a_plan_of_everything(processes: Processes) -> None:
    gated = job(tied=False)
    spec = replace(gated, model=replace(gated.model, gated_mlp=False, activation=None))
    whole = LAYOUTS["3 stages beside 1"]
    stages = tuple(replace(stage, recompute="selective") for stage in whole.pipelines[0].stages)
    pipelines = (replace(whole.pipelines[0], stages=stages), *whole.pipelines[1:])
    given = replace(whole, schedule="zero_bubble", pipelines=pipelines)
    run = processes.run(RunRequest(job=spec, plan=given, until_step=STEPS))
    reference = _Reference(spec.model)
    reference.load(run_solo(spec, 0))
    np.testing.assert_allclose(run.losses, _train(reference, spec), rtol=1e-5)
    assert worst_difference(run.weights, reference.stored()) <= BOUND


def test_bf16_learns_and_ranks_agree(processes: Processes) -> None:
    spec = job(precision="bf16", lr=2e-3)
    run = processes.run(RunRequest(job=spec, plan=LAYOUTS["tp 1 beside tp 2"], until_step=STEPS))
    full = run_solo(replace(spec, train=replace(spec.train, precision="fp32")), STEPS)
    assert run.losses[-1] < run.losses[0] - 1.0
    np.testing.assert_allclose(run.losses, full.losses, rtol=0.02)
    assert {rank.losses for rank in run.ranks} == {run.losses}
    assert_holders_agree(run, spec)


def test_bf16_stays_within_a_hundredth_of_fp32_for_200_steps() -> None:
    """Weights and activations are in bf16; masters, moments and sums of gradients are not."""
    spec = bf16_job()
    small = ModelSpec(layers=2, hidden=32, heads=2, ffn=64, vocab=256)
    spec = replace(spec, model=small, train=replace(spec.train, seq_len=16, global_batch=4))
    assert_close_to_fp32(run_solo(spec, 200).losses, spec)


@pytest.mark.long
def test_bf16_does_in_a_mixed_plan_too() -> None:
    spec = bf16_job()
    with Processes(3, timeout_s=1200.0) as processes:
        run = processes.run(RunRequest(job=spec, plan=LAYOUTS["tp 1 beside tp 2"], until_step=200))
    assert_close_to_fp32(run.losses, spec)


def bf16_job() -> JobSpec:
    """At twice that rate the loss jumps up around step 135, and not by as much in both."""
    return job(precision="bf16", steps=200, lr=1e-3)


def assert_close_to_fp32(losses: tuple[float, ...], spec: JobSpec) -> None:
    full = run_solo(replace(spec, train=replace(spec.train, precision="fp32")), 200).losses
    assert full[-1] < full[0] - 1.5
    np.testing.assert_allclose(losses, full, rtol=0.01)


class _Norm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps)


class _Attention(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        width, narrow = model.heads * model.head_size, model.num_kv_heads * model.head_size
        self.q = nn.Linear(model.hidden, width, bias=False)
        self.k = nn.Linear(model.hidden, narrow, bias=False)
        self.v = nn.Linear(model.hidden, narrow, bias=False)
        self.o = nn.Linear(width, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        size, group = self.model.head_size, self.model.heads // self.model.num_kv_heads
        q = self._turn(self.q(x).view(batch, length, -1, size))
        k = self._turn(self.k(x).view(batch, length, -1, size)).repeat_interleave(group, dim=2)
        v = self.v(x).view(batch, length, -1, size).repeat_interleave(group, dim=2)
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(future, -math.inf).softmax(dim=-1), v)
        return self.o(mixed.reshape(batch, length, -1))

    def _turn(self, x: Tensor) -> Tensor:
        """Pairs (i, i + D/2) as complex numbers, turned by their position."""
        half = x.shape[-1] // 2
        rates = self.model.rope_theta ** (-torch.arange(half).double() / half)
        angles = torch.arange(x.shape[1]).double()[:, None] * rates
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[None, :, None, :]
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)


class _Layer(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = _Norm(model.hidden, model.norm_eps)
        self.attention = _Attention(model)
        self.mlp_norm = _Norm(model.hidden, model.norm_eps)
        self.mlp = nn.ModuleDict({name: nn.Linear(model.hidden, model.ffn, bias=False) for name in ("gate", "up")})
        if not model.gated_mlp:
            del self.mlp["gate"]
        self.mlp["down"] = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        inner = F.silu(self.mlp["gate"](y)) * self.mlp["up"](y) if "gate" in self.mlp else F.gelu(self.mlp["up"](y))
        return x + self.mlp["down"](inner)


class _Reference(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.layers))
        self.final_norm = _Norm(model.hidden, model.norm_eps)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x))

    def load(self, start: SoloRun) -> None:
        named = dict(self.named_parameters())
        with torch.no_grad():
            for parameter in parameters(self.model):
                stored = torch.from_numpy(start.weights[parameter.fqn])
                named[parameter.fqn].copy_(stored.t() if _turned(parameter.fqn) else stored)

    def stored(self) -> dict[str, np.ndarray]:
        found = {fqn: tensor.detach() for fqn, tensor in self.named_parameters()}
        return {fqn: (tensor.t() if _turned(fqn) else tensor).numpy() for fqn, tensor in found.items()}


def _turned(fqn: str) -> bool:
    """These are stored the other way round than nn.Linear has them."""
    return fqn.endswith(("attention.o.weight", "mlp.down.weight"))


def _rate(train: TrainSpec, step: int) -> float:
    """By the schedulers of torch, which count steps from 0."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=train.lr)
    warm_up: Any = LinearLR(optimizer, 1 / train.warmup_steps, total_iters=train.warmup_steps - 1)
    then: Any = LambdaLR(optimizer, lambda done: 1.0)
    if train.lr_schedule == "cosine":
        then = CosineAnnealingLR(optimizer, train.steps - train.warmup_steps, eta_min=train.min_lr)
    schedule = SequentialLR(optimizer, [warm_up, then], [train.warmup_steps])
    for _ in range(step - 1):
        optimizer.step()
        schedule.step()
    return float(schedule.get_last_lr()[0])


def _train(reference: _Reference, spec: JobSpec) -> list[float]:
    train = spec.train
    found = list(reference.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [tensor for _, tensor in found if tensor.dim() == 2], "weight_decay": train.weight_decay},
            {"params": [tensor for _, tensor in found if tensor.dim() == 1], "weight_decay": 0.0},
        ],
        betas=train.betas,
        eps=train.eps,
        foreach=False,
    )
    samples = open_samples(spec.data, train.seq_len, train.seed)
    losses = []
    for step in range(1, STEPS + 1):
        rows = samples.read(range((step - 1) * train.global_batch, step * train.global_batch))
        for group in optimizer.param_groups:
            group["lr"] = _rate(train, step)
        loss = F.cross_entropy(reference(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if train.clip_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), train.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses
