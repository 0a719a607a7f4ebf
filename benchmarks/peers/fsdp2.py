"""FSDP2: weights, gradients and optimizer state are split over the processes; each block is gathered before it runs.

As its documentation says: every block is a unit of its own, then the whole; all other settings are the defaults.
"""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, build, mean_loss
from shoal_planner.job import JobSpec
from shoal_workers.processes import Seat


class Fsdp2:
    def __init__(self, seat: Seat, job: JobSpec) -> None:
        self._feed = Feed(job)
        part = job.train.global_batch // seat.size
        self._first, self._last = seat.rank * part, (seat.rank + 1) * part
        self._size = seat.size
        mesh = init_device_mesh("cpu", (seat.size,))
        self._model = build(job)
        for block in self._model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = adamw(job, self._model.parameters())

    def step(self, number: int) -> float:
        tokens_BS, targets_BS = self._feed.read(number, self._first, self._last)
        loss = mean_loss(self._model(tokens_BS), targets_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item() / self._size
