"""What one side of a comparison is: something that steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from shoal_planner.job import JobSpec
from shoal_workers.data import open_samples
from shoal_workers.processes import Seat
from shoal_workers.samples import Samples


class Contender(Protocol):
    """Built where it runs, one for each process."""

    def step(self, number: int) -> float:
        """Trains on the samples of step `number`, the first being 1. This process's part of the mean loss: the parts
        of all processes add up to it."""


class Feed:
    """Tokens and targets of a step, read as the engine reads them."""

    def __init__(self, job: JobSpec) -> None:
        self._batch = job.train.global_batch
        self._samples: Samples = open_samples(job.data, job.train.seq_len, job.train.seed)

    def read(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Samples [first, last) of a step."""
        start = (step - 1) * self._batch
        tokens = self._samples.read(range(start + first, start + last))
        return tokens[:, :-1], tokens[:, 1:].contiguous()


@contextmanager
def process_group(seat: Seat) -> Iterator[None]:
    """PyTorch's own world over gloo, from here on the default."""
    store = PrefixStore(f"peer-{seat.epoch}", seat.store)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size)
    try:
        yield
    finally:
        dist.destroy_process_group()
