"""All ways to share out the micro-batches of a pipeline among the replicas of its stages. Owns the counting alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from shoal_planner.options import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The ways to share out micro-batches among the replicas of a pipeline, one per column: their size, the samples of
    each replica [R, Q], and the overlap of those that may send to each other. `pairs` are all (way, number of
    micro-batches), by samples per step from `least` up; `starts` is where each number of samples begins in them."""

    size: Ints
    samples: Ints
    overlaps: dict[tuple[int, int], Ints]
    ways: Ints
    numbers: Ints
    starts: Ints
    least: int


def ways(replicas: tuple[int, ...], ordered: bool, batch: int) -> Shares:
    """All ways to share out micro-batches of up to `batch` samples; `ordered`: falling shares alone."""
    columns, sizes = [], []
    for size in range(max(replicas), batch + 1):
        stages = [list(_dealt(size, count, size if ordered else batch, ordered)) for count in replicas]
        for shares in itertools.product(*stages):
            columns.append(list(itertools.chain.from_iterable(shares)))
            sizes.append(size)
    samples = np.array(columns, dtype=np.int64).reshape(len(columns), sum(replicas)).T
    size_of = np.array(sizes, dtype=np.int64)
    pairs = sorted(
        (size * number, way, number) for way, size in enumerate(sizes) for number in range(1, batch // size + 1)
    )
    steps = np.array([samples for samples, _, _ in pairs], dtype=np.int64)
    return Shares(
        size=size_of,
        samples=samples,
        overlaps=_overlaps(replicas, samples),
        ways=np.array([way for _, way, _ in pairs], dtype=np.int64),
        numbers=np.array([number for _, _, number in pairs], dtype=np.int64),
        starts=np.searchsorted(steps, np.arange(max(replicas), batch + 1)),
        least=max(replicas),
    )


def _dealt(total: int, count: int, most: int, ordered: bool) -> list[tuple[int, ...]]:
    """Ways to deal `total` samples to `count` replicas, at least one each."""
    if count == 1:
        return [(total,)] if total <= most else []
    return [
        (first, *rest)
        for first in range(1, min(most, total - count + 1) + 1)
        for rest in _dealt(total - first, count - 1, first if ordered else most, ordered)
    ]


def _overlaps(replicas: tuple[int, ...], samples: Ints) -> dict[tuple[int, int], Ints]:
    """[Q], for each pair of replicas of neighbouring stages: the samples that both run."""
    found, begin = {}, 0
    for here, there in itertools.pairwise(replicas):
        ends = [np.cumsum(samples[at : at + count], axis=0) for at, count in ((begin, here), (begin + here, there))]
        starts = [end - samples[at : at + len(end)] for at, end in zip((begin, begin + here), ends, strict=True)]
        for i, j in itertools.product(range(here), range(there)):
            low = np.maximum(starts[0][i], starts[1][j])
            high = np.minimum(ends[0][i], ends[1][j])
            found[begin + i, begin + here + j] = np.maximum(high - low, 0)
        begin += here
    return found
