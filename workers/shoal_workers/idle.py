"""A rank that runs no samples and only keeps state: it gives weights when those who compute need them, and sums
gradients. It walks the units of its stage as the others do, so that its exchanges meet theirs."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_planner.programs import (
    Backward,
    Forward,
    InputGradient,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    WeightGradient,
)
from shoal_workers.circulation import Circulation, Use
from shoal_workers.forward_only import Passed, Seen
from shoal_workers.samples import Samples
from shoal_workers.scattering import Part


class IdleRun:
    """In the place of a StageRun. `split`: gradients of the matrices of blocks are put off."""

    loss = 0.0
    num_targets = 0

    def __init__(self, chunks: Sequence[Sequence[int]], circulation: Circulation, *, split: bool) -> None:
        self._chunks = tuple(map(tuple, chunks))
        self._circulation = circulation
        self._put_off = circulation.blocks if split else range(0)

    def begin(self, step: int) -> None:
        pass

    def forward(self, item: Forward) -> None:
        for unit in self._chunks[item.chunk]:
            self._circulation.pass_forward(unit)

    def backward(self, item: Backward | InputGradient) -> None:
        for unit in reversed(self._chunks[item.chunk]):
            self._circulation.pass_backward(unit, Part.VECTORS if unit in self._put_off else Part.ALL)

    def weight_gradients(self, item: WeightGradient) -> None:
        for unit in reversed(self._chunks[item.chunk]):
            if unit in self._put_off:
                with self._circulation.gradients(unit, Part.MATRICES):
                    pass

    def receive(self, item: ReceiveActivation | ReceiveGradient) -> None:
        raise AssertionError(f"{item}: nothing is sent to who runs no samples")

    def send(self, item: SendActivation | SendGradient) -> None:
        raise AssertionError(f"{item}: nothing is made here to send")

    def end(self) -> None:
        pass


class IdleForwards:
    """In the place of a ForwardOnly."""

    def __init__(self, wanted: tuple[Use, ...], circulation: Circulation) -> None:
        self._wanted = wanted
        self._circulation = circulation

    def run(self, step: int, samples: Samples, seen: Seen) -> Passed:
        self._circulation.begin(self._wanted)
        for use in self._wanted:
            if not use.portion.number:
                self._circulation.pass_forward(use.portion.unit)
        return Passed(0.0, 0)
