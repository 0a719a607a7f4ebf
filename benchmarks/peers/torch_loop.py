"""The loop of every tutorial, in one process: forward, backward, step, forget the gradients."""

from __future__ import annotations

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, build, mean_loss
from shoal_planner.job import JobSpec
from shoal_workers.processes import Seat


class TorchLoop:
    def __init__(self, seat: Seat, job: JobSpec) -> None:
        assert seat.size == 1
        self._feed = Feed(job)
        self._batch = job.train.global_batch
        self._model = build(job)
        self._optimizer = adamw(job, self._model.parameters())

    def step(self, number: int) -> float:
        tokens_BS, targets_BS = self._feed.read(number, 0, self._batch)
        loss = mean_loss(self._model(tokens_BS), targets_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()
