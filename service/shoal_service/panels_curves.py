"""What is marked on a job's curves, and what of it a table lists. Pure; static/curve.js draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal_recovery.journal import CheckpointCommitted, NodeNoticed, RecoveryDone
from shoal_service.timeline import Event, num_bytes

MAX_MARKS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`step` is None where the journal tells a time alone; `label` stands beside the line, `text` says what it was."""

    kind: str
    seq: int
    at: str
    step: int | None
    label: str
    text: str


def marks(events: Sequence[Event], stored: Sequence[Event], rfc3339: Callable[[float], str]) -> list[dict[str, Any]]:
    """The newest, in the order in which they came: recoveries, notices that nodes go away, checkpoints."""
    number = 0
    found: list[Mark] = []
    for event in sorted((*events, *stored), key=lambda each: each.seq):
        said, at = event.payload, rfc3339(event.at_s)
        match event.kind:
            case RecoveryDone.kind:
                number += 1
                redone = f", re-done steps: {said['redone_steps']}" if said["redone_steps"] else ""
                text = f"{said['reason'].rstrip('.')}{redone}"
                found.append(
                    Mark(kind="recovery", seq=event.seq, at=at, step=said["step"], label=f"R{number}", text=text)
                )
            case NodeNoticed.kind:
                text = f"{said['node']} is to go away ({said['source']})"
                found.append(Mark(kind="notice", seq=event.seq, at=at, step=None, label="!", text=text))
            case CheckpointCommitted.kind:
                text = f"step {said['step']} stands in the store: {num_bytes(said['num_bytes'])}"
                found.append(Mark(kind="checkpoint", seq=event.seq, at=at, step=said["step"], label="", text=text))
            case _:
                pass
    return [asdict(mark) for mark in found[-MAX_MARKS:]]
