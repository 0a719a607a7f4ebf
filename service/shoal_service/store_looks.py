"""What stands in the object stores of jobs, as somebody has looked lately: a page waits only a moment for a store, and
is told the rest when it is drawn again."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

from shoal_planner.errors import InvalidField
from shoal_recovery.checkpoints import list_manifests
from shoal_recovery.errors import StoreError
from shoal_recovery.store import open_store

_FRESH_S = 30.0
_PATIENCE_S = 0.5
_KEPT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLook:
    """At `at_s` the steps `steps` stood whole in a job's object store; or why nobody could tell."""

    at_s: float
    steps: frozenset[int] = frozenset()
    problem: str = ""


class StoreLooks:
    """Use from one event loop. A look takes `limit_s` at most."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: OrderedDict[str, StoreLook] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def newest(self, job_id: str, place: str) -> StoreLook | None:
        """Of the store at `place`, with its access; None where the first look is still under way. One that is not
        fresh any more is returned all the same, and another one begun."""
        seen = self._seen.get(job_id)
        if seen is None or time.time() - seen.at_s > _FRESH_S:
            task = self._under_way.get(job_id) or self._begin(job_id, place)
            if seen is None:
                await asyncio.wait([task], timeout=_PATIENCE_S)
        return self._seen.get(job_id)

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def _begin(self, job_id: str, place: str) -> asyncio.Task[None]:
        task = self._under_way[job_id] = asyncio.create_task(self._look(job_id, place), name=f"store-{job_id}")
        task.add_done_callback(lambda _: self._under_way.pop(job_id, None))
        return task

    async def _look(self, job_id: str, place: str) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                steps = await asyncio.to_thread(lambda: list_manifests(open_store(place), job_id))
            seen = StoreLook(at_s=time.time(), steps=frozenset(steps))
        except (StoreError, InvalidField) as error:
            seen = StoreLook(at_s=time.time(), problem=error.problem)
        except TimeoutError:
            seen = StoreLook(at_s=time.time(), problem=f"it did not answer within {self._limit_s:g} s")
        self._seen[job_id] = seen
        self._seen.move_to_end(job_id)
        while len(self._seen) > _KEPT:
            self._seen.popitem(last=False)
