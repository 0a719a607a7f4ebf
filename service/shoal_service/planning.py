"""Asks the planner on behalf of requests: in threads, so that a search never holds up the server."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

from shoal_planner.alone import plan_alone
from shoal_planner.cluster import ClusterSnapshot, Node, snapshot_from_mapping
from shoal_planner.errors import InvalidField, NoPlanFits, PriceAboveLimit
from shoal_planner.job import JobSpec
from shoal_planner.profile import Profile, profile_from_mapping
from shoal_planner.script_spec import AnyJob, ScriptSpec
from shoal_planner.search import PlanResult
from shoal_planner.uniform import UniformFleet, cheapest_uniform
from shoal_service.errors import BadInput, TooCheap, invalid_field
from shoal_service.models import ClusterRow


class Planner:
    """At most two searches at a time: each keeps a core busy, and more of them would only make each other late.
    `observe` is told how many seconds each took, also one that found nothing."""

    def __init__(self, time_limit_s: float, observe: Callable[[float], None] = lambda seconds: None) -> None:
        self._time_limit_s = time_limit_s
        self._observe = observe
        self._slots = asyncio.Semaphore(2)

    async def plan(self, job: JobSpec, snapshot: ClusterSnapshot, profile: Profile, *, seed: int = 0) -> PlanResult:
        """Raises BadInput where no plan fits (code no_plan_fits, with the binding constraint, or
        price_above_limit)."""
        try:
            return await self._search(job, snapshot, profile, seed)
        except PriceAboveLimit as error:
            raise TooCheap(f"no plan of this job fits its limits: {error}", error.least) from error
        except NoPlanFits as error:
            raise no_plan_fits(str(error)) from error
        except InvalidField as error:
            raise invalid_field(error) from error

    async def choose_cluster(self, job: AnyJob, rows: Sequence[ClusterRow]) -> str | None:
        """As `choose`."""
        return (await self.choose(job, rows))[0]

    async def choose(self, job: AnyJob, rows: Sequence[ClusterRow]) -> tuple[str | None, PlanResult | None]:
        """The cluster on which the job is predicted to run fastest, None if there is none, and its plan there. Raises
        BadInput, and TooCheap where its limit of price alone is in its way. A script, and a model of the user's own
        that nobody has looked at, have no plan and go to the one with the most devices for them."""
        if isinstance(job, ScriptSpec) or not job.model.is_known:
            return _roomiest(job.limits.device_types, rows), None
        refusals: list[str] = []
        best: tuple[float, str, PlanResult] | None = None
        cheapest: tuple[float, str, str] | None = None
        for row in rows:
            try:
                found = await self._search(job, snapshot_from_mapping(row.snapshot), profile_from_mapping(row.profile))
            except PriceAboveLimit as error:
                found_here = error.least, row.id, str(error)
                cheapest = found_here if cheapest is None else min(cheapest, found_here)
                continue
            except NoPlanFits as error:
                refusals.append(f"on cluster {row.id}: {error}" if len(rows) > 1 else str(error))
                continue
            except InvalidField as error:
                raise invalid_field(error) from error
            speed = 0.0 if found.plan.prediction is None else found.plan.prediction.tokens_per_s
            if best is None or speed > best[0]:
                best = speed, row.id, found
        if best is None and cheapest is not None:
            least, cluster_id, words = cheapest
            raise TooCheap(f"no plan of this job fits its limits: {words} on cluster {cluster_id}", least, cluster_id)
        if best is None and refusals:
            raise no_plan_fits("; ".join(refusals))
        return (None, None) if best is None else best[1:]

    async def uniform(
        self,
        job: JobSpec,
        nodes: Sequence[Node],
        tokens_per_s: float,
        *,
        beside: ClusterSnapshot,
        profile: Profile,
        clock: Callable[[], float],
    ) -> UniformFleet | None:
        """As `cheapest_uniform`. Raises InvalidField."""
        find = functools.partial(cheapest_uniform, job, nodes, tokens_per_s, beside=beside, profile=profile)
        async with self._slots:
            return await asyncio.to_thread(find, time_limit_s=self._time_limit_s, clock=clock)

    async def _search(self, job: JobSpec, snapshot: ClusterSnapshot, profile: Profile, seed: int = 0) -> PlanResult:
        """As for a job that is alone on the cluster."""
        limit_s = self._time_limit_s
        async with self._slots:
            started_s = time.perf_counter()
            try:
                return await asyncio.to_thread(plan_alone, job, snapshot, profile, seed=seed, time_limit_s=limit_s)
            finally:
                self._observe(time.perf_counter() - started_s)


def check_place(device_types: tuple[str, ...], snapshot: ClusterSnapshot) -> None:
    """How many workers fit only the cluster itself can tell. Raises BadInput where it has no node for any."""
    if not _num_devices(device_types, snapshot):
        types = ", ".join(device_types) or "any type"
        raise BadInput(
            "no_nodes", f"limits.device_types = {types}: the cluster has no such nodes", "limits.device_types"
        )


def _roomiest(device_types: tuple[str, ...], rows: Sequence[ClusterRow]) -> str | None:
    """The cluster with the most devices that the job may use."""
    found = {row.id: _num_devices(device_types, snapshot_from_mapping(row.snapshot)) for row in rows}
    if not rows:
        return None
    best = max(sorted(found), key=lambda cluster_id: found[cluster_id])
    if not found[best]:
        check_place(device_types, ClusterSnapshot(nodes=()))
    return best


def _num_devices(device_types: tuple[str, ...], snapshot: ClusterSnapshot) -> int:
    return sum(node.devices for node in snapshot.nodes if not device_types or node.device in device_types)


def no_plan_fits(constraint: str) -> BadInput:
    return BadInput("no_plan_fits", f"no plan of this job fits: {constraint}")
