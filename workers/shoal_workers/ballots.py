"""What a rank puts on its ballot, and what all ballots say together. Pure: every rank counts the same ballots, so all
come to the same verdict.

Does not own when to vote nor what follows from a verdict (the engine).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_workers.errors import StepRefused
from shoal_workers.traffic import Link, Wait

Ranges = tuple[tuple[int, int], ...]  # half-open ranges of sample numbers

_NUM_COUNTS = 6  # before bytes, seconds and ranges
# Who votes waits for the slowest, not for a wire; and copies of state are told apart.
_EXPOSED = tuple(wait for wait in Wait if wait not in (Wait.VOTE, Wait.SAFETY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """`loss`, `num_targets` and `grad_square` are this rank's parts of sums over all ranks: every target's loss and
    every interval's gradient is on one ballot; as far as ranks know before the vote, all tokens of the step are
    targets. `stop_after` is infinite where nobody told this rank to stop; `fed` is what it fed. Since its last ballot
    `elapsed_s` have passed; `sent` are the bytes that it sent in them over each kind of link, `waited_s` the seconds
    that it spent in exchanges."""

    step: int
    epoch: int
    loss: float
    num_targets: int
    grad_square: float
    stop_after: float
    fed: Ranges
    sent: Mapping[Link, int]
    elapsed_s: float
    waited_s: Mapping[Wait, float]

    def packed(self, max_ranges: int) -> Tensor:
        """Filled up with empty ranges: ballots have one length."""
        numbers = [float(number) for fed in self.fed for number in fed]
        counts = (
            self.step,
            self.epoch,
            self.loss,
            self.num_targets,
            self.grad_square,
            self.stop_after,
            *map(self.sent.__getitem__, Link),
            self.elapsed_s,
            *map(self.waited_s.__getitem__, Wait),
        )
        padding = [0.0] * (2 * max_ranges - len(numbers))
        return torch.tensor([*map(float, counts), *numbers, *padding], dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """What exchanges took from computing between two votes: the share of their time that ranks were in exchanges other
    than votes, on average and at most; and the seconds of each kind, likewise. Nothing tells what a rank waits for a
    wire from what it waits for a peer that is not there yet, so bubbles of pipelines count. `stalled_s`: how much
    sooner all could have voted, had none waited until the step before was safe."""

    mean_share: float
    most_share: float
    stalled_s: float
    waited_s: Mapping[Wait, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of the whole step, the same on every rank. `not_finite` are the ranks whose loss or gradients are no finite
    numbers: where there are any, nobody applies the step. `loss` and `grad_norm` are means over `num_targets` targets
    (without any, `loss` is none); gradients become that when they are multiplied with `scale`."""

    loss: float
    num_targets: int
    grad_norm: float
    scale: float
    stop_after: float
    samples: Ranges
    sent: Mapping[Link, int]
    exposure: Exposure
    not_finite: tuple[int, ...]


def per_target(num_tokens: int, num_targets: int) -> float:
    """What makes a mean over targets of one over tokens; 1.0, to the bit, where all are targets."""
    return num_tokens / num_targets if num_targets else 1.0


def count(ballots: Tensor, step: int, epoch: int, num_tokens: int) -> Verdict:
    """From all packed ballots, by rank, of a step of so many tokens. Raises StepRefused, on every rank, unless all are
    of this step and epoch."""
    steps, epochs, losses, targets, squares, stops = ballots[:, :_NUM_COUNTS].unbind(dim=1)
    if bool((steps != step).any()) or bool((epochs != epoch).any()):
        raise StepRefused(step, f"ranks are at steps {steps.tolist()} of epochs {epochs.tolist()}")
    finite = (losses.isfinite() & squares.isfinite()).tolist()
    rest = ballots[:, _NUM_COUNTS:]
    sizes = [len(Link), 1, len(Wait)]
    sent, elapsed, waited, fed = torch.split(rest, [*sizes, rest.shape[1] - sum(sizes)], dim=1)
    num_targets = int(targets.sum())
    scale = per_target(num_tokens, num_targets)
    return Verdict(
        loss=float(losses.sum()) * scale if num_targets else math.nan,
        num_targets=num_targets,
        grad_norm=math.sqrt(float(squares.sum())) * scale,
        scale=scale,
        stop_after=float(stops.min()),
        samples=_joined(fed.reshape(-1, 2).tolist()),
        sent={link: int(total) for link, total in zip(Link, sent.sum(dim=0), strict=True)},
        exposure=_exposure(elapsed, waited),
        not_finite=tuple(rank for rank, is_finite in enumerate(finite) if not is_finite),
    )


def _exposure(elapsed: Tensor, waited: Tensor) -> Exposure:
    columns = dict(zip(Wait, waited.unbind(dim=1), strict=True))
    exposed = torch.stack([columns[wait] for wait in _EXPOSED]).sum(dim=0)
    shares = exposed / elapsed.squeeze(1).clamp(min=torch.finfo(torch.float64).tiny)
    # All have left the vote before at the same moment, and the last one to come to this one is who all wait for.
    came = elapsed.squeeze(1) - columns[Wait.VOTE]
    return Exposure(
        mean_share=float(shares.mean()),
        most_share=float(shares.max()),
        stalled_s=max(0.0, float(came.max() - (came - columns[Wait.SAFETY]).max())),
        waited_s={wait: (float(column.mean()), float(column.max())) for wait, column in columns.items()},
    )


def _joined(fed: Sequence[Sequence[float]]) -> Ranges:
    """In order, adjacent ones joined; what is repeated stays visible as ranges that overlap."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted((int(first), int(last)) for first, last in fed if first < last):
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)
