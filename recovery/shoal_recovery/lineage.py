"""Which snapshots belong to the history that counts.

When an epoch begins at step s, whatever older epochs did beyond s is void: those steps are done again, and may come out
different in the last bits. So state is told by epoch *and* step, and only one state of each step is ever used.
"""

from __future__ import annotations

from collections.abc import Mapping


def counts(epoch: int, step: int, starts: Mapping[int, int]) -> bool:
    """Whether what `epoch` holds of `step` is part of the history, given at which step every epoch began."""
    return all(step <= start for later, start in starts.items() if later > epoch)
