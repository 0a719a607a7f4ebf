"""How nodes that a change of plan was for came to be known to go: by a notice, or by their loss."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal_recovery.journal import NodeLost, NodeNoticed
from shoal_service.timeline import Event, duration

KINDS = (NodeNoticed.kind, NodeLost.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The notice of a node, or None, and its loss, or None as long as it was not lost: one of them is there."""

    node: str
    notice: Event | None
    loss: Event | None

    def resource(self) -> dict[str, Any]:
        notice = self.notice and {name: self.notice.payload[name] for name in ("source", "why", "lead_s")}
        loss = self.loss and {name: self.loss.payload[name] for name in ("evidence", "detect_s")}
        after_s = None if self.notice is None or self.loss is None else self.loss.at_s - self.notice.at_s
        return {"node": self.node, "notice": notice, "loss": loss, "loss_after_notice_s": after_s}

    @property
    def sentence(self) -> str:
        if self.notice is None:
            assert self.loss is not None
            said = self.loss.payload
            return f"{self.node}: without notice, {said['evidence']}; noticed after {duration(said['detect_s'])}"
        said, left_s = self.notice.payload, self.notice.payload["lead_s"]
        words = f"{self.node}: notice by {said['source']} ({said['why']}), {duration(left_s)} before its end"
        if self.loss is None:
            return words
        return f"{words}; lost {duration(self.loss.at_s - self.notice.at_s)} after that"


class Tellings:
    """Of a job: its entries of these `KINDS`, oldest first, and others."""

    def __init__(self, history: Iterable[Event]) -> None:
        self._found: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in history:
            if event.kind in KINDS:
                self._found[event.kind, event.payload["node"]].append(event)

    def of(self, recovery: Event) -> tuple[Known, ...]:
        """Of the nodes that it was for, by what stands before it in the journal."""
        named = (*recovery.payload.get("nodes_lost", ()), *recovery.payload.get("nodes_drained", ()))
        return tuple(known for node in named if (known := self._of_node(node, recovery.seq)) is not None)

    def _of_node(self, node: str, seq: int) -> Known | None:
        notice, loss = (self._newest(kind, node, seq) for kind in KINDS)
        if notice is not None and loss is not None and loss.at_s < notice.at_s:
            loss = None  # of the node's life before
        if notice is not None and loss is not None and self._lost_between(node, notice, loss):
            notice = None
        return None if notice is None and loss is None else Known(node=node, notice=notice, loss=loss)

    def _lost_between(self, node: str, notice: Event, loss: Event) -> bool:
        """Whether the notice was of a life before the one that was lost."""
        return any(
            notice.seq < each.seq < loss.seq and not each.payload.get("ranks_alone", False)
            for each in self._found[NodeLost.kind, node]
        )

    def _newest(self, kind: str, node: str, seq: int) -> Event | None:
        events = self._found[kind, node]
        place = bisect.bisect_left(events, seq, key=lambda event: event.seq)
        return events[place - 1] if place else None
