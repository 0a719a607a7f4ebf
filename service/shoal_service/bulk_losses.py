"""What the loss of a failure domain would cost a job, as REST and pages show it. The rule is `shoal_recovery`'s."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from shoal_planner.answers import plan_of_answer
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import parse_job
from shoal_recovery.bulk_loss import BulkLoss, bulk_losses
from shoal_recovery.journal import AT_REST, JobState
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS
from shoal_service.models import JobRow


def losses_of(spec: Mapping[str, Any], adopted: Mapping[str, Any]) -> tuple[int, tuple[BulkLoss, ...]]:
    """The bytes of the whole state, and each loss, of a job with this spec that runs by an adopted plan (the payload of
    its journal entry). May take seconds for a large plan, once. Raises InvalidField."""
    return _losses(*(json.dumps(value) for value in (spec, adopted["plan"], adopted["snapshot"])))


def losses_resource(job: JobRow, adopted: Mapping[str, Any] | None, stored_step: int | None) -> dict[str, Any]:
    """As REST shows it; nothing of a job that has no plan now, for then it holds nothing. Raises InvalidField."""
    if adopted is None or JobState(job.state) in (*AT_REST, JobState.QUEUED):
        return {"epoch": None, "state_bytes": 0, "stored_step": stored_step, "items": []}
    state_bytes, found = losses_of(job.spec, adopted)
    items = [{**dataclasses.asdict(loss), "nodes": list(loss.nodes)} for loss in found]
    return {"epoch": adopted["epoch"], "state_bytes": state_bytes, "stored_step": stored_step, "items": items}


@functools.lru_cache(maxsize=64)
def _losses(spec: str, plan_text: str, snapshot: str) -> tuple[int, tuple[BulkLoss, ...]]:
    plan, cluster = plan_of_answer(json.loads(plan_text)), snapshot_from_mapping(json.loads(snapshot))
    shards = shard_map(plan, parse_job(json.loads(spec)).model)
    numel = sum(span.numel for state in shards.ranks for span in state.vouches)
    return numel * len(OWNED_KINDS) * ELEMENT_BYTES, bulk_losses(shards, cluster.nodes, plan.copies)
