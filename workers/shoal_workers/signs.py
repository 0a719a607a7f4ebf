"""When each node of a cluster was last heard: by the supervisors of its jobs, who listen to its processes, and else by
Ray, which lists it. Ages, not times of day: only whoever hears of them has a clock that they can be put on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BY_PROCESSES, BY_RAY = "processes", "ray"

Ask = Callable[[Iterable[str]], Mapping[str, Mapping[str, float]]]


class Signs:
    """`ask`: of jobs, by job, for how many seconds nothing was heard of each node; without those that do not answer."""

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._heard_s: dict[str, dict[str, float]] = {}  # by job and node, when

    def look(self, nodes: Iterable[str], jobs: Iterable[str]) -> list[dict[str, Any]]:
        """Of these nodes, which Ray lists just now, and those that the supervisors of these jobs listen to. What one
        that does not answer had heard counts on, and grows old."""
        jobs = tuple(jobs)
        self._heard_s = {job: heard for job, heard in self._heard_s.items() if job in jobs}
        answers = self._ask(jobs)
        now_s = self._clock()
        for job, silent in answers.items():
            self._heard_s[job] = {node: now_s - age_s for node, age_s in silent.items()}
        newest: dict[str, float] = {}
        for heard in self._heard_s.values():
            for node, at_s in heard.items():
                newest[node] = max(at_s, newest.get(node, at_s))
        ages = {node: (0.0, BY_RAY) for node in nodes}
        ages |= {node: (max(0.0, now_s - at_s), BY_PROCESSES) for node, at_s in newest.items()}
        return [{"node": node, "age_s": round(age_s, 3), "by": by} for node, (age_s, by) in sorted(ages.items())]
