"""AdamW over the spans that a rank owns: fp32 master weights and moments, and the rank's own weights after them."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_planner.job import TrainSpec
from shoal_planner.parameters import parameters
from shoal_recovery.state import Kind
from shoal_workers.live import LiveState


def learning_rate(train: TrainSpec, step: int) -> float:
    """Of step `step`, the first being 1: a linear warm-up, then constant."""
    return train.lr * min(1.0, step / train.warmup_steps) if train.warmup_steps else train.lr


class OwnedAdamW:
    """torch's fused AdamW on views of the live state. The state that it would keep by itself, the number of steps done,
    follows from the step that it is told, so it can begin anywhere."""

    def __init__(self, train: TrainSpec, live: LiveState) -> None:
        self._train = train
        self._live = live
        self._optimizer: torch.optim.AdamW | None = None
        self._num_done: list[Tensor] = []

    def apply(self, step: int) -> None:
        """Updates what this rank owns from its summed gradients, and the weights there. Only under a commit."""
        if not self._live.state.owns:  # more tensor-parallel ranks than rows
            return
        if self._optimizer is None:
            self._optimizer = self._build()
        for num_done in self._num_done:
            num_done.fill_(step - 1)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._train, step)
        self._optimizer.step()
        for span in self._live.state.owns:
            self._live.weight(span).copy_(self._live.view(span.key(Kind.MASTER)))

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
