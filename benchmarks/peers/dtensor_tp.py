"""Tensor parallelism by DTensor: columns, then rows, with the vocabulary of embedding and head cut as well."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, build, mean_loss
from shoal_planner.job import JobSpec
from shoal_workers.processes import Seat


class DTensorTp:
    def __init__(self, seat: Seat, job: JobSpec) -> None:
        self._feed = Feed(job)
        self._batch = job.train.global_batch
        self._size = seat.size
        self._model = build(job)
        self._cut(seat.size)
        self._optimizer = adamw(job, self._model.parameters())

    def _cut(self, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,))
        within_block: dict[str, ParallelStyle] = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.o": RowwiseParallel(),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        for block in self._model.layers.values():
            parallelize_module(block, mesh, within_block)
        ends: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(self._model, mesh, ends)

    def step(self, number: int) -> float:
        tokens_BS, targets_BS = self._feed.read(number, 0, self._batch)
        with loss_parallel():
            loss = mean_loss(self._model(tokens_BS), targets_BS)
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item() / self._size
