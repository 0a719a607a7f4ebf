"""DistributedDataParallel: each process runs its part of the batch; gradients are averaged in buckets of the default
size, while the backward goes on."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, build, mean_loss
from shoal_planner.job import JobSpec
from shoal_workers.processes import Seat


class Ddp:
    def __init__(self, seat: Seat, job: JobSpec) -> None:
        self._feed = Feed(job)
        part = job.train.global_batch // seat.size
        self._first, self._last = seat.rank * part, (seat.rank + 1) * part
        self._size = seat.size
        self._model = DistributedDataParallel(build(job), gradient_as_bucket_view=True)
        self._optimizer = adamw(job, self._model.parameters())

    def step(self, number: int) -> float:
        tokens_BS, targets_BS = self._feed.read(number, self._first, self._last)
        loss = mean_loss(self._model(tokens_BS), targets_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item() / self._size
