"""Whether to change from a running plan, and to which: by the steps done until the next change.

Owns the choice among scored plans and its reason. Which plans there are to choose from comes from `repair` and the
search; what a change costs from `moving`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shoal_planner.costs import CostModel
from shoal_planner.finish import Finisher
from shoal_planner.lasting import Losses
from shoal_planner.moving import STAY, Move, Outlook, move, uptime_s
from shoal_planner.plan import Plan
from shoal_planner.pool_history import HOUR_S
from shoal_planner.repair import Consider, mend
from shoal_planner.score import step_s
from shoal_planner.standing import standing
from shoal_planner.teams import mend_teams

# Nobody moves for less: predictions of similar plans tell hardly more apart.
SURE = 1.01
_COMPARED = 8  # plans with the shortest steps, of which what moving costs is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Whether to leave the running plan for `plan`, or, without `move`, to go on with it, which then is `plan`; a plan
    that has lost devices must be left. `pause_s` and `moved_bytes` are what the change takes (or, without `move`, would
    have taken), and `gain` is how many more steps are expected until the next one than without it, as a share of them
    (0 where the running plan cannot go on)."""

    plan: Plan
    move: bool
    reason: str
    pause_s: float
    moved_bytes: float
    gain: float


@dataclass(frozen=True, slots=True)
class _Choice:
    """`step_s` is for each step that lasts."""

    plan: Plan
    move: Move
    step_s: float
    steps: float


def mend_plan(previous: Plan, costs: CostModel, finisher: Finisher, consider: Consider) -> bool:
    """Scores repairs of a plan that was hit, or that new nodes could join; whether no search is needed."""
    found = standing(previous, costs)
    if found is None:
        return mend_teams(previous, costs, consider)
    if not (found.broken or found.joined):
        return False
    return mend(found, costs, finisher, consider)


def choose(previous: Plan, scored: list[Plan], costs: CostModel, outlook: Outlook, losses: Losses) -> Replan:
    """`scored` are the plans that fit, best first, `previous` among them if it does."""
    horizon_s = uptime_s(costs.snapshot, outlook)
    running = next((plan for plan in scored if plan.plan_id == previous.plan_id), None)
    if running is not None:
        horizon_s = min(horizon_s, _left_s(running, outlook))
        stay = _choice(running, STAY, horizon_s, losses)
    others = [plan for plan in scored[:_COMPARED] if running is None or plan.plan_id != previous.plan_id]
    choices = [_choice(plan, move(previous, plan, costs, outlook), horizon_s, losses) for plan in others]
    choices.sort(key=lambda one: (-one.steps, one.move.pause_s, one.step_s, one.plan.plan_id))
    if running is None:
        best = choices[0]
        return _replan(best, best, forced_reason(previous, best.plan, best.move, costs), 0.0)
    if not choices:
        return _replan(stay, stay, "Stays: no other plan was found.", 0.0)
    best = choices[0]
    gain = best.steps / stay.steps - 1 if stay.steps else 0.0
    if gain > SURE - 1:
        return _replan(best, best, _move_reason(stay, best, horizon_s), gain)
    return _replan(stay, best, _stay_reason(stay, best, gain), gain)


def _choice(plan: Plan, cost: Move, horizon_s: float, losses: Losses) -> _Choice:
    step_s = losses.step_s(plan)
    return _Choice(plan, cost, step_s, cost.steps(step_s, horizon_s))


def _left_s(running: Plan, outlook: Outlook) -> float:
    assert running.prediction is not None
    return float("inf") if outlook.steps_left is None else outlook.steps_left * running.prediction.step_s


def _replan(chosen: _Choice, priced: _Choice, reason: str, gain: float) -> Replan:
    return Replan(
        plan=chosen.plan,
        move=chosen is priced and chosen.move is not STAY,
        reason=reason,
        pause_s=priced.move.pause_s,
        moved_bytes=priced.move.moved_bytes,
        gain=gain,
    )


def forced_reason(previous: Plan, chosen: Plan, cost: Move, costs: CostModel) -> str:
    """Why the running plan is left that cannot go on."""
    there = {node.id for node in costs.snapshot.nodes}
    lost = sorted({replica.node for replica in previous.replicas()} - there)
    why = f"{_names(lost)} can no longer be used" if lost else "the running plan does not fit"
    before = {tuple(_structure(previous, place)) for place in range(len(previous.pipelines))}
    kept = sum(tuple(_structure(chosen, place)) in before for place in range(len(chosen.pipelines)))
    num = len(chosen.pipelines)
    what = f"{kept} of {num} pipelines keep their devices and layers" if kept else "no pipeline stays as it was"
    return f"Moves, as {why}: {what}; {_bytes(cost)} cross between nodes in a pause of {_time(cost.pause_s)}."


def _structure(plan: Plan, place: int) -> list[object]:
    return [
        (stage.layers, tuple((replica.node, replica.devices) for replica in stage.replicas))
        for stage in plan.pipelines[place].stages
    ]


def _move_reason(stay: _Choice, best: _Choice, horizon_s: float) -> str:
    shorter = 1 - best.step_s / stay.step_s
    paid_s = best.move.pause_s / shorter
    return (
        f"Moves: {_shorter(stay, best)}; {_bytes(best.move)} cross between nodes in a pause of "
        f"{_time(best.move.pause_s)}, which is made good after {_time(paid_s)} of the {_time(horizon_s)} until the "
        f"next change is to be expected."
    )


def _shorter(stay: _Choice, best: _Choice) -> str:
    """Of the steps themselves, and, where preemptions undo some, of those that last."""
    plain, lasting = 1 - step_s(best.plan) / step_s(stay.plan), 1 - best.step_s / stay.step_s
    text = f"steps get {abs(plain):.1%} {'shorter' if plain >= 0 else 'longer'}"
    if abs(lasting - plain) < 0.0005:
        return text
    return f"{text}, and {lasting:.1%} less time goes into each that preemptions do not undo"


def _stay_reason(stay: _Choice, best: _Choice, gain: float) -> str:
    saved_s = HOUR_S * (1 - best.step_s / stay.step_s)
    if saved_s <= 0:
        return "Stays: no plan was found that is faster."
    would = f"moving {_bytes(best.move)} would cost {_time(best.move.pause_s)}"
    if gain > 0:
        return f"Stays: {would}, and that steps get {1 - best.step_s / stay.step_s:.1%} shorter is no sure gain."
    return f"Stays: {would}, and the new plan gains {_time(saved_s)} an hour, too little until the next change."


def _names(nodes: list[str]) -> str:
    named = ", ".join(nodes[:4])
    return f"{named} and {len(nodes) - 4} more" if len(nodes) > 4 else named


def _bytes(cost: Move) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if cost.moved_bytes >= unit:
            return f"{cost.moved_bytes / unit:.3g} {name}"
    return "less than 1 MB" if cost.moved_bytes else "0 MB"


def _time(seconds: float) -> str:
    """As in "8 s", "12 min" or "1.5 h"."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * HOUR_S else f"{seconds / HOUR_S:.3g} h"


def explained(change: Replan, reason: str) -> Replan:
    """With why it is chosen, and what there is to say of the plan itself."""
    return dataclasses.replace(change, plan=dataclasses.replace(change.plan, reason=f"{change.reason} {reason}"))
