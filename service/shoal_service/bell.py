"""Wakes requests that wait for a change made in this process. Owns no data: who wakes reads the database.

Waiting never depends on it alone: changes by other replicas are found by looking again after `timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

CLUSTERS = "clusters"
JOBS = "jobs"


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

    def count(self, topic: str) -> int:
        return self._counts[topic]

    def ring(self, *topics: str) -> None:
        for topic in topics:
            self._counts[topic] += 1
            for event in self._waiting[topic]:
                event.set()

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
