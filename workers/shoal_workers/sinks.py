"""Where autograd's gradients of weights go: into buffers of the live state, in which they add up through a step.

Owns what is first in a step. Does not own the buffers (`flat`) nor which parameters a leaf is of (`live`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal_recovery.state import Span
from shoal_workers.flat import UnitBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where the gradient of a leaf adds up. Autograd keeps it, so it must not keep the live state. `alone`: the leaf is
    all that is held of its parameter."""

    fqn: str
    home: int
    gradient: Tensor
    alone: bool
    stale: dict[str, list[Span]]
    buffers: UnitBuffers

    def is_first(self) -> bool:
        """Whether nothing has come yet in this step; then what is there is not to be added to."""
        spans = self.stale.pop(self.fqn, None)
        if spans is None:
            return False
        self.buffers.reopen(self.home)
        if not self.alone:
            for span in spans:
                self.buffers.kept(self.home, span).zero_()
        return self.alone

    def take(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        if self.is_first():
            self.gradient.copy_(leaf.grad)
        else:
            self.gradient.add_(leaf.grad)
        leaf.grad = None
