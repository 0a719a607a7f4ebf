"""Which nodes an entry of a job's journal brings to the job, and which it takes from it. Pure: whoever adds the entries
up (lanes, dollars, counts) agrees with all others on when a job had a node."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shoal_recovery.journal import JobState, NodeJoined, NodeLost, NoticeEnded, PlanAdopted, StateChanged
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_recovery.journal_shares import ShareTaken

GONE = "gone"  # what came of a notice, where the node went


def arrivals(kind: str, payload: Mapping[str, Any]) -> tuple[str, ...]:
    """Nodes that the job has from this entry on, if it did not have them before."""
    match kind:
        case PlanAdopted.kind | WorkersStarted.kind:
            return tuple(node["id"] for node in payload["snapshot"]["nodes"])
        case NodeJoined.kind:
            return (payload["node"],)
        case _:
            return ()


def departures(kind: str, payload: Mapping[str, Any], held: Collection[str]) -> frozenset[str]:
    """Those of the nodes that it has which it has no more after this entry."""
    match kind:
        case ShareTaken.kind if payload["nodes"] is not None:
            return frozenset(held) - {*payload["nodes"]}
        case StateChanged.kind if payload["state"] == JobState.PAUSED:
            return frozenset(held)
        case NodeLost.kind:
            return frozenset({payload["node"]}).intersection(held)
        case NoticeEnded.kind if payload["outcome"] == GONE:
            return frozenset({payload["node"]}).intersection(held)
        case _:
            return frozenset()
