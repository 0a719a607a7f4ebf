"""Where a step that came out not finite first went wrong. Asked only after its votes have failed, of all ranks at once.

What is no finite number makes none of everything after it, so it is the first one that tells: the first unit whose
forward gives one, or else the last unit whose gradient has one, for backwards come down from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_workers.live import LiveState

_NOWHERE = -1.0


class FirstFault:
    """As one rank sees it: hears what comes out of its units in a forward (`forward_only.Seen`)."""

    def __init__(self) -> None:
        self._unit = math.inf

    def __call__(self, unit: int, out: Tensor) -> None:
        if unit < self._unit and not bool(out.isfinite().all()):
            self._unit = unit

    def answer(self, live: LiveState, num_layers: int) -> Tensor:
        """The unit in the forward, and that of the summed gradients that this rank vouches for; to be gathered."""
        units = range(num_layers + 1, -1, -1)
        bad = (unit for unit in units for span in live.vouched_spans(unit) if not live.gradient(span).isfinite().all())
        return torch.tensor([self._unit, next(map(float, bad), _NOWHERE)], dtype=torch.float64)


def told(answers: Tensor, not_finite: Sequence[int], devices: Sequence[str], num_layers: int) -> str:
    """In words, from the answers of all ranks. `not_finite` are the ranks that voted against the step."""
    forward, backward = answers.unbind(dim=1)
    first, last = float(forward.min()), float(backward.max())
    if math.isfinite(first):
        ranks = [rank for rank, unit in enumerate(forward.tolist()) if unit == first]
        what = f"the first value that is not finite comes out of {_name(int(first), num_layers)}"
    elif last != _NOWHERE:
        ranks = [rank for rank, unit in enumerate(backward.tolist()) if unit == last]
        what = f"activations are finite, but the gradient of {_name(int(last), num_layers)} is not"
    else:
        ranks, what = [], "each activation and each gradient is finite by itself, only sums of them are not"
    where = f", on {_ranks(ranks, devices)}" if ranks else ""
    return f"loss or gradients are not finite on {_ranks(not_finite, devices)}: {what}{where}"


def _ranks(ranks: Sequence[int], devices: Sequence[str]) -> str:
    named = ", ".join(f"{rank} ({devices[rank]})" for rank in ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


def _name(unit: int, num_layers: int) -> str:
    """Layers count from 0, as in plans and in the names of parameters."""
    if unit == 0:
        return "the embedding"
    return f"layer {unit - 1}" if unit <= num_layers else "the head"
