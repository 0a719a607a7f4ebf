"""What an engine asks of whoever keeps its state safe, and what it says of a step and of its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal_workers.ballots import Exposure, Ranges
from shoal_workers.live import LiveState
from shoal_workers.traffic import Link, Moved, Wait


class SnapshotSink(Protocol):
    """Where the engine brings the state of done steps to safety: of each, unless the job allows for less."""

    def begin(self, step: int, live: LiveState, *, always: bool = False) -> None:
        """Begins to copy the owned state of `step` out if that is due, or is wanted `always`; it may change when
        `wait_safe` has returned."""

    def wait_safe(self, step: int) -> None:
        """Returns when all that was begun up to `step` would survive this node. May raise EpochAbandoned."""


class NoSnapshots:
    """For runs whose state nobody needs to survive."""

    def begin(self, step: int, live: LiveState, *, always: bool = False) -> None:
        pass

    def wait_safe(self, step: int) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A done step as one rank saw it; `loss` and `grad_norm` are of the whole step, the same on every rank.

    `samples` are the half-open ranges of sample numbers that first stages fed, as they said on their ballots.
    `moved` is what this rank sent and received; `sent` are the bytes of all ranks from the vote before to this step's,
    by link: the last exchange of weights counts to the step after it. `exposure` is of the same time; `waited_s` are
    the seconds of it that this rank spent in exchanges.
    `compute_s` is the part of `duration_s` spent in forward, backward and update, with their all-reduces, but not in
    other exchanges; a CUDA device may count an update to the step after it, and counts what it waits for within these.
    `skipped` says why no update was applied; then the weights are those of the step before.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    duration_s: float
    compute_s: float
    samples: Ranges
    sent: Mapping[Link, int]
    exposure: Exposure
    waited_s: Mapping[Wait, float]
    moved: tuple[Moved, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All wanted steps are done; the state of `step`, the last one, is safe."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """All ranks stopped after `step`, because some rank was told to; its state is safe."""

    step: int


Outcome = Finished | Stopped
