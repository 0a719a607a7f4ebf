"""Several sources as one, by their weights: which source a sample number reads, and the how manieth of it that is.

The order of sources is a fixed round of a prime number of places in which each source comes as evenly as its weight
allows, entered at a place that the seed decides. So the shares hold over any run of samples, and how often a source
came before is computed from sums over one round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal_workers.permutation import mixed
from shoal_workers.samples import Row, Samples

_PLACES = (10_007, 10_009)  # primes: no global batch goes round with both
_SEED = -2


class Round:
    """Pure. `weights` are more than zero, in any unit."""

    def __init__(self, weights: Sequence[float], global_batch: int, seed: int) -> None:
        self._size = next(size for size in _PLACES if global_batch % size)
        self._batch = global_batch
        self._turn = mixed(seed, _SEED) % self._size
        order = _spread(weights, self._size)
        self._order = order
        self._seen = _seen(order, len(weights))
        # The same round as a slot meets it, step after step: a stride of the batch, which meets every place.
        self._strided = order[np.arange(self._size) * global_batch % self._size]
        self._seen_strided = _seen(self._strided, len(weights))
        self._inverse = pow(global_batch, -1, self._size)

    def source(self, number: int) -> int:
        return int(self._order[(number + self._turn) % self._size])

    def before(self, number: int, source: int) -> int:
        """How many samples before this one are the source's."""
        return self._until(number + self._turn, source) - self._until(self._turn, source)

    def before_in_slot(self, number: int, source: int) -> int:
        """The same, of those of its slot of the batch alone."""
        step, slot = divmod(number, self._batch)
        first = (slot + self._turn) * self._inverse % self._size
        return self._until_strided(first + step, source) - self._until_strided(first, source)

    def _until(self, place: int, source: int) -> int:
        rounds, rest = divmod(place, self._size)
        return rounds * int(self._seen[source, self._size]) + int(self._seen[source, rest])

    def _until_strided(self, place: int, source: int) -> int:
        rounds, rest = divmod(place, self._size)
        return rounds * int(self._seen_strided[source, self._size]) + int(self._seen_strided[source, rest])


class Mixture:
    """See `Samples`. `parts` come with whether their samples are numbered by slot (the slot, plus the batch times how
    often it came), or all together. Marks have the number of their source in front."""

    def __init__(self, parts: Sequence[tuple[Samples, bool]], turns: Round, global_batch: int) -> None:
        self._parts = tuple(parts)
        self._round = turns
        self._batch = global_batch
        self.ignores = any(samples.ignores for samples, _ in parts)
        self.by_document = any(samples.by_document for samples, _ in parts)

    def read(self, numbers: Sequence[int]) -> Tensor:
        """See `Samples`."""
        rows: dict[int, Tensor] = {}
        places = [(self._round.source(number), number) for number in numbers]
        for source in sorted({source for source, _ in places}):
            wanted = [number for own, number in places if own == source]
            found = self._parts[source][0].read([self._own(source, number) for number in wanted])
            rows.update(zip(wanted, found, strict=True))
        return torch.stack([rows[number] for number in numbers])

    def learn(self, marks: Sequence[Row]) -> None:
        """See `Samples`."""
        for index, (samples, _) in enumerate(self._parts):
            samples.learn([rest for source, *rest in marks if source == index])

    def marks(self, undone: Callable[[int], int]) -> list[Row]:
        """See `Samples`."""

        def own(source: int) -> Callable[[int], int]:
            return lambda slot: self._own(source, undone(slot))

        return [[index, *row] for index, (samples, _) in enumerate(self._parts) for row in samples.marks(own(index))]

    def _own(self, source: int, number: int) -> int:
        """The number of the sample in its source."""
        if self._parts[source][1]:
            return self._round.before_in_slot(number, source) * self._batch + number % self._batch
        return self._round.before(number, source)


def _spread(weights: Sequence[float], size: int) -> npt.NDArray[np.int64]:
    """At each place the source that lags furthest behind its share: none is ever a whole place ahead of it."""
    shares = np.array(weights, dtype=np.float64) / sum(weights)
    given = np.zeros(len(weights))
    order = np.zeros(size, dtype=np.int64)
    for place in range(size):
        order[place] = np.argmax(shares * (place + 1) - given)
        given[order[place]] += 1
    return order


def _seen(order: npt.NDArray[np.int64], num_sources: int) -> npt.NDArray[np.int64]:
    """[source, place]: how often the source comes before the place."""
    hits = order[None, :] == np.arange(num_sources)[:, None]
    return np.concatenate([np.zeros((num_sources, 1), dtype=np.int64), np.cumsum(hits, axis=1)], axis=1)
