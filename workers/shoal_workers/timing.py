"""What a rank times of a job before it begins: each part of its model on this device, at a few micro-batch sizes, and
the update."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal_planner.job import JobSpec
from shoal_workers.devices import CPU
from shoal_workers.measure import measure_block, measure_embedding, measure_head, measure_update
from shoal_workers.rows import Row

_SAMPLES = (1, 2, 4)
_REPEATS = 5
_PARTS = {"block": measure_block, "embedding": measure_embedding, "head": measure_head}


def time_parts(job: JobSpec, threads: int, device: torch.device = CPU) -> Iterator[Row]:
    """Rows of (part, samples, forward seconds, backward seconds), without tensor parallelism."""
    counts = sorted({min(samples, job.train.global_batch) for samples in _SAMPLES})
    for part, measure in _PARTS.items():
        for samples in counts:
            train = job.train
            times = measure(job.model, train.seq_len, 1, samples, threads, train.precision, _REPEATS, device)
            yield [part, samples, *times]


def time_update(job: JobSpec, threads: int, device: torch.device = CPU) -> float:
    """Elements of optimizer state in a second."""
    return measure_update(job, threads, _REPEATS, device)
