"""When the nodes of a cluster were last heard, as it told. Pure: what stands in the database, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_KEPT_S = 3600.0  # of a node that nobody tells of any more, so that it is seen how long it is gone
SILENT_S = 10.0  # a connector tells every two seconds, and asks those who listen to heartbeats of 50 ms

Kept = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """`by`: `processes`, to which the supervisor of a job listens, or `ray`, which lists the node."""

    at_s: float
    by: str

    def age_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.at_s)

    def is_silent(self, now_s: float) -> bool:
        return self.age_s(now_s) > SILENT_S


def taken(kept: Kept, ages_s: Mapping[str, tuple[float, str]], now_s: float) -> dict[str, Any] | None:
    """What is to be kept after the cluster has told of `ages_s`, at `now_s` by our clock: by node when and by whom.
    None where nothing was ever told."""
    told = {node: [round(now_s - age_s, 3), by] for node, (age_s, by) in ages_s.items()}
    if kept is None and not told:
        return None
    older = {node: [at_s, by] for node, (at_s, by) in (kept or {}).items() if now_s - at_s < _KEPT_S}
    return older | told


def sign(kept: Kept, node: str) -> Sign | None:
    """The last one of a node; None where nobody has told of any."""
    found = (kept or {}).get(node)
    return None if found is None else Sign(at_s=float(found[0]), by=str(found[1]))


def sign_of(node: Mapping[str, Any]) -> Sign | None:
    """Of a node as REST shows it."""
    if node["heard_at"] is None:
        return None
    return Sign(at_s=datetime.fromisoformat(node["heard_at"]).timestamp(), by=node["heard_by"])
