"""Where documents begin within sequences, for models that see each by itself (`data.attention: document`).

Owns how a row of tokens says so, and what the units of a model need to know of a micro-batch. Every sequence begins a
piece, too: what stands before it is in another sequence. Does not own where documents are found (`documents`,
`numbered`), nor what attention makes of it (`attention`).

Shapes: B sequences, S positions, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_workers.devices import upload

# In the first token of a document, which is no target and so stands there as its complement; more than any id, and 32
# bits hold both.
BEGINS = 1 << 30


@dataclass(slots=True, kw_only=True, eq=False)
class Borders:
    """Of a micro-batch: `lengths` of its pieces, one sequence behind the other, and how far each token is from the
    beginning of its piece. `firsts` has where pieces begin among all tokens, and where the last one ends, int32."""

    lengths: tuple[int, ...]
    positions_BS: Tensor
    firsts: Tensor
    _angles: tuple[Tensor, Tensor] | None = None

    @property
    def is_trivial(self) -> bool:
        """Whether each sequence is one piece."""
        return len(self.lengths) == len(self.positions_BS)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that are kept as long as it is."""
        return (self.positions_BS, self.firsts, *(self._angles or ()))

    def angles(self, cos_SD: Tensor, sin_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of these tables, [B, 1, S, D] each; made once, as all blocks of a model have the same."""
        if self._angles is None:
            rows_B1S = self.positions_BS.unsqueeze(1)
            self._angles = cos_SD[rows_B1S], sin_SD[rows_B1S]
        return self._angles


def borders_of(rows: Tensor, device: torch.device) -> Borders:
    """Of samples on the host, [B, S + 1]."""
    begins_BS = rows[:, :-1] <= ~BEGINS
    begins_BS[:, 0] = True
    starts = begins_BS.flatten().nonzero().flatten()
    ends = torch.cat((starts, torch.tensor([begins_BS.numel()])))
    lengths = ends.diff()
    positions_T = torch.arange(begins_BS.numel()) - starts.repeat_interleave(lengths)
    return Borders(
        lengths=tuple(lengths.tolist()),
        positions_BS=upload(positions_T.view(begins_BS.shape), device),
        firsts=upload(ends.int(), device),
    )
