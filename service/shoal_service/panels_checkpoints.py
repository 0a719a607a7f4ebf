"""What the checkpoints panel shows: what was brought to the object store, and what was not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_recovery.journal import CheckpointCommitted, CheckpointFailed
from shoal_recovery.journal_scripts import CheckpointReported
from shoal_service.timeline import Event, duration, num_bytes

KINDS = (CheckpointCommitted.kind, CheckpointFailed.kind, CheckpointReported.kind)
MAX_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`problem` is empty where the step stands whole in the store (or stood: older ones are deleted)."""

    seq: int
    step: int
    at_s: float
    uri: str
    size: str
    took: str
    speed: str
    problem: str


def checkpoints(newest_first: Sequence[Event]) -> tuple[Checkpoint, ...]:
    return tuple(_checkpoint(event) for event in newest_first[:MAX_SHOWN])


def _checkpoint(event: Event) -> Checkpoint:
    said = event.payload
    took_s, count = float(said.get("duration_s", 0.0)), said.get("num_bytes")
    return Checkpoint(
        seq=event.seq,
        step=said["step"],
        at_s=event.at_s,
        uri=said["uri"],
        size="" if count is None else num_bytes(count),
        took=duration(took_s) if took_s else "",
        speed=f"{num_bytes(count / took_s)}/s" if took_s and count else "",
        problem=said.get("problem", ""),
    )
