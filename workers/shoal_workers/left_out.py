"""Which nodes a job does without although they answer, and why. Pure bookkeeping.

A node whose rank blamed the node itself is left out as long as it is the same incarnation, or until the time that was
given; one of a device type that nobody knows is left out as long as nobody does, and one of GPUs as long as its ranks
see none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import structlog

from shoal_planner.catalogue import DeviceType, device_type
from shoal_planner.cluster import DeviceOverride
from shoal_planner.errors import InvalidField
from shoal_workers.errors import DeviceMissing
from shoal_workers.nodes import NodeSeen
from shoal_workers.roster import Contact

log = structlog.get_logger()


class LeftOut:
    def __init__(self, overrides: tuple[DeviceOverride, ...]) -> None:
        self._overrides = overrides
        self._faults: dict[tuple[str, str], tuple[str, float]] = {}
        self._types: dict[str, DeviceType | None] = {}

    def blame(self, seen: NodeSeen, problem: str, until_s: float = math.inf) -> None:
        self._faults[seen.node.id, seen.incarnation] = problem, until_s

    def reasons(self, nodes: Iterable[NodeSeen], ranks: Iterable[Contact] = (), now_s: float = 0.0) -> dict[str, str]:
        """Those of these nodes that are left out, each with one line for people; `ranks` say what devices they see."""
        missing: dict[str, str] = {}
        for rank in ranks:
            if rank.cuda_devices is not None and rank.device.index >= rank.cuda_devices:
                missing.setdefault(rank.node, str(DeviceMissing(str(rank.device), rank.cuda_devices)))
        found = {seen.node.id: self._reason(seen, missing.get(seen.node.id), now_s) for seen in nodes}
        return {node: reason for node, reason in sorted(found.items()) if reason is not None}

    def _reason(self, seen: NodeSeen, missing: str | None, now_s: float) -> str | None:
        fault, until_s = self._faults.get((seen.node.id, seen.incarnation), (None, 0.0))
        if now_s < until_s:
            return fault
        name = seen.node.device
        if name not in self._types:
            try:
                self._types[name] = device_type(name, self._overrides)
            except InvalidField as error:
                log.warning("device type not usable", node=seen.node.id, error=str(error))
                self._types[name] = None
        kind = self._types[name]
        if kind is None:
            return f"its device type {name!r} cannot be planned with"
        return missing if kind.threads is None else None


def sentence(reasons: Iterable[tuple[str, str]]) -> str:
    """For the end of a reason; empty where nobody is left out."""
    named = "; ".join(f"{node} ({why})" for node, why in reasons)
    return f" Left out: {named}." if named else ""
