"""AdamW over the spans that a rank owns: fp32 master weights and moments, and the rank's own weights after them.

Owns the learning rate, clipping and which parameters decay. Does not own the norm of all gradients: ranks agree on it
in the vote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import torch
from torch import Tensor

from shoal_planner.job import TrainSpec
from shoal_planner.parameters import parameters
from shoal_recovery.state import Kind, Span, common, without
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
    """torch's fused AdamW on views of the live state, each where it lies: that on the device at once, then that on the
    host, a unit at a time."""

    def __init__(self, train: TrainSpec, live: LiveState) -> None:
        self._train = train
        self._live = live
        self._near: _Fused | None = None
        self._hosted: tuple[_HostedUnit, ...] | None = None

    def apply(self, step: int, grad_norm: float, scale: float = 1.0) -> None:
        """All of `updates`."""
        for update in self.updates(step, grad_norm, scale):
            update()

    def updates(self, step: int, grad_norm: float, scale: float = 1.0) -> Iterator[Callable[[], None]]:
        """Update what this rank owns from its summed gradients, and the weights there, one after the other. Only under
        a commit, each under its own: whoever abandons an epoch waits for no more than one of them. `grad_norm` is that
        of the gradients of all ranks, each interval counted once, when they are multiplied with `scale`."""
        yield partial(self._update_near, step, grad_norm, scale)
        for unit in self._hosted or ():
            yield partial(unit.step, step)

    def _update_near(self, step: int, grad_norm: float, scale: float) -> None:
        """Also scales all gradients, those of state on the host among them."""
        gradients = [self._live.gradient(span) for span in self._live.state.owns]  # asked for, so none is stale
        scale *= clip_scale(self._train, grad_norm)
        if scale != 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        if self._near is None or self._hosted is None:
            state = self._live.state
            near = without(state.owns, state.hosted)
            self._near = _Fused(self._train, self._live, near, [self._live.gradient(span) for span in near])
            self._hosted = tuple(_HostedUnit(self._train, self._live, unit) for unit in self._live.hosted.units)
        self._near.step(step)
        self._live.refresh_weights()


class _HostedUnit:
    """The update of a unit's state on the host."""

    def __init__(self, train: TrainSpec, live: LiveState, spans: tuple[Span, ...]) -> None:
        self._live = live
        self._spans = spans
        self._kept = common(live.state.keeps, spans)
        self._fused = _Fused(train, live, spans, live.hosted.slots(spans))

    def step(self, step: int) -> None:
        hosted = self._live.hosted
        hosted.bring(self._spans, self._live.gradient)
        self._fused.step(step)
        for span in self._kept:
            hosted.give(span, self._live.weight(span))


class _Fused:
    """torch's fused AdamW on the masters of some spans with these gradients. The one thing that it would keep by
    itself, the number of steps done, follows from the step that it is told, so it can begin anywhere. The kernel is
    called without its class, which would import torch's compiler into every new process: 1.5 s of its first step."""

    def __init__(self, train: TrainSpec, live: LiveState, spans: Sequence[Span], gradients: Sequence[Tensor]) -> None:
        self._train = train
        decays = {parameter.fqn: parameter.decay for parameter in parameters(live.model)}
        # The same update for all of a group; with more tensor-parallel ranks than rows there may be none.
        self._groups = [
            (_Group.of(live, members), train.weight_decay if decay else 0.0)
            for decay in (True, False)
            if (members := [(span, it) for span, it in zip(spans, gradients, strict=True) if decays[span.fqn] == decay])
        ]

    def step(self, step: int) -> None:
        beta1, beta2 = self._train.betas
        for group, weight_decay in self._groups:
            for count in group.counts:
                count.fill_(step)
            torch._fused_adamw_(
                group.masters,
                group.gradients,
                group.means,
                group.squares,
                [],
                group.counts,
                amsgrad=False,
                lr=learning_rate(self._train, step),
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=self._train.eps,
                maximize=False,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """By position; `counts` are the steps done, this one among them."""

    masters: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    counts: list[Tensor]

    @classmethod
    def of(cls, live: LiveState, members: Sequence[tuple[Span, Tensor]]) -> _Group:
        masters = [live.master(span) for span, _ in members]
        return cls(
            masters=masters,
            gradients=[gradient for _, gradient in members],
            means=[live.view(span.key(Kind.EXP_AVG)) for span, _ in members],
            squares=[live.view(span.key(Kind.EXP_AVG_SQ)) for span, _ in members],
            counts=[torch.zeros((), device=master.device) for master in masters],
        )
