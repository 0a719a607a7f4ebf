"""What the checkpoints panel shows: what was brought to the object store and what was not, and whether it still stands
there, as somebody has looked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal_recovery.journal import CheckpointCommitted, CheckpointFailed
from shoal_recovery.journal_scripts import CheckpointReported
from shoal_service.checkpoint_facts import Saved, Verified, is_commit, verified
from shoal_service.panels_recovery import milliseconds
from shoal_service.store_looks import StoreLook
from shoal_service.timeline import Event, duration, num_bytes

KINDS = (CheckpointCommitted.kind, CheckpointFailed.kind, CheckpointReported.kind)
MAX_SHOWN = 12
NOBODY: Mapping[Saved, float] = {}


class Standing(StrEnum):
    """`SAID`: the journal tells that it was stored, and nobody could look whether it still is."""

    STANDS = "stands"
    DELETED = "deleted"
    SAID = "said"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`problem` says why it was not stored, where it was not. `held_up`: for how long training waited for copies of
    that state; empty where nobody tells."""

    seq: int
    step: int
    at_s: float
    uri: str
    size: str
    took: str
    speed: str
    held_up: str
    problem: str
    standing: Standing
    verified: Verified | None


def checkpoints(
    newest_first: Sequence[Event],
    look: StoreLook | None,
    held_up_s: Mapping[Saved, float] = NOBODY,
    recoveries: Sequence[Event] = (),
) -> tuple[Checkpoint, ...]:
    """`look`: None where nobody has looked. `held_up_s`: by epoch and step, for how long training was."""
    shown = newest_first[:MAX_SHOWN]
    return tuple(_checkpoint(event, look, held_up_s, recoveries) for event in shown)


def _standing(event: Event, look: StoreLook | None) -> Standing:
    if event.payload.get("problem"):
        return Standing.FAILED
    if look is not None and event.payload["step"] in look.steps:
        return Standing.STANDS
    seen_since = look is not None and not look.problem and look.at_s > event.at_s
    return Standing.DELETED if seen_since else Standing.SAID


def _checkpoint(
    event: Event, look: StoreLook | None, held_up_s: Mapping[Saved, float], recoveries: Sequence[Event]
) -> Checkpoint:
    said = event.payload
    took_s, count = float(said.get("duration_s", 0.0)), said.get("num_bytes")
    waited_s = held_up_s.get((said.get("epoch", 0), said["step"]))
    return Checkpoint(
        seq=event.seq,
        step=said["step"],
        at_s=event.at_s,
        uri=said["uri"],
        size="" if count is None else num_bytes(count),
        took=duration(took_s) if took_s else "",
        speed=f"{num_bytes(count / took_s)}/s" if took_s and count else "",
        held_up="" if waited_s is None else milliseconds(waited_s),
        problem=said.get("problem", ""),
        standing=_standing(event, look),
        verified=verified(said["step"], event, recoveries) if is_commit(event) else None,
    )
