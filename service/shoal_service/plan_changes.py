"""What changed from one plan to the next: which layers stand on which devices that did not hold them before. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_planner.plan import Plan, parse_plan

_NAMED = 4
MAX_MOVES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Neighbouring units of the model that have the same `gained` and `lost` holders."""

    units: str
    gained: str
    lost: str
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """`moves` are the first MAX_MOVES; `same` counts units whose holders stay as they are, of `num_units` in all (the
    layers, embedding and head)."""

    moves: tuple[Move, ...]
    hidden_moves: int
    same: int
    num_units: int
    devices_gone: str
    devices_new: str


def plan_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> PlanChange:
    """Both in their published form, of the same job. Raises InvalidField for a form that this version does not know."""
    old, new = parse_plan(before), parse_plan(after)
    held, holds = _holders(old), _holders(new)
    units = list(holds)
    runs: list[tuple[list[str], frozenset[str], frozenset[str]]] = []
    same = 0
    for unit in units:
        was, now = held.get(unit, frozenset()), holds[unit]
        if was == now:
            same += 1
        elif runs and runs[-1][1:] == (was, now) and _next_to(runs[-1][0][-1], unit):
            runs[-1][0].append(unit)
        else:
            runs.append(([unit], was, now))
    gone, come = _devices(old) - _devices(new), _devices(new) - _devices(old)
    moves = tuple(
        Move(units=_text(names), gained=_some(now - was), lost=_some(was - now), before=len(was), after=len(now))
        for names, was, now in runs
    )
    return PlanChange(
        moves=moves[:MAX_MOVES],
        hidden_moves=max(0, len(moves) - MAX_MOVES),
        same=same,
        num_units=len(units),
        devices_gone=_some(gone),
        devices_new=_some(come),
    )


def _holders(plan: Plan) -> dict[str, frozenset[str]]:
    """By unit in the order of the model, the devices that hold it."""
    found: dict[str, set[str]] = {"embedding": set(), **{str(layer): set() for layer in range(plan.num_layers)}}
    found["head"] = set()
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            names = [str(layer) for first, last in stage.layers for layer in range(first, last)]
            names += ["embedding"] if number == 0 else []
            names += ["head"] if number == len(pipeline.stages) - 1 else []
            devices = {str(ref) for replica in stage.replicas for ref in replica.refs()}
            for name in names:
                found[name] |= devices
    return {name: frozenset(devices) for name, devices in found.items()}


def _devices(plan: Plan) -> set[str]:
    return {str(device) for device in plan.devices()}


def _next_to(left: str, right: str) -> bool:
    return left.isdigit() and right.isdigit() and int(right) == int(left) + 1


def _text(names: list[str]) -> str:
    if not names[0].isdigit():
        return names[0]
    return f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]}-{names[-1]}"


def _some(devices: frozenset[str] | set[str]) -> str:
    names = sorted(devices)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
