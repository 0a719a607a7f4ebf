"""The language of programs: what each rank does in one step, as values that two interpreters run.

`simulate` runs them on costs, the engine runs them on tensors. Every micro-batch is named by its number within the
pipeline, every chunk of layers by its number within the stage; peers are ranks. A step of a rank is its instructions in
order; sends never block, receives are posted early. A message names the chunks at both of its ends, as interleaved
stages pass a micro-batch from the last stage's chunk to the first one's next.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Gradients of the chunk's input and of its weights."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGradient:
    """The part of a backward that the previous stage waits for. What belongs to no block (embedding, final norm, head)
    gets the gradients of its weights here too."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradient:
    """The rest of that backward, which nobody waits for: gradients of the blocks' weights."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendActivation:
    """Rows [first, last) of this micro-batch's samples, counted within the micro-batch, to a rank of the next stage
    (from the last stage: of the first)."""

    micro_batch: int
    peer: int
    first: int
    last: int
    chunk: int = 0
    peer_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveActivation:
    micro_batch: int
    peer: int
    first: int
    last: int
    chunk: int = 0
    peer_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGradient:
    """The gradient of the rows [first, last) of the stage's input, to a rank of the previous stage."""

    micro_batch: int
    peer: int
    first: int
    last: int
    chunk: int = 0
    peer_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveGradient:
    micro_batch: int
    peer: int
    first: int
    last: int
    chunk: int = 0
    peer_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Gradients of this unit go to the owners of their intervals, who sum them."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """All ranks agree that the step counts, or nobody applies it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The optimizer applies the summed gradients to the owned intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Updated weights of this unit go from their owners to all holders."""

    unit: int


Instruction = (
    Forward
    | Backward
    | InputGradient
    | WeightGradient
    | SendActivation
    | ReceiveActivation
    | SendGradient
    | ReceiveGradient
    | Reduce
    | Vote
    | Update
    | Gather
)
Work = Forward | Backward | InputGradient | WeightGradient
Program = tuple[Instruction, ...]
