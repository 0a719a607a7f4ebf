"""What the steps of a job would cost on nodes of one kind, none of them spot: looked for beside all requests, for each
plan of a job, and kept with it. One replica does it for all.

What such nodes cost is stated by clusters that have some, and by pools that would give some; where nobody states a
price there is nothing to compare with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_planner.cluster import ClusterSnapshot, Node, snapshot_from_mapping
from shoal_planner.errors import InvalidField
from shoal_planner.job import parse_job
from shoal_planner.profile import profile_from_mapping
from shoal_planner.uniform import MOST_DEVICES, UniformFleet
from shoal_recovery.journal import AT_REST, TERMINAL, JobState
from shoal_service import clusters, duties, pools
from shoal_service.bell import Bell, job_topic
from shoal_service.database import Database
from shoal_service.errors import DatabaseAway
from shoal_service.journal import PLAN_KIND
from shoal_service.models import ClusterRow, JobRow, JournalRow
from shoal_service.models_comparison import ComparisonRow
from shoal_service.planning import Planner
from shoal_service.turns import Turns

log = structlog.get_logger()

_DUTY = "comparisons"
_LEASE_S = 120.0  # a search may take a while
_LOOK_S = 10.0
_AGAIN_S = 60.0  # a job whose plan changes all the time is compared now and then
_LATELY_S = 600.0  # jobs may have ended before anybody looked
_SHARE = 0.1  # of a core, on average: a search holds up requests a little
_MOST_KINDS = 6
_BEGUN = tuple(state.value for state in JobState if state not in (*AT_REST, JobState.QUEUED))
_ENDED = tuple(state.value for state in TERMINAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A kind of nodes that are not spot, and who says what one costs."""

    node: Node
    source: str


def offers_of(rows: Sequence[ClusterRow], rented: Iterable[tuple[Node, str]]) -> tuple[Offer, ...]:
    """Of what clusters have and pools would give: of each number of devices of a type the cheapest, the cheapest per
    device first."""
    found: dict[tuple[str, int], Offer] = {}
    there = ((node, f"cluster {row.id}") for row in rows for node in snapshot_from_mapping(row.snapshot).nodes)
    for node, source in (*there, *rented):
        if node.spot or node.price_per_hour <= 0 or node.devices > MOST_DEVICES:
            continue
        known = found.get((node.device, node.devices))
        if known is None or node.price_per_hour < known.node.price_per_hour:
            alike = dataclasses.replace(node, id="n", host=None, reclaim_at_s=None, speed=1.0)
            found[node.device, node.devices] = Offer(node=alike, source=source)
    return tuple(sorted(found.values(), key=lambda each: (each.node.price_per_hour / each.node.devices, each.source)))


class Comparisons:
    """`start` in a running event loop."""

    def __init__(self, database: Database, planner: Planner, bell: Bell) -> None:
        self._database = database
        self._planner = planner
        self._bell = bell
        self._holder = duties.new_holder()
        self._has_claimed = False
        self._closing = False
        self._not_before_s = 0.0
        self._turns = Turns(_DUTY, self.look, _LOOK_S)

    def start(self) -> None:
        self._turns.start()

    async def close(self) -> None:
        self._closing = True
        await self._turns.close()
        if self._has_claimed:
            with contextlib.suppress(DatabaseAway):  # the lease ends by itself
                async with self._database.write() as session:
                    await duties.release(session, self._holder)

    async def look(self) -> None:
        """At the job that waits for it the longest."""
        if time.monotonic() < self._not_before_s:
            return
        async with self._database.read() as session:
            rows = await clusters.all_clusters(session)
            fresh = filter(pools.is_fresh, await pools.every(session))
            offers = offers_of(rows, ((pools.node_of(row), pools.price_words(row)) for row in fresh))
            digest = _digest(offers)
            due = await _due(session, digest) if offers else None
        if due is None:
            return
        async with self._database.write() as session:
            self._has_claimed = await duties.claim(session, _DUTY, self._holder, _LEASE_S)
        if self._has_claimed:
            row, adopted = due
            profile = next((each.profile for each in rows if each.id == row.cluster_id), {})
            began_s = time.monotonic()
            await self._compare(row, adopted, offers[:_MOST_KINDS], digest, profile)
            self._not_before_s = time.monotonic() + (time.monotonic() - began_s) / _SHARE

    async def _compare(
        self, row: JobRow, adopted: JournalRow, offers: Sequence[Offer], digest: str, profile: dict[str, Any]
    ) -> None:
        wanted = float((adopted.payload["plan"].get("predicted") or {}).get("tokens_per_s") or 0.0)
        found, reason = None, "the plan of the job has no prediction to compare with"
        if wanted > 0:
            found, reason = await self._found(row, adopted.payload["snapshot"], offers, wanted, profile)
        if self._closing:  # the search was cut short
            return
        async with self._database.write() as session:
            kept = await session.get(ComparisonRow, row.id)
            if kept is None:
                kept = ComparisonRow(job_id=row.id)
                session.add(kept)
            kept.plan_seq, kept.offers, kept.at_s = adopted.seq, digest, time.time()
            kept.found, kept.reason = found, reason
        self._bell.ring(job_topic(row.id))

    def _clock(self) -> float:
        """A server that stops waits for no search."""
        return math.inf if self._closing else time.monotonic()

    async def _found(
        self,
        row: JobRow,
        snapshot: dict[str, Any],
        offers: Sequence[Offer],
        wanted: float,
        profile: dict[str, Any],
    ) -> tuple[dict[str, Any] | None, str]:
        try:
            beside: ClusterSnapshot = dataclasses.replace(snapshot_from_mapping(snapshot), nodes=(), links=())
            nodes = [offer.node for offer in offers]
            known = profile_from_mapping(profile)
            fleet = await self._planner.uniform(
                parse_job(row.spec), nodes, wanted, beside=beside, profile=known, clock=self._clock
            )
        except InvalidField as error:  # of another version
            return None, f"it cannot be planned by this version: {error}"
        if fleet is None:
            return None, "no plan was found for any number of such nodes that was tried"
        log.info("job compared", job=row.id, device=fleet.node.device, num_nodes=fleet.count)
        source = next(each.source for each in offers if _kind(each.node) == _kind(fleet.node))
        return _mapping(fleet, source, wanted), ""


async def of_job(session: AsyncSession, job_id: str) -> ComparisonRow | None:
    """The newest; None where nobody has looked so far."""
    return await session.get(ComparisonRow, job_id)


async def _due(session: AsyncSession, digest: str) -> tuple[JobRow, JournalRow] | None:
    """A job whose newest plan was not compared with these offers, and that plan: the newest of those that never were,
    else the one that was the longest ago."""
    now_s = time.time()
    lately = (JobRow.state.in_(_ENDED)) & (JobRow.since_at_s > now_s - _LATELY_S)
    known = (ComparisonRow.plan_seq == JobRow.plan_seq) & (ComparisonRow.offers == digest)
    query = (
        select(JobRow, JournalRow)
        .join(JournalRow, (JournalRow.job_id == JobRow.id) & (JournalRow.seq == JobRow.plan_seq))
        .outerjoin(ComparisonRow, ComparisonRow.job_id == JobRow.id)
        .where(
            JournalRow.kind == PLAN_KIND,
            or_(JobRow.state.in_(_BEGUN), lately),
            or_(ComparisonRow.job_id.is_(None), ~known & (ComparisonRow.at_s < now_s - _AGAIN_S)),
        )
        .order_by(func.coalesce(ComparisonRow.at_s, 0.0), JobRow.id.desc())
        .limit(1)
    )
    found = (await session.execute(query)).first()
    return None if found is None else (found[0], found[1])


def _digest(offers: Iterable[Offer]) -> str:
    essence = [dataclasses.astuple(offer.node) for offer in offers]
    return hashlib.sha256(json.dumps(essence).encode()).hexdigest()


def _kind(node: Node) -> tuple[str, int]:
    return node.device, node.devices


def _mapping(fleet: UniformFleet, source: str, wanted: float) -> dict[str, Any]:
    return {
        "device": fleet.node.device,
        "devices": fleet.node.devices,
        "num_nodes": fleet.count,
        "price_per_hour": fleet.node.price_per_hour,
        "price_source": source,
        "usd_per_hour": fleet.price_per_hour,
        "step_s": fleet.step_s,
        "tokens_per_s": fleet.tokens_per_s,
        "wanted_tokens_per_s": wanted,
        "as_fast": fleet.as_fast,
        "usd_per_million_tokens": fleet.usd_per_million_tokens,
    }
