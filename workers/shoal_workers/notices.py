"""What the agent of a node knows of the node's end: notices by their source, given, kept and passed on to whoever
watches. Owns no source and no decision.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shoal_workers.messages import GiveNotice, Noticed, Withdrawn

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Held:
    given: GiveNotice
    due_s: float

    def told(self, now_s: float) -> Noticed:
        given = self.given
        return Noticed(source=given.source, why=given.why, lead_s=given.lead_s, left_s=self.due_s - now_s)


class Notices:
    """Any thread may call. A source has one notice at a time."""

    def __init__(self, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._watchers: list[queue.SimpleQueue[Noticed | Withdrawn]] = []

    def give(self, notice: GiveNotice) -> None:
        """The same one (by its name) once more changes nothing."""
        with self._lock:
            before = self._held.get(notice.source)
            if before is not None and before.given.name == notice.name:
                return
            now_s = self._clock()
            held = self._held[notice.source] = _Held(notice, now_s + notice.lead_s)
            log.warning("node is to go away", node=self._node, source=notice.source, lead_s=notice.lead_s)
            self._tell(held.told(now_s))

    def withdraw(self, source: str) -> None:
        """Nothing happens where the source has given none."""
        with self._lock:
            if self._held.pop(source, None) is not None:
                log.info("notice withdrawn", node=self._node, source=source)
                self._tell(Withdrawn(source=source))

    def watch(self, events: queue.SimpleQueue[Noticed | Withdrawn]) -> None:
        """Puts all that is known now into this queue, and from then on all that is new."""
        with self._lock:
            now_s = self._clock()
            for held in self._held.values():
                events.put(held.told(now_s))
            self._watchers.append(events)

    def unwatch(self, events: queue.SimpleQueue[Noticed | Withdrawn]) -> None:
        with self._lock:
            self._watchers.remove(events)

    def _tell(self, news: Noticed | Withdrawn) -> None:
        for events in self._watchers:
            events.put(news)
