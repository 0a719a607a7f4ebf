"""Short documents for jobs that see each by itself (`data.attention: document`), and what one by one they come to.

Tokens are bytes, and no text has the byte 0 that ends a document: so a row of ids tells by itself where they begin.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from engine_runs import job
from torch import Tensor

from shoal_planner.job import DataSpec, JobSpec
from shoal_workers.data import training_samples
from shoal_workers.samples import ids_of

END = 0


def texts(count: int = 600, seed: int = 0) -> list[str]:
    """Of 0 to 60 bytes."""
    chance = random.Random(seed)
    return [
        "".join(chance.choice("abcde, ") for _ in range(int(chance.paretovariate(0.9) * 4) % 61)) for _ in range(count)
    ]


def write(folder: Path) -> DataSpec:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts()))
    return DataSpec(uri=folder.as_uri(), format="jsonl", attention="document")


def document_job(folder: Path, *, tied: bool = True, **named: object) -> JobSpec:
    """As `engine_runs.job`, on documents of the folder."""
    return dataclasses.replace(job(tied=tied, **named), data=write(folder))  # type: ignore[arg-type]


def pieces(ids: Tensor) -> Iterator[Tensor]:
    """Of one row of ids, [S]: the documents, or what there is of them."""
    ends = [int(at) + 1 for at in (ids == END).nonzero().flatten() if at + 1 < len(ids)]
    return iter(torch.tensor_split(ids, ends))


def logits_one_by_one(logits_of: Callable[[Tensor], Tensor], ids_BS: Tensor) -> Tensor:
    """[B, S, V], where `logits_of` gives [L, V] for a document by itself."""
    return torch.stack([torch.cat([logits_of(piece) for piece in pieces(ids_S)]) for ids_S in ids_BS])


def loss_one_by_one(logits_of: Callable[[Tensor], Tensor], ids_BT: Tensor) -> Tensor:
    """The mean over all targets: what follows within a document, of sequences and the token behind them."""
    losses, num_targets = [], 0
    for ids_T in ids_BT:
        for piece in pieces(ids_T):
            if len(piece) > 1:
                losses.append(F.cross_entropy(logits_of(piece[:-1]), piece[1:], reduction="sum"))
                num_targets += len(piece) - 1
    return torch.stack(losses).sum() / num_targets


def ids_of_step(spec: JobSpec, step: int) -> Tensor:
    """[B, S + 1]."""
    batch = spec.train.global_batch
    return ids_of(training_samples(spec).read(range((step - 1) * batch, step * batch)))
