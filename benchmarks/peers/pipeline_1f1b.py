"""torch.distributed.pipelining: one stage in each process, under Schedule1F1B."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, build, mean_loss
from shoal_planner.job import JobSpec
from shoal_workers.processes import Seat


class Pipeline1F1B:
    """`layers` are the blocks of each stage."""

    def __init__(self, seat: Seat, job: JobSpec, *, layers: tuple[int, ...], micro_batches: int) -> None:
        assert len(layers) == seat.size and sum(layers) == job.model.layers, layers
        self._feed = Feed(job)
        self._batch = job.train.global_batch
        self._is_first, self._is_last = seat.rank == 0, seat.rank == seat.size - 1
        first = sum(layers[: seat.rank])
        model = build(job, first, first + layers[seat.rank])
        stage = PipelineStage(model, seat.rank, seat.size, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=mean_loss)
        self._optimizer = adamw(job, model.parameters())

    def step(self, number: int) -> float:
        tokens_BS, targets_BS = self._feed.read(number, 0, self._batch)
        losses: list[Tensor] = []
        if self._is_last:
            self._schedule.step(target=targets_BS, losses=losses)
        else:
            self._schedule.step(*((tokens_BS,) if self._is_first else ()))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses) if losses else 0.0
