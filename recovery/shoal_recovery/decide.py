"""decide(): what to do with a job, given what was observed. Pure: values in, one decision out, each with its reason.

What counts as a loss is said in `evidence`. Failing to observe is never failing: a member that was never reached is not
lost, only not there yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shoal_recovery.evidence import Member as Member
from shoal_recovery.evidence import Patience, Sight, losses, names, severed
from shoal_recovery.evidence import Witness as Witness
from shoal_recovery.journal import AT_REST, JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(Patience):
    """When to believe what.

    `start_wait_s` is how long a start waits for nodes that the cluster has but that do not answer yet; `broken_group_s`
    how long trouble of a group may stay without anybody being lost, and `find_apart_s` how long it is waited for where
    nobody knows yet whether its nodes reach each other; `blame_s` how long a rank that blames its own node
    is not believed, for the others may be about to say the same; a node is taken in when the step gets faster by
    `join_gain`, and a plan is made for other speeds of its nodes when the step gets faster by `pace_gain`. After an
    attempt to change the plan was interrupted twice, the next waits `retry_s`, then twice as long, up to
    `longest_retry_s`: what interrupts it may be something that nobody is lost by. Where ranks that run code of the
    user's end by themselves in `most_ended_ranks` epochs in a row without a step, that is the code's doing."""

    start_wait_s: float = 60.0
    broken_group_s: float = 3.0
    find_apart_s: float = 10.0
    blame_s: float = 0.2
    join_gain: float = 1.05
    pace_gain: float = 1.1
    retry_s: float = 0.2
    longest_retry_s: float = 5.0
    most_ended_ranks: int = 3

    def pause_s(self, interrupted: int) -> float:
        """Before the next attempt, when so many in a row were interrupted."""
        return 0.0 if interrupted < 2 else min(self.retry_s * 2.0 ** (interrupted - 2), self.longest_retry_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleSeen:
    """A rank of the current epoch cannot go on; `fatal` means that no other plan would help (`code` says why to
    programs), `local` that one without this node may."""

    node: str
    name: str
    problem: str
    fatal: bool
    age_s: float
    local: bool = False
    code: str = "rank_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseSeen:
    """The user wants the job to rest. `stored` says where its newest safe step stands in the object store, once it
    does; until then it may be on its way there (`saving`). `store_takes`: the store can be written, as far as is known.
    `code` and `why` say to programs and people who wants that: "on request", or a clause that begins with "as"."""

    stored: str | None
    saving: bool
    store_takes: bool
    code: str = "paused_by_user"
    why: str = "on request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`vital` are the nodes that the current epoch computes on or keeps copies on; `ready` those whose agent and ranks
    all answer; `expected` those that the cluster has; `tried` those with which the last attempt found no plan. `agents`
    are the nodes whose agent answers, whatever their ranks do, and `tried_agents` those that did when the state was
    found to be lost (None where it was not). `left_out` are nodes that answer but cannot be used, and why, neither
    ready nor expected; `all_at_fault`: every rank, on several nodes, blames its own node. `away` are nodes that the job
    once had and the cluster has no more. `ended` is how all ranks of the epoch left it, None while any of them steps,
    and `last_step` where the last step of a job is that has done all of them: in the object store if it has one, on its
    way there, not even that, or given up, which `last_step_told` says; `interrupted` how many changes of plan in a row
    were interrupted, the last of them `since_attempt_s` ago. `apart` are pairs of nodes of an epoch in trouble that do
    not reach each other, None as long as nobody knows. `stalled_s`: for how long no rank has said a word, where
    that is too long. `doomed` are nodes that are to go away, and what was told of that; they may be ready all the same.
    `given_up` are those among them that the job has to leave to other jobs.
    `leave_fits`: whether a plan fits without them (None: not known). `rescue`: state would go with them, and is not on
    its way to the object store. `repaced` are ready nodes that are slower or faster than the plan takes them for, and
    what is said of each; `join_gain` is how many times faster a step would be with all nodes that are ready, as fast as
    they are. `begun`: the job has had a plan before. `pause`: whether the user wants it to rest.
    `ended_ranks` are nodes whose ranks ended by themselves, one in each epoch since a step was last done that never was
    before, and that answer; `own_code`: these run code of the user's."""

    state: JobState
    cancel_wanted: bool
    members: tuple[Member, ...]
    vital: frozenset[str]
    ready: frozenset[str]
    expected: frozenset[str]
    tried: frozenset[str]
    in_state_s: float
    agents: frozenset[str] = frozenset()
    tried_agents: frozenset[str] | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    all_at_fault: bool = False
    away: frozenset[str] = frozenset()
    troubles: tuple[TroubleSeen, ...] = ()
    apart: frozenset[frozenset[str]] | None = frozenset()
    ended: Literal["finished", "stopped"] | None = None
    last_step: Literal["safe", "coming", "missing", "never"] = "safe"
    last_step_told: str = "the last one could not be stored"
    join_gain: float | None = None
    doomed: tuple[tuple[str, str], ...] = ()
    given_up: frozenset[str] = frozenset()
    leave_fits: bool | None = None
    rescue: bool = False
    repaced: tuple[tuple[str, str], ...] = ()
    interrupted: int = 0
    since_attempt_s: float = 0.0
    stalled_s: float | None = None
    witnesses: tuple[Witness, ...] = ()
    computing: frozenset[str] = frozenset()
    since_step_s: float = math.inf
    begun: bool = False
    pause: PauseSeen | None = None
    ended_ranks: tuple[str, ...] = ()
    own_code: bool = False

    @property
    def sight(self) -> Sight:
        """What losses are told from."""
        return Sight(
            members=self.members,
            witnesses=self.witnesses,
            vital=self.vital,
            computing=self.computing,
            troubled=frozenset(trouble.node for trouble in self.troubles),
            since_step_s=self.since_step_s,
        )

    @property
    def going(self) -> frozenset[str]:
        """Doomed nodes."""
        return frozenset(node for node, _ in self.doomed)


Cause = Literal[
    "start",
    "resumed",
    "node_lost",
    "node_joined",
    "preemption_notice",
    "share_changed",
    "straggler",
    "group_broken",
    "stalled",
    "nodes_returned",
    "interrupted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePlan:
    """Raise the epoch and plan anew with the nodes in `use`. `lost` are nodes of the old plan, with the evidence; those
    `at_fault` among them answer, but cannot do their part, or not `for_a_while`. `doomed` nodes answer and are to go
    away: they give what they hold, and are planned with only where no plan fits without them. Where a job has
    `stalled`, ranks that do not leave their epoch are to end."""

    cause: Cause
    use: frozenset[str]
    lost: tuple[tuple[str, str], ...]
    reason: str
    at_fault: frozenset[str] = frozenset()
    for_a_while: bool = False
    doomed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Let all ranks stop after the same step; the change of plan, or the rest, comes when they have."""

    cause: Literal["node_joined", "preemption_notice", "share_changed", "straggler", "pausing"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Bring the newest whole step that is held to the object store."""

    code: Literal["pausing", "storing_last_step", "rescuing"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The job rests until it is wanted to go on; nothing of it stays on the nodes."""

    reason: str
    code: str = "paused_by_user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """For nodes: there is none to begin on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over."""

    state: Literal[JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED]
    code: str
    reason: str


Decision = Keep | ChangePlan | Drain | Save | Pause | Wait | End


def decide(seen: Observation, rules: Rules = Rules()) -> Decision:
    """The first of these that applies: end, replace what is lost, mend a group, pause, go on after a drain, begin,
    leave, suit the plan to stragglers, grow."""
    if seen.state in AT_REST:
        return Keep()
    if seen.cancel_wanted:
        return End(state=JobState.CANCELLED, code="cancelled_by_user", reason="Cancelled on request.")
    for trouble in seen.troubles:
        if trouble.fatal:
            return End(
                state=JobState.FAILED, code=trouble.code, reason=f"{trouble.name} cannot go on: {trouble.problem}"
            )
    if seen.own_code and len(seen.ended_ranks) >= rules.most_ended_ranks:
        return _kept_ending(seen)
    if seen.ended == "finished" and seen.last_step in ("safe", "never"):
        return _finish(seen)
    lost, faults = losses(seen.sight, rules), _faults(seen)
    if faults and (seen.all_at_fault or not (seen.ready | seen.expected | seen.away | lost.keys()) - faults.keys()):
        return _nowhere(seen, faults)
    if lost or any(fault.age_s >= rules.blame_s for fault in faults.values()):
        return _replace(seen, lost, faults)
    if seen.troubles and (cut := severed(seen.sight, rules, seen.apart or ())) is not None:
        return _part_with(seen, *cut)
    broken = [trouble for trouble in seen.troubles if trouble.age_s >= rules.broken_group_s]
    if seen.apart is None and all(trouble.age_s < rules.find_apart_s for trouble in seen.troubles):
        return Keep()
    if broken:
        return _change(
            seen,
            "group_broken",
            f"{broken[0].name} lost its peers ({broken[0].problem}) although all nodes answer; regrouping.",
        )
    if seen.stalled_s is not None:
        stalled = f"No rank has got on for {seen.stalled_s:.0f} s although all nodes answer; beginning anew."
        return _change(seen, "stalled", stalled)
    if seen.ended == "finished" and seen.state is not JobState.RECOVERING:
        reason = "All steps are done; the last one is being brought to the object store."
        return Keep() if seen.last_step == "coming" else Save(code="storing_last_step", reason=reason)
    if seen.pause is not None and (decision := _pause(seen, seen.pause)) is not None:
        return decision
    # Also where it is not known that it drains: who gave the order may have died before it was written down.
    if seen.state in (JobState.RUNNING, JobState.DRAINING) and seen.ended == "stopped":
        leaving = seen.vital & seen.going
        if leaving and seen.rescue:
            reason = f"{_told(seen, leaving)}: the newest step is being brought to the object store first."
            return Save(code="rescuing", reason=reason)
        if leaving:
            return _change(seen, _leaves_for(seen, leaving), f"{_told(seen, leaving)}; going on without it.")
        if seen.repaced:
            return _change(seen, "straggler", f"{_paces(seen)}; planning for that.")
        if new := seen.ready - seen.vital - seen.going:
            return _change(seen, "node_joined", f"Taking in {names(new)}.")
        return _change(seen, "resumed", "All ranks have stopped, and nothing is left that they stopped for; going on.")
    if seen.since_attempt_s < rules.pause_s(seen.interrupted):
        return Keep()
    if seen.state in (JobState.QUEUED, JobState.STARTING, JobState.WAITING):
        return _begin(seen, rules)
    if seen.state is JobState.RECOVERING:  # a change of plan ends in another state unless it was interrupted
        return _change(seen, "interrupted", "The change of plan was interrupted; again.")
    if seen.repaced:
        return _leave(seen) or _repace(seen, rules)
    return _leave(seen) or _grow(seen, rules)


def _finish(seen: Observation) -> End:
    if seen.last_step == "safe":
        return End(state=JobState.SUCCEEDED, code="finished", reason="All steps are done.")
    return End(
        state=JobState.FAILED,
        code="last_step_not_stored",
        reason=f"All steps are done, but {seen.last_step_told}. The nodes still hold it.",
    )


def _change(seen: Observation, cause: Cause, reason: str, without: Iterable[str] = ()) -> ChangePlan:
    """With all nodes that are ready, those that stay before those that are to go away."""
    ready = seen.ready.difference(without)
    use = ready - seen.going or ready
    return ChangePlan(cause=cause, use=use, lost=(), reason=reason, doomed=ready - use)


def _faults(seen: Observation) -> dict[str, TroubleSeen]:
    """Nodes of the epoch that cannot do their part, as their own ranks say. One that is left out already is no news."""
    usable = seen.vital - {node for node, _ in seen.left_out}
    return {trouble.node: trouble for trouble in reversed(seen.troubles) if trouble.local and trouble.node in usable}


def _nowhere(seen: Observation, faults: dict[str, TroubleSeen]) -> End:
    """Each fault is told once, and before the lines of code that the first one came from."""
    first, *others = [faults[node] for node in sorted(faults)]
    fault, end_of_line, where = first.problem.partition("\n")
    told = [*((other.node, _line(other.problem)) for other in others), *seen.left_out]
    alike = {node for node, why in told if why.endswith(fault)}  # of one left out it is told which rank it was, too
    rest = [f"{node}: {why.removesuffix('.')}." for node, why in told if node not in alike]
    if alike:
        rest.insert(0, f"The same on {names(alike)}.")
    said = " ".join([fault.removesuffix(".") + ".", *rest]) if rest else fault
    reason = f"{first.name} cannot go on, and no node is left that could: {said}{end_of_line}{where}"
    return End(state=JobState.FAILED, code=first.code, reason=reason)


def _replace(seen: Observation, lost: dict[str, str], faults: dict[str, TroubleSeen]) -> ChangePlan:
    said = {node: f"{fault.name} cannot go on there: {_line(fault.problem)}" for node, fault in faults.items()}
    known = {**said, **lost}
    evidence = "; ".join(f"{node}: {why}" for node, why in sorted(known.items()))
    return dataclasses.replace(
        _change(seen, "node_lost", f"Lost {names(frozenset(known))} ({evidence}).", without=known),
        lost=tuple(sorted(known.items())),
        at_fault=frozenset(faults.keys() - lost.keys()),
    )


def _part_with(seen: Observation, node: str, evidence: str) -> ChangePlan:
    """With the same nodes the same would happen again; but a link that is gone may come back."""
    change = _change(seen, "node_lost", f"Going on without {node}: {evidence}.", without={node})
    return dataclasses.replace(change, lost=((node, evidence),), at_fault=frozenset({node}), for_a_while=True)


def _kept_ending(seen: Observation) -> End:
    where = names(frozenset(seen.ended_ranks))
    reason = (
        f"Ranks ended {len(seen.ended_ranks)} times in a row without a step, on {where}, while their nodes answered: "
        "the job's code, or a library that it calls, ends its process (os._exit, a crash)."
    )
    return End(state=JobState.FAILED, code="user_code_failed", reason=reason)


def _begin(seen: Observation, rules: Rules) -> Decision:
    missing = seen.expected - seen.ready
    news = seen.ready != seen.tried or (seen.tried_agents is not None and seen.agents != seen.tried_agents)
    if seen.ready and news and (not missing or seen.in_state_s >= rules.start_wait_s):
        late = f" without {names(missing)}, which did not answer" if missing else ""
        stay = names(seen.ready - seen.going or seen.ready)
        if seen.state is JobState.WAITING:
            return _change(seen, "nodes_returned", f"Going on with {stay}{late}.")
        if seen.begun:
            return _change(seen, "resumed", f"Going on with {stay}{late}.")
        return _change(seen, "start", f"Starting on {stay}{late}.")
    if seen.left_out and not seen.ready | seen.expected and seen.state is not JobState.WAITING:
        reasons = "; ".join(f"{node}: {why}" for node, why in seen.left_out)
        return Wait(reason=f"No node can be used ({reasons}); waiting for others.")
    if not seen.ready and seen.state is not JobState.WAITING and seen.in_state_s >= rules.start_wait_s:
        return Wait(reason=f"No node has answered for {seen.in_state_s:.0f} s; waiting for nodes.")
    return Keep()


def _pause(seen: Observation, pause: PauseSeen) -> Decision | None:
    """Step by step: stop, save, rest. None where the job has to go on as ever until its state can be saved: a store
    that takes nothing stops no training."""
    stopped = seen.ended == "stopped"
    if stopped or seen.state in (JobState.QUEUED, JobState.STARTING, JobState.WAITING):
        if pause.stored is not None:
            return Pause(code=pause.code, reason=f"Paused {pause.why}; {pause.stored}.")
        if pause.saving or not (stopped or (pause.store_takes and seen.state is JobState.WAITING)):
            return Keep() if stopped else None
        reason = f"Pausing {pause.why}: the newest step is being brought to the object store."
        return Save(code="pausing", reason=reason)
    if seen.state is JobState.RUNNING and pause.store_takes:
        return Drain(cause="pausing", reason=f"Pausing {pause.why}: all ranks stop after the same step.")
    return None


def _leave(seen: Observation) -> Drain | None:
    """Nodes that are to go away, before they do; where the job cannot go on without them, only so that its state does
    not go with them."""
    leaving = seen.vital & seen.going
    if seen.state is not JobState.RUNNING or not leaving:
        return None
    if seen.leave_fits is False and seen.rescue:
        reason = f"{_told(seen, leaving)}, and no plan fits without it: its state goes to the object store first."
        return Drain(cause="preemption_notice", reason=reason)
    if not seen.leave_fits:
        return None
    cause = _leaves_for(seen, leaving)
    when = "leaving it" if cause == "share_changed" else "leaving it before that"
    return Drain(cause=cause, reason=f"{_told(seen, leaving)}: {when}.")


def _leaves_for(seen: Observation, leaving: frozenset[str]) -> Literal["preemption_notice", "share_changed"]:
    return "share_changed" if leaving <= seen.given_up else "preemption_notice"


def _grow(seen: Observation, rules: Rules) -> Decision:
    new = seen.ready - seen.vital - seen.going
    if seen.state is JobState.RUNNING and new and seen.join_gain is not None and seen.join_gain >= rules.join_gain:
        percent = (seen.join_gain - 1) * 100
        reason = f"{names(new)} joined: steps should be {percent:.0f} % faster with it."
        return Drain(cause="node_joined", reason=reason)
    return Keep()


def _repace(seen: Observation, rules: Rules) -> Decision:
    """One that is new comes in with it."""
    if seen.state is JobState.RUNNING and seen.join_gain is not None and seen.join_gain >= rules.pace_gain:
        percent = (seen.join_gain - 1) * 100
        reason = f"{_paces(seen)}: steps should be {percent:.0f} % faster with a plan for that."
        return Drain(cause="straggler", reason=reason)
    return Keep()


def _paces(seen: Observation) -> str:
    return "; ".join(f"{node} {said}" for node, said in seen.repaced)


def _told(seen: Observation, leaving: frozenset[str]) -> str:
    said = {node: "belongs to other jobs now" if node in seen.given_up else "is to go away" for node in leaving}
    return "; ".join(f"{node} {said[node]} ({told})" for node, told in seen.doomed if node in leaving)


def _line(problem: str) -> str:
    return problem.partition("\n")[0]
