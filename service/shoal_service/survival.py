"""How many nodes a job can lose at this moment without losing a step, and how many nodes keep each part of its state.
The rule of who holds what is shoal_recovery's."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal_planner.answers import plan_of_answer
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import ModelSpec, parse_job
from shoal_planner.parameters import parameters
from shoal_recovery.placement import kept_by
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS

_NAMED = 4
MAX_UNITS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCopies:
    """Neighbouring units of the model (embedding, layers, head) that stand on the same nodes: each part of their state
    on at least `fewest` and at most `most` of `nodes`."""

    units: str
    fewest: int
    most: int
    nodes: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Any `losses` nodes at once may go. `coverage`: by the number of nodes that keep a part of the state, the bytes of
    which that is so; `weakest` names the nodes that all have to go before anything is lost; `units` tell it by layer,
    in the order of the model, the first MAX_UNITS of them."""

    losses: int
    coverage: tuple[tuple[int, int], ...]
    weakest: str
    units: tuple[UnitCopies, ...] = ()
    hidden_units: int = 0


def survival(spec: Mapping[str, Any], adopted: Mapping[str, Any]) -> Survival:
    """Of a job that runs by an adopted plan (the payload of its journal entry). May take seconds for a large plan,
    once. Raises InvalidField."""
    return _survival(*(json.dumps(value) for value in (spec, adopted["plan"], adopted["snapshot"])))


@functools.lru_cache(maxsize=64)
def _survival(spec: str, plan_text: str, snapshot: str) -> Survival:
    plan, cluster = plan_of_answer(json.loads(plan_text)), snapshot_from_mapping(json.loads(snapshot))
    model = parse_job(json.loads(spec)).model
    shards = shard_map(plan, model)
    counts: dict[int, int] = {}
    units = _Units(model)
    fewest: frozenset[str] = frozenset(node.id for node in cluster.nodes)
    for holders, span in kept_by(shards, cluster.nodes, plan.copies):
        num_bytes = span.numel * len(OWNED_KINDS) * ELEMENT_BYTES
        counts[len(holders)] = counts.get(len(holders), 0) + num_bytes
        units.add(span.fqn, holders, num_bytes)
        if (len(holders), sorted(holders)) < (len(fewest), sorted(fewest)):
            fewest = holders
    told = units.told()
    return Survival(
        losses=max(0, len(fewest) - 1),
        coverage=tuple(sorted(counts.items())),
        weakest=_some(fewest),
        units=told[:MAX_UNITS],
        hidden_units=max(0, len(told) - MAX_UNITS),
    )


def _some(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class _Units:
    """Sums by unit of the model: unit 0 is the embedding, unit 1 + i block i, the last one norm and head."""

    def __init__(self, model: ModelSpec) -> None:
        self._unit = {parameter.fqn: parameter.units[0] for parameter in parameters(model)}
        self._last = model.layers + 1
        self._found: dict[int, tuple[int, int, set[str], int]] = {}

    def add(self, fqn: str, holders: frozenset[str], num_bytes: int) -> None:
        unit, count = self._unit[fqn], len(holders)
        fewest, most, nodes, before = self._found.get(unit, (count, count, set(), 0))
        nodes |= holders
        self._found[unit] = min(fewest, count), max(most, count), nodes, before + num_bytes

    def told(self) -> tuple[UnitCopies, ...]:
        runs: list[list[int]] = []
        for unit in sorted(self._found):
            same = runs and self._found[runs[-1][-1]][:3] == self._found[unit][:3]
            if same and self._is_block(unit) and self._is_block(runs[-1][-1]) and unit == runs[-1][-1] + 1:
                runs[-1].append(unit)
            else:
                runs.append([unit])
        return tuple(self._copies(run) for run in runs)

    def _is_block(self, unit: int) -> bool:
        return 0 < unit < self._last

    def _copies(self, run: list[int]) -> UnitCopies:
        fewest, most, nodes, _ = self._found[run[0]]
        return UnitCopies(
            units=self._name(run),
            fewest=fewest,
            most=most,
            nodes=_some(nodes),
            num_bytes=sum(self._found[unit][3] for unit in run),
        )

    def _name(self, run: list[int]) -> str:
        if not self._is_block(run[0]):
            return "embedding" if run[0] == 0 else "norm and head"
        return f"layer {run[0] - 1}" if len(run) == 1 else f"layers {run[0] - 1}-{run[-1] - 1}"
