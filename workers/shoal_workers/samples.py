"""What training reads: numbered samples, whatever they are made of, and which of their tokens are to be learnt.

Owns the form of a sample: a row of int64 with seq_len tokens and the token after them. A token that is none of the
targets (padding, what a user said in a chat, the first of a document) is there as its complement, so that one tensor
holds both. Where each document is seen by itself, the first token of one is marked beneath that (`borders`). Sample
numbers count through the whole training: step s takes [(s - 1) * global_batch, s * global_batch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal_workers.borders import BEGINS, Borders, borders_of
from shoal_workers.devices import upload

IGNORED = -100  # in the place of a target that is not to be learnt

Row = list[int]


class Samples(Protocol):
    """Any thread may call. What a number stands for depends on the data, the seed and the global batch alone."""

    @property
    def ignores(self) -> bool:
        """Whether some tokens may be no targets."""

    @property
    def by_document(self) -> bool:
        """Whether the model sees each document by itself. First tokens of documents are marked then, and no targets."""

    def read(self, numbers: Sequence[int]) -> Tensor:
        """Int64 [len(numbers), seq_len + 1]. Raises DataError, StoreError, OSError."""

    def learn(self, marks: Sequence[Row]) -> None:
        """Where samples begin, as `marks` of another rank told it: so nothing is read that was trained on before."""

    def marks(self, undone: Callable[[int], int]) -> list[Row]:
        """What was found out since this was last asked, and lies before what was not yet trained on: of each slot of
        the batch, `undone` gives the first such number. (More may have been read, for a step that was abandoned.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of samples where they are computed with. Of the targets `num_targets` are to be learnt, others IGNORED.
    Without `borders` each sequence is seen as one."""

    tokens_BS: Tensor
    targets_BS: Tensor
    num_targets: int
    borders: Borders | None = None


def batch(samples: Samples, numbers: Sequence[int], device: torch.device) -> Batch:
    """Raises what `Samples.read` does."""
    rows = samples.read(numbers)
    seq_len = rows.shape[1] - 1
    if not samples.ignores:
        rows = upload(rows, device)
        return Batch(tokens_BS=rows[:, :-1], targets_BS=rows[:, 1:], num_targets=len(numbers) * seq_len)
    num_targets = int((rows[:, 1:] >= 0).sum())
    borders = borders_of(rows, device) if samples.by_document else None
    rows = upload(rows, device)
    return Batch(
        tokens_BS=ids_of(rows)[:, :-1],
        targets_BS=rows[:, 1:].masked_fill(rows[:, 1:] < 0, IGNORED),
        num_targets=num_targets,
        borders=borders,
    )


def ids_of(rows: Tensor) -> Tensor:
    """Of all tokens, targets or not."""
    return torch.where(rows < 0, ~rows & ~BEGINS, rows)
