"""The loop of `torch_loop` in bf16 on one device, as is usual: weights in bf16, and for the optimizer an fp32 copy."""

from __future__ import annotations

import torch

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, build, mean_loss
from shoal_planner.job import JobSpec


class MixedLoop:
    def __init__(self, job: JobSpec, device: torch.device) -> None:
        self._feed = Feed(job)
        self._batch = job.train.global_batch
        self._device = device
        model = build(job).to(device)
        self._masters = [weight.detach().clone() for weight in model.parameters()]
        self._optimizer = adamw(job, self._masters)
        self._model = model.to(torch.bfloat16)
        self._weights = list(self._model.parameters())

    def step(self, number: int) -> float:
        tokens_BS, targets_BS = (
            part.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else part
            for part in self._feed.read(number, 0, self._batch)
        )
        loss = mean_loss(self._model(tokens_BS).float(), targets_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self._optimizer.step()
        torch._foreach_copy_([weight.detach() for weight in self._weights], self._masters)
        self._optimizer.zero_grad()
        return loss.item()
