"""How many nodes a job can lose at this moment without losing a step, and how many nodes keep each part of its state.
The rule of who holds what is shoal_recovery's."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_planner.answers import plan_of_answer
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import parse_job
from shoal_recovery.placement import held_by
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS

_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Any `losses` nodes at once may go. `coverage`: by the number of nodes that keep a part of the state, the bytes of
    which that is so; `weakest` names the nodes that all have to go before anything is lost."""

    losses: int
    coverage: tuple[tuple[int, int], ...]
    weakest: str


def survival(spec: Mapping[str, Any], adopted: Mapping[str, Any]) -> Survival:
    """Of a job that runs by an adopted plan (the payload of its journal entry). May take seconds for a large plan,
    once. Raises InvalidField."""
    return _survival(*(json.dumps(value) for value in (spec, adopted["plan"], adopted["snapshot"])))


@functools.lru_cache(maxsize=64)
def _survival(spec: str, plan_text: str, snapshot: str) -> Survival:
    plan, cluster = plan_of_answer(json.loads(plan_text)), snapshot_from_mapping(json.loads(snapshot))
    shards = shard_map(plan, parse_job(json.loads(spec)).model)
    counts: dict[int, int] = {}
    fewest: frozenset[str] = frozenset(node.id for node in cluster.nodes)
    for holders, numel in held_by(shards, cluster.nodes, plan.copies):
        counts[len(holders)] = counts.get(len(holders), 0) + numel * len(OWNED_KINDS) * ELEMENT_BYTES
        if (len(holders), sorted(holders)) < (len(fewest), sorted(fewest)):
            fewest = holders
    names = sorted(fewest)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return Survival(
        losses=max(0, len(fewest) - 1),
        coverage=tuple(sorted(counts.items())),
        weakest=", ".join(names[:_NAMED]) + more,
    )
