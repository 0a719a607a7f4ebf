"""Which nodes a job does without although they answer, and why. Pure bookkeeping.

A node whose rank blamed the node itself is left out as long as it is the same incarnation; one of a device type that
nobody knows is left out as long as nobody does.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import DeviceOverride
from shoal_planner.errors import InvalidField
from shoal_workers.nodes import NodeSeen

log = structlog.get_logger()


class LeftOut:
    def __init__(self, overrides: tuple[DeviceOverride, ...]) -> None:
        self._overrides = overrides
        self._faults: dict[tuple[str, str], str] = {}
        self._unknown: dict[str, str | None] = {}

    def blame(self, seen: NodeSeen, problem: str) -> None:
        self._faults[seen.node.id, seen.incarnation] = problem

    def reasons(self, nodes: Iterable[NodeSeen]) -> dict[str, str]:
        """Those of these nodes that are left out, each with one line for people."""
        found = {seen.node.id: self._reason(seen) for seen in nodes}
        return {node: reason for node, reason in sorted(found.items()) if reason is not None}

    def _reason(self, seen: NodeSeen) -> str | None:
        return self._faults.get((seen.node.id, seen.incarnation)) or self._unknown_type(seen)

    def _unknown_type(self, seen: NodeSeen) -> str | None:
        name = seen.node.device
        if name not in self._unknown:
            try:
                device_type(name, self._overrides)
                self._unknown[name] = None
            except InvalidField as error:
                log.warning("device type not usable", node=seen.node.id, error=str(error))
                self._unknown[name] = f"its device type {name!r} cannot be planned with"
        return self._unknown[name]


def sentence(reasons: Iterable[tuple[str, str]]) -> str:
    """For the end of a reason; empty where nobody is left out."""
    named = "; ".join(f"{node} ({why})" for node, why in reasons)
    return f" Left out: {named}." if named else ""
