"""What must hold of a job that went through a drill, from its journal, the losses of an undisturbed run, and the blows
that it got. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import ModelSpec
from shoal_planner.plan import parse_plan
from shoal_recovery.journal import (
    CheckpointCommitted,
    Entry,
    NodeSlowed,
    PlanAdopted,
    RecoveryDone,
    StateChanged,
    StepDone,
)
from shoal_recovery.placement import held_by
from shoal_recovery.shard_map import shard_map
from shoal_recovery.stragglers import PaceRules

TOLERANCE = 1e-4
STRAGGLER = "straggler"  # a kind of blow
PACES = PaceRules(least_s=0.2, calm_s=0.2)  # from the first straggler on, or the steps of a drill would be too short
_HEARD_S = 1.0  # until a finding stands in the journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """`out` are the nodes of which, from then until it was healed, nothing could be had; what they kept may be gone for
    good. Times are of day, of the machine that wrote the journal."""

    kind: str
    moment: str
    nodes: tuple[str, ...]
    out: tuple[str, ...]
    step: int
    at_s: float
    healed_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A step of the `epoch`th that a supervisor saw begin: how many times what was predicted for it each node computed,
    and which ones counted as stragglers already."""

    epoch: int
    at_s: float
    duration_s: float
    times: Mapping[str, float]
    known: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`problems` are sentences: with none, all is well. `held` recoveries began while a copy of everything was left;
    `worst` is the largest relative difference of a loss. Of the blows that made stragglers, so many were `found`."""

    problems: tuple[str, ...]
    recoveries: int
    held: int
    redone: int
    worst: float
    recovery_s: tuple[float, ...]
    found: int


def judge(
    entries: Sequence[Entry],
    *,
    model: ModelSpec,
    steps: int,
    batch: int,
    losses: Sequence[float],
    blows: Sequence[Blow],
    stored: bool,
    paces: Sequence[Pace] = (),
) -> Verdict:
    """`stored`: the job has an object store, which works again by the end."""
    recoveries = [entry for entry in entries if isinstance(entry.event, RecoveryDone)]
    held = [entry for entry in recoveries if _held(entries, entry, blows, model)]
    slowed = [blow for blow in blows if blow.kind == STRAGGLER]
    problems = [
        *_end(entries, steps, stored=stored),
        *_order(entries),
        *_commits(entries),
        *_samples(entries, steps, batch),
        *_losses(entries, losses),
        *(problem for entry in held for problem in _nothing_lost(entries, entry)),
        *(problem for blow in slowed if not _found(entries, blow) for problem in _overlooked(blow, paces)),
    ]
    return Verdict(
        problems=tuple(problems),
        recoveries=len(recoveries),
        held=len(held),
        redone=sum(entry.event.redone_steps for entry in held if isinstance(entry.event, RecoveryDone)),
        worst=max((difference for _, difference in _differences(entries, losses)), default=0.0),
        recovery_s=tuple(entry.event.total_s for entry in recoveries if isinstance(entry.event, RecoveryDone)),
        found=sum(_found(entries, blow) for blow in slowed),
    )


def counting(entries: Sequence[Entry]) -> dict[int, StepDone]:
    """The sequence of steps that counts: of a step that was done again, the last time."""
    return {entry.event.step: entry.event for entry in entries if isinstance(entry.event, StepDone)}


def _end(entries: Sequence[Entry], steps: int, *, stored: bool) -> Iterator[str]:
    if [entry.seq for entry in entries] != list(range(1, len(entries) + 1)):
        yield "the journal has gaps"
    states = [entry.event for entry in entries if isinstance(entry.event, StateChanged)]
    if not states or states[-1].state != "succeeded":
        yield f"the job ended as {states[-1].state if states else 'nothing'}: {states[-1].reason if states else ''}"
    if sorted(counting(entries)) != list(range(1, steps + 1)):
        yield f"steps are missing: {sorted(set(range(1, steps + 1)) - counting(entries).keys())[:5]}"
    committed = {entry.event.step for entry in entries if isinstance(entry.event, CheckpointCommitted)}
    if stored and steps not in committed:
        yield f"the last step is not stored, only {sorted(committed)[-3:]}"


def _order(entries: Sequence[Entry]) -> Iterator[str]:
    """Only the newest epoch does steps, one after the other from where it began, and none begins anew."""
    epoch, last = 0, 0
    for event in (entry.event for entry in entries):
        if isinstance(event, PlanAdopted):
            if event.epoch <= epoch:
                yield f"epoch {event.epoch} was adopted after epoch {epoch}"
            if last > 0 and event.step == 0:
                yield f"epoch {event.epoch} began anew after step {last}"
            epoch, last = event.epoch, event.step
        elif isinstance(event, StepDone):
            if (event.epoch, event.step) != (epoch, last + 1):
                yield f"step {event.step} of epoch {event.epoch} was done after step {last} of epoch {epoch}"
            last = event.step


def _commits(entries: Sequence[Entry]) -> Iterator[str]:
    """No epoch stores a step any more once a newer one has begun before that step. The store itself shows it only of
    what is kept to the end."""
    starts: dict[int, int] = {}
    for event in (entry.event for entry in entries):
        if isinstance(event, PlanAdopted):
            starts[event.epoch] = event.step
        elif isinstance(event, CheckpointCommitted):
            void = [epoch for epoch, start in starts.items() if epoch > event.epoch and start < event.step]
            if void:
                yield f"step {event.step} was stored by epoch {event.epoch} after epochs {void} began before that step"


def _samples(entries: Sequence[Entry], steps: int, batch: int) -> Iterator[str]:
    done = counting(entries)
    fed = [span for step in sorted(done) for span in done[step].samples]
    whole = bool(fed) and fed[0][0] == 0 and fed[-1][1] == steps * batch
    if not whole or any(before[1] != after[0] for before, after in itertools.pairwise(fed)):
        yield "samples were left out or fed twice"


def _differences(entries: Sequence[Entry], losses: Sequence[float]) -> Iterator[tuple[int, float]]:
    for step, done in sorted(counting(entries).items()):
        if step <= len(losses):
            yield step, abs(done.loss - losses[step - 1]) / abs(losses[step - 1])


def _losses(entries: Sequence[Entry], losses: Sequence[float]) -> Iterator[str]:
    for step, difference in _differences(entries, losses):
        if not difference <= TOLERANCE:
            yield f"the loss of step {step} is {difference:.2g} off that of the undisturbed run"
            return  # all that follow are, too


# --- what a recovery may cost ---


def _held(entries: Sequence[Entry], recovery: Entry, blows: Sequence[Blow], model: ModelSpec) -> bool:
    """Whether all that the epoch had made safe before stood on a node that was not out."""
    assert isinstance(recovery.event, RecoveryDone)
    before = _epoch_before(entries, recovery)
    if before is None:
        return False
    assert isinstance(before.event, PlanAdopted)
    out = {
        node for blow in blows if blow.at_s <= recovery.at_s and blow.healed_at_s >= before.at_s for node in blow.out
    }
    plan, nodes = parse_plan(before.event.plan), snapshot_from_mapping(before.event.snapshot).nodes
    return all(holders - out for holders, _ in held_by(shard_map(plan, model), nodes, plan.copies))


def _epoch_before(entries: Sequence[Entry], recovery: Entry) -> Entry | None:
    """The newest epoch that has done a step before the one that this recovery led to."""
    assert isinstance(recovery.event, RecoveryDone)
    stepped = {entry.event.epoch for entry in entries if isinstance(entry.event, StepDone)}
    adopted = [
        entry
        for entry in entries
        if isinstance(entry.event, PlanAdopted)
        and entry.event.epoch in stepped
        and entry.event.epoch < recovery.event.epoch
    ]
    return adopted[-1] if adopted else None


def _nothing_lost(entries: Sequence[Entry], recovery: Entry) -> Iterator[str]:
    """By its own record, and by the steps that stand in the journal before its plan."""
    done = recovery.event
    assert isinstance(done, RecoveryDone)
    last = 0
    for event in (entry.event for entry in entries):
        if isinstance(event, PlanAdopted) and event.epoch == done.epoch:
            break
        if isinstance(event, StepDone | PlanAdopted):
            last = event.step  # what was done beyond the beginning of a later epoch is void
    if done.lost_steps or done.redone_steps > 1 or last - done.step > 1:
        again = f"{done.lost_steps} safe steps lost, {done.redone_steps} done again, from {last} back to {done.step}"
        yield f"entry {recovery.seq}: a copy survived, and yet {again} ({done.reason[:200]})"
    if done.num_bytes["store"]:
        yield f"entry {recovery.seq}: a copy survived, and yet {done.num_bytes['store']} bytes came from the store"


# --- who is found to be slow ---


def _found(entries: Sequence[Entry], blow: Blow) -> bool:
    slowed = (entry for entry in entries if isinstance(entry.event, NodeSlowed) and entry.event.node in blow.nodes)
    return any(blow.at_s <= entry.at_s <= blow.healed_at_s + _HEARD_S for entry in slowed)


def _overlooked(blow: Blow, paces: Sequence[Pace]) -> Iterator[str]:
    """Whoever is slower than all doubt in every step of two windows must be found: one of both is whole. What other
    faults do to steps, to plans and to who is watched ends such a row of steps, and asks nothing by itself."""
    (node,) = blow.nodes
    during = (pace for pace in paces if blow.at_s <= pace.at_s <= blow.healed_at_s)
    for (_, is_slow), row in itertools.groupby(during, lambda pace: (pace.epoch, _beyond_doubt(node, pace))):
        steps = list(row)
        half = len(steps) // 2
        if is_slow and all(map(_window, (steps[:half], steps[half:]))):
            yield f"{node} was slow for {len(steps)} steps, from {steps[0].at_s:.3f} on, and nobody found it"


def _beyond_doubt(node: str, pace: Pace) -> bool:
    """Up to so many times slower than the others it may count as how the node always is."""
    others = [times for other, times in pace.times.items() if other != node and other not in pace.known]
    if node not in pace.times or node in pace.known or not others:
        return False
    return pace.times[node] >= PACES.slow * PACES.trusted * statistics.median(others)


def _window(steps: Sequence[Pace]) -> bool:
    return len(steps) >= PACES.least_steps and sum(pace.duration_s for pace in steps) >= PACES.least_s
