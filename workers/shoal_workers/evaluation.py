"""Evaluations: the loss over the same held-out samples again and again, the same under any plan.

Owns when they are due and what they report. All ranks take part, with the weights of a done step, between two steps. An
epoch that begins at a step after which one is due has it too, unless it was told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_planner.job import TrainSpec
from shoal_workers.ballots import per_target
from shoal_workers.exchange import Exchange
from shoal_workers.forward_only import ForwardOnly
from shoal_workers.idle import IdleForwards
from shoal_workers.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """`loss` is the mean over `tokens` targets with the weights of `step`, the same on every rank."""

    step: int
    loss: float
    tokens: int
    duration_s: float


class Evaluation:
    """Of one rank. `samples` None: the job evaluates nothing. `known_step`: one that was evaluated before. `counts`:
    whether the loss that this rank finds is counted, for the ranks of a replica all have it."""

    def __init__(
        self,
        train: TrainSpec,
        samples: Samples | None,
        forward_only: ForwardOnly | IdleForwards,
        exchange: Exchange,
        *,
        known_step: int | None,
        counts: bool,
        clock: Callable[[], float],
    ) -> None:
        self._train = train
        self._samples = samples
        self._forward_only = forward_only
        self._exchange = exchange
        self._known_step = known_step
        self._counts = counts
        self._clock = clock

    def after(self, step: int) -> EvaluationReport | None:
        """None unless one is due. Raises EpochAbandoned, PeerLost, OutOfDeviceMemory."""
        if self._samples is None or step == self._known_step or not self._train.evaluates_after(step):
            return None
        began_s = self._clock()
        batches = range(1, self._train.eval_batches + 1)
        passed = [self._forward_only.run(batch, self._samples, _ignore) for batch in batches]
        loss, own_targets = sum(one.loss for one in passed), sum(one.num_targets for one in passed)
        own = [loss, float(own_targets)] if self._counts else [0.0, 0.0]
        losses, targets = self._exchange.all_gather(torch.tensor(own, dtype=torch.float64)).unbind(dim=1)
        num_targets = int(targets.sum())
        scale = per_target(len(batches) * self._train.tokens_per_step, num_targets)
        return EvaluationReport(
            step=step,
            loss=float(losses.sum()) / len(batches) * scale if num_targets else math.nan,
            tokens=num_targets,
            duration_s=self._clock() - began_s,
        )


def _ignore(unit: int, out: Tensor) -> None:
    pass
