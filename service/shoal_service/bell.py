"""Wakes requests that wait for a change. Owns no data: who wakes reads the database.

Changes by other replicas are told by a relay, where there is one and it is connected. Waiting never depends on it
alone: whoever waits looks again after a while.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

CLUSTERS = "clusters"
JOBS = "jobs"
_HEARING_S = 15.0


def job_topic(job_id: str) -> str:
    return f"job:{job_id}"


def log_topic(job_id: str) -> str:
    return f"logs:{job_id}"


class Bell:
    """Read `count(topic)` first, then the database, then `wait(topic, count)`: so no change can slip through."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closed = False
        self.relay: Callable[[tuple[str, ...]], None] | None = None  # to the other replicas
        self.hears_others = False

    def count(self, topic: str) -> int:
        return self._counts[topic]

    def ring(self, *topics: str) -> None:
        """Here, and at every other replica."""
        self.heard(*topics)
        if self.relay is not None and topics:
            self.relay(topics)

    def heard(self, *topics: str) -> None:
        """Here alone."""
        for topic in topics:
            self._counts[topic] += 1
            for event in self._waiting.get(topic, ()):
                event.set()

    def heard_all(self) -> None:
        """Nobody knows what other replicas changed."""
        self.heard(*self._waiting)

    def patience_s(self, poll_s: float) -> float:
        """How long to wait before looking again: long where others' changes are heard of."""
        return max(poll_s, _HEARING_S) if self.hears_others else poll_s

    def close(self) -> None:
        """Ends every wait, now and later: the server is going down."""
        self.closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def wait(self, topic: str, count: int, timeout_s: float) -> None:
        """Returns when the topic was rung since `count`, after `timeout_s`, or when the bell is closed."""
        if self.closed or self._counts[topic] != count:
            return
        event = asyncio.Event()
        self._waiting[topic].add(event)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting[topic].discard(event)
            if not self._waiting[topic]:
                del self._waiting[topic]
