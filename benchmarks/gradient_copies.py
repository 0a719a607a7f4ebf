"""A copy of a rank's state that is kept up by its gradients: whoever has it applies the same update.

Owns the copy of one rank, over memory that others own and fill: the state of some step, and two slots for gradients,
one for even and one for odd steps. Owns no sockets and no processes.

A copy is torn while it is updated, so its step may only be taken when no one can want the one before: a gradient stays
beside the copy until the gradient of the step after it has come, which nobody sends before the vote for that is
complete. Sums are taken of all that lies here between two updates, and looked at before the next: what an update has
been made of cannot be told from what is right afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shoal_planner.job import JobSpec, ModelSpec
from shoal_recovery.crc import checksum
from shoal_recovery.state import ELEMENT_BYTES, Kind, ShardKey, Span
from shoal_workers.devices import CPU
from shoal_workers.hosted import HostedState
from shoal_workers.live import LiveState
from shoal_workers.optimizer import OwnedAdamW
from shoal_workers.shards import NUM_SLOTS

_UNCLIPPED = 0.0  # as a norm: gradients come as the rank has scaled them


class Spoilt(Exception):
    """What lies here is not what came or was made here."""


def gradient_keys(state: Sequence[ShardKey]) -> tuple[ShardKey, ...]:
    """The layout of a snapshot of gradients. There is no kind for these; they have the elements of the masters."""
    return tuple(key for key in state if key.kind is Kind.MASTER)


def sums(keys: Sequence[ShardKey], content: memoryview) -> list[str]:
    """Of each shard of what lies in this order."""
    return [checksum(content[first:last]) for _, first, last in _placed(keys)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    owns: tuple[Span, ...]
    hosted: tuple[Span, ...] = ()


class _Copied:
    """What OwnedAdamW asks of a live state."""

    def __init__(
        self, model: ModelSpec, views: Mapping[ShardKey, Tensor], gradients: Mapping[ShardKey, Tensor]
    ) -> None:
        self.model = model
        self.state = _Owned(owns=tuple(_span(key) for key in gradients))
        self.hosted = HostedState({}, CPU)
        self._views = views
        self._gradients = gradients

    def gradient(self, span: Span) -> Tensor:
        return self._gradients[span.key(Kind.MASTER)]

    def master(self, span: Span) -> Tensor:
        return self._views[span.key(Kind.MASTER)]

    def view(self, key: ShardKey) -> Tensor:
        return self._views[key]

    def refresh_weights(self) -> None:
        """A copy has none."""


class GradientCopy:
    """Of what one rank vouches for: `content` is laid out as its snapshots are. `step` says what is whole here."""

    def __init__(
        self, job: JobSpec, keys: Sequence[ShardKey], content: memoryview, gradients: Sequence[memoryview]
    ) -> None:
        self._keys = tuple(keys)
        self._gradient_keys = gradient_keys(keys)
        self._content = content
        self._gradients = tuple(gradients)
        self._updates = tuple(
            OwnedAdamW(job.train, cast(LiveState, _Copied(job.model, _views(keys, content), gradients_of_slot)))
            for gradients_of_slot in (_views(self._gradient_keys, slot) for slot in gradients)
        )
        assert len(self._updates) == NUM_SLOTS, len(self._updates)
        self.step: int | None = None
        self.sums: list[str] = []

    def begin(self, step: int, expected: list[str]) -> None:
        """The state of this step has come."""
        self.step, self.sums = step, expected

    def apply(self, step: int, expected: list[str]) -> None:
        """The gradients of the next step lie in their slot, with these sums. Raises Spoilt, having changed nothing."""
        assert self.step == step - 1, (self.step, step)
        self.verify(self._gradient_keys, self._gradients[step % NUM_SLOTS], expected, step)
        self.verify(self._keys, self._content, self.sums, step - 1)
        self.step = None
        self.update(step)
        self.sums, self.step = self.taken(), step

    def update(self, step: int) -> None:
        with torch.no_grad():
            self._updates[step % NUM_SLOTS].apply(step, _UNCLIPPED)

    def taken(self) -> list[str]:
        """The sums of the state as it is."""
        return sums(self._keys, self._content)

    def verify(self, keys: Sequence[ShardKey], content: memoryview, expected: list[str], step: int) -> None:
        """Raises Spoilt."""
        for key, found, wanted in zip(keys, sums(keys, content), expected, strict=True):
            if found != wanted:
                raise Spoilt(f"{key} of step {step} had {wanted}, and has {found}")


def _placed(keys: Sequence[ShardKey]) -> Iterator[tuple[ShardKey, int, int]]:
    """Where each lies: the first byte, and the one after the last."""
    first = 0
    for key in keys:
        last = first + key.numel * ELEMENT_BYTES
        yield key, first, last
        first = last


def _views(keys: Sequence[ShardKey], content: memoryview) -> dict[ShardKey, Tensor]:
    """New tensors over the same memory: each update hangs its gradients to its own."""
    return {
        key: torch.frombuffer(content, dtype=torch.float32, count=key.numel, offset=first)
        for key, first, _ in _placed(keys)
    }


def _span(key: ShardKey) -> Span:
    return Span(fqn=key.fqn, first=key.first, last=key.last)
