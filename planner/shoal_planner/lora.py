"""LoRA (Hu et al. 2021): a job that trains a small pair of matrices beside each chosen matrix W of its blocks. These
compute with W + alpha / rank * B A, and W stays as it was.

Owns what a job may say of it (`LoraSpec`), and what becomes of that in the model of the job (`Adapters`). Does not own
the adapters' shapes (`parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal_planner.errors import InvalidField
from shoal_planner.ranges import check_positive, check_range

ALL_LINEAR: Literal["all-linear"] = "all-linear"
# By the names that a job has for them, what the matrices of a block are called.
MATRICES: Mapping[str, str] = {
    "q": "attention.q",
    "k": "attention.k",
    "v": "attention.v",
    "o": "attention.o",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
}
_MOST_RANK = 2**14
_ALPHA_PER_RANK = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """`targets` are the matrices of every block that get adapters, all of them by default, named as in `MATRICES` or as
    peft has them (`q_proj`); what they add is scaled by alpha / rank, 2 by default. `base` is the fingerprint of the
    weights that stay as they are: whoever accepts the job fills it in, and other weights are refused from then on."""

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] | Literal["all-linear"] = ALL_LINEAR
    dropout: float = 0.0
    base: str | None = None

    def __post_init__(self) -> None:
        check_range("rank", self.rank, 1, _MOST_RANK)
        if self.alpha is None:
            object.__setattr__(self, "alpha", _ALPHA_PER_RANK * self.rank)
        assert self.alpha is not None
        check_positive("alpha", self.alpha)
        if self.dropout != 0:
            raise InvalidField("dropout", self.dropout, "is not supported: leave it out or 0")
        if self.targets != ALL_LINEAR:
            object.__setattr__(self, "targets", tuple(map(_ours, self.targets)))
            self._check_targets()

    def _check_targets(self) -> None:
        if not self.targets:
            raise InvalidField("targets", self.targets, f"must name a matrix, or be {ALL_LINEAR!r}")
        for index, target in enumerate(self.targets):
            if target not in MATRICES:
                raise InvalidField(f"targets[{index}]", target, f"must be one of {', '.join(MATRICES)}")
            if target in self.targets[:index]:
                raise InvalidField(f"targets[{index}]", target, "is named twice")


def _ours(target: str) -> str:
    short = target.removesuffix("_proj")
    return short if short in MATRICES else target


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Where the weights are that stay as they are: at `uri`, of which `step` is a checkpoint unless it is a folder of
    Hugging Face's. `fingerprint` is that of what is there, where somebody has looked."""

    uri: str
    step: int | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Beside which matrices of every block there are adapters, `names` as in `MATRICES`."""

    rank: int
    alpha: float
    names: tuple[str, ...]
    base: Base

    @property
    def scale(self) -> float:
        """Of what adapters add."""
        return self.alpha / self.rank


def adapters_of(lora: LoraSpec, rows: Mapping[str, int], hidden: int, base: Base) -> Adapters:
    """For blocks with matrices of these names and stored rows, each of `hidden` columns. Raises InvalidField."""
    known = {target: name for target, name in MATRICES.items() if name in rows}
    chosen = tuple(known) if lora.targets == ALL_LINEAR else lora.targets
    for index, target in enumerate(chosen):
        if target not in known:
            problem = f"is no matrix of this model's blocks, which have {', '.join(known)}"
            raise InvalidField(f"targets[{index}]", target, problem)
        most = min(rows[known[target]], hidden)
        if lora.rank > most:
            raise InvalidField("rank", lora.rank, f"must be at most {most}, the smaller dimension of {target}")
    assert lora.alpha is not None
    names = tuple(name for target, name in known.items() if target in chosen)
    return Adapters(rank=lora.rank, alpha=lora.alpha, names=names, base=base)
