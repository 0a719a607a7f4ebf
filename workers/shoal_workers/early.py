"""Sums of whole gradients that begin in the last backward of a step, unit by unit, as it makes them.

Owns which unit is next. All ranks begin them in one order, from the highest unit down, and nobody waits for a unit
while there is anything to compute: a rank that comes to its last backward long before others do goes on with it, and
what it could not begin meanwhile it begins afterwards. Does not own the sums (`sharing`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from shoal_planner.programs import Backward, InputGradient, Program, Reduce, WeightGradient


class EarlyReduction:
    """`chunks` are the units of each chunk of a stage; of `blocks` among them a WeightGradient makes a part. Without
    `ahead` nothing begins before its instruction."""

    def __init__(
        self,
        program: Program,
        chunks: Sequence[Sequence[int]],
        blocks: range,
        reduce: Callable[[int], None],
        try_reduce: Callable[[int], bool],
        *,
        ahead: bool,
    ) -> None:
        self._reduce = reduce
        self._try_reduce = try_reduce
        self._order = tuple(item.unit for item in program if isinstance(item, Reduce))
        self._times = Counter[int]()
        for item in program if ahead else ():
            if isinstance(item, Backward | InputGradient):
                self._times.update(chunks[item.chunk])
            elif isinstance(item, WeightGradient):
                self._times.update(unit for unit in chunks[item.chunk] if unit in blocks)
        self.begin()

    def begin(self) -> None:
        """Before each attempt at a step."""
        self._left = Counter(self._times)
        self._waiting = deque(self._order)

    def made(self, unit: int) -> None:
        """A part of the gradients of this unit has been added."""
        self._left[unit] -= 1
        while self._waiting and self._times[self._waiting[0]] and not self._left[self._waiting[0]]:
            if not self._try_reduce(self._waiting[0]):
                break
            self._waiting.popleft()

    def reduce(self, unit: int) -> None:
        """Unless that has begun."""
        if unit in self._waiting:
            self._waiting.remove(unit)
            self._reduce(unit)
