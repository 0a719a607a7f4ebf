"""What a rank times of a job before it begins: each part of its model on this device, at a few micro-batch sizes, its
share of a block under tensor parallelism, and the update."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from shoal_planner.job import JobSpec
from shoal_workers.devices import CPU
from shoal_workers.measure import measure_block, measure_embedding, measure_head, measure_update
from shoal_workers.rows import Row

_SAMPLES = (1, 2, 4)
_REPEATS = 5
_PARTS = {"block": measure_block, "embedding": measure_embedding, "head": measure_head}


def time_parts(job: JobSpec, threads: int, device: torch.device = CPU, degrees: Sequence[int] = ()) -> Iterator[Row]:
    """Rows of (part, samples, forward seconds, backward seconds, tp): all parts without tensor parallelism, and what
    one of `tp` devices does of a block, without the others and without what they exchange."""
    train = job.train
    counts = sorted({min(samples, train.global_batch) for samples in _SAMPLES})
    for part, measure in _PARTS.items():
        for tp, samples in itertools.product((1, *degrees) if part == "block" else (1,), counts):
            if tp == 1 or samples in (counts[0], counts[-1]):
                times = measure(job.model, train.seq_len, tp, samples, threads, train.precision, _REPEATS, device)
                yield [part, samples, *times, tp]


def time_update(job: JobSpec, threads: int, device: torch.device = CPU) -> float:
    """Elements of optimizer state in a second."""
    return measure_update(job, threads, _REPEATS, device)
