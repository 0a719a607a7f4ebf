"""What the page of a job that runs a script shows beside what every job's does, as plain values and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from shoal_recovery.journal_scripts import CheckpointReported, ScriptReported, WorkersStarted
from shoal_service import journal
from shoal_service.models import JobRow
from shoal_service.timeline import num_bytes

_MAX_CHECKPOINTS = 20


async def script_view(session: AsyncSession, row: JobRow) -> dict[str, Any]:
    reported = await journal.newest(session, row.id, 1, (ScriptReported.kind,))
    started = await journal.newest(session, row.id, 1, (WorkersStarted.kind,))
    stored = await journal.newest(session, row.id, _MAX_CHECKPOINTS, (CheckpointReported.kind,))
    wanted = row.spec["workers"]
    return {
        "workers": len(started[0].payload["nodes"]) if started else None,
        "range": f"of {wanted['min']} to {wanted['max']}",
        "metrics": [(name, _figure(value)) for name, value in reported[0].payload["metrics"].items()]
        if reported
        else [],
        "checkpoints": [
            (entry.payload["step"], entry.payload["uri"], num_bytes(entry.payload["num_bytes"])) for entry in stored
        ],
    }


def script_sentence(kind: str, said: Mapping[str, Any]) -> str | None:
    """What an entry of the journal says, in words; None of a kind that every job has."""
    match kind:
        case "script_started":
            return f"start {said['attempt']}, on {said['node']}: {said['reason']}"
        case "trainer_adjusted":
            settings = "; ".join(f"{name}: {value}" for name, value in said["settings"].items())
            return f"trainer {said['trainer']} of the script runs with {settings}"
        case "workers_started":
            origin = said["checkpoint"] or "nothing stored"
            nodes = ", ".join(said["nodes"])
            return (
                f"{len(said['nodes'])} workers on {nodes}, epoch {said['epoch']}, from step {said['step']} ({origin})"
            )
        case "checkpoint_reported":
            return f"step {said['step']} stands in {said['uri']}: {num_bytes(said['num_bytes'])}"
        case "script_failed":
            who = "the script" if said["rank"] is None else f"worker {said['rank']}"
            return f"{who} on {said['node']}: {said['problem']}\n{said['traceback']}"
        case _:
            return None


def _figure(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
