"""AdamW over the spans that a rank owns: fp32 master weights and moments, and the rank's own weights after them.

Owns the learning rate, clipping and which parameters decay. Does not own the norm of all gradients: ranks agree on it
in the vote.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from shoal_planner.job import TrainSpec
from shoal_planner.parameters import parameters
from shoal_recovery.state import Kind
from shoal_workers.live import LiveState

_NORM_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def learning_rate(train: TrainSpec, step: int) -> float:
    """Of step `step`, the first being 1: a linear warm-up that reaches `lr` with its last step; from the step after it
    on, which has `lr` too, down to what would be `min_lr` one step after the last one."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    done = min(1.0, (step - 1 - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    match train.lr_schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(train.lr_schedule)
    return train.min_lr + (train.lr - train.min_lr) * left


def clip_scale(train: TrainSpec, grad_norm: float) -> float:
    """What gradients of this norm over all weights are multiplied with; 1.0 where nothing is clipped."""
    return 1.0 if train.clip_norm is None else min(1.0, train.clip_norm / (grad_norm + _NORM_EPS))


class OwnedAdamW:
    """torch's fused AdamW on views of the live state. The state that it would keep by itself, the number of steps done,
    follows from the step that it is told, so it can begin anywhere."""

    def __init__(self, train: TrainSpec, live: LiveState) -> None:
        self._train = train
        self._live = live
        self._optimizer: torch.optim.AdamW | None = None
        self._num_done: list[Tensor] = []

    def apply(self, step: int, grad_norm: float) -> None:
        """Updates what this rank owns from its summed gradients, and the weights there. Only under a commit.
        `grad_norm` is that of the gradients of all ranks, each interval counted once."""
        if not self._live.state.owns:  # more tensor-parallel ranks than rows
            return
        if self._optimizer is None:
            self._optimizer = self._build()
        for num_done in self._num_done:
            num_done.fill_(step - 1)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._train, step)
        gradients = [self._live.gradient(span) for span in self._live.state.owns]  # asked for, so none is stale
        scale = clip_scale(self._train, grad_norm)
        if scale < 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        self._optimizer.step()
        self._live.refresh_weights()

    def _build(self) -> torch.optim.AdamW:
        decays = {parameter.fqn: parameter.decay for parameter in parameters(self._live.model)}
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for span in self._live.state.owns:
            master = self._live.view(span.key(Kind.MASTER))
            master.grad = self._live.gradient(span)
            num_done = torch.zeros((), device=master.device)
            state[master] = {
                "step": num_done,
                "exp_avg": self._live.view(span.key(Kind.EXP_AVG)),
                "exp_avg_sq": self._live.view(span.key(Kind.EXP_AVG_SQ)),
            }
            groups[decays[span.fqn]].append(master)
            self._num_done.append(num_done)
        optimizer = torch.optim.AdamW(
            [
                {"params": masters, "weight_decay": self._train.weight_decay if decay else 0.0}
                for decay, masters in groups.items()
                if masters
            ],
            betas=self._train.betas,
            eps=self._train.eps,
            fused=True,
        )
        optimizer.state.update(state)
        return optimizer
