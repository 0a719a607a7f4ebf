"""decide(): every branch as a scenario, and what it may never do, as properties."""

from __future__ import annotations

import dataclasses
from typing import Any, assert_never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_recovery.decide import (
    ChangePlan,
    Decision,
    Drain,
    End,
    Keep,
    Member,
    Observation,
    Pause,
    PauseSeen,
    Rules,
    Save,
    TroubleSeen,
    Wait,
    decide,
)
from shoal_recovery.journal import AT_REST, TERMINAL, TRANSITIONS, JobState

RULES = Rules()
NODES = frozenset({"a", "b", "c"})


def member(node: str, *, connected: bool = True, silent_s: float = 0.0) -> Member:
    return Member(node=node, name=f"the agent of {node}", connected=connected, silent_s=silent_s)


def trouble(node: str, *, fatal: bool = False, age_s: float = 0.0, local: bool = False) -> TroubleSeen:
    problem = "no space\nin file f" if local else "no peer"
    return TroubleSeen(node=node, name=f"rank process {node}:0", problem=problem, fatal=fatal, age_s=age_s, local=local)


def seen(state: JobState = JobState.RUNNING, **fields: Any) -> Observation:
    """A job that runs on a, b and c without any trouble, but for `fields`."""
    healthy = Observation(
        state=state,
        cancel_wanted=False,
        members=tuple(member(node) for node in sorted(NODES)),
        vital=NODES,
        ready=NODES,
        expected=NODES,
        tried=frozenset(),
        in_state_s=1.0,
    )
    return dataclasses.replace(healthy, **fields)


def begin(state: JobState, **fields: Any) -> Observation:
    return seen(state, **{"members": (), "vital": frozenset(), **fields})


def changes(cause: str, use: set[str], *lost: str) -> tuple[Any, ...]:
    return (ChangePlan, cause, frozenset(use), lost)


def summary(decision: Decision) -> tuple[Any, ...]:
    match decision:
        case ChangePlan():
            return changes(decision.cause, set(decision.use), *(node for node, _ in decision.lost))
        case End():
            return End, decision.state, decision.code
        case Keep() | Drain() | Save() | Pause() | Wait():
            return (type(decision),)
        case _:
            assert_never(decision)


KEEP, WAIT, DRAIN, SAVE, PAUSE = (Keep,), (Wait,), (Drain,), (Save,), (Pause,)
STARTED = changes("start", {"a", "b", "c"})
AGAIN = changes("interrupted", {"a", "b", "c"})
A_AND_B = frozenset({frozenset({"a", "b"})})
WITHOUT_B = changes("node_lost", {"a", "c"}, "b")
STORED = PauseSeen(stored="step 7 stands in file:///store", saving=False, store_takes=True)
NOT_STORED = PauseSeen(stored=None, saving=False, store_takes=True)
ON_ITS_WAY = PauseSeen(stored=None, saving=True, store_takes=True)
NO_STORE = PauseSeen(stored=None, saving=False, store_takes=False)
SLOW_B = (("b", "is 2 times slower"),)
LAST_B: dict[str, Any] = {
    "vital": frozenset({"b"}),
    "members": (member("b"),),
    "ready": frozenset({"b"}),
    "expected": frozenset({"b"}),
}
DOOMED_B = (("b", "spot: wanted back, in 9 s"),)
SCENARIOS: dict[str, tuple[Observation, tuple[Any, ...]]] = {
    "all is well": (seen(), KEEP),
    "over": (seen(JobState.SUCCEEDED, cancel_wanted=True), KEEP),
    "cancelled": (seen(cancel_wanted=True, ended="finished"), (End, JobState.CANCELLED, "cancelled_by_user")),
    "fatal": (seen(troubles=(trouble("a"), trouble("b", fatal=True))), (End, JobState.FAILED, "rank_failed")),
    "finished": (seen(ended="finished", members=()), (End, JobState.SUCCEEDED, "finished")),
    "finished, and stored soon": (seen(ended="finished", last_step="coming"), KEEP),
    "finished, and not stored": (seen(ended="finished", last_step="missing", pause=NOT_STORED), SAVE),
    "finished, and never stored": (
        seen(ended="finished", last_step="never"),
        (End, JobState.FAILED, "last_step_not_stored"),
    ),
    "a loss while the last step is stored": (
        seen(ended="finished", last_step="coming", members=(member("b", connected=False),)),
        WITHOUT_B,
    ),
    "a change was interrupted while the last step is stored": (
        seen(JobState.RECOVERING, ended="finished", last_step="coming"),
        AGAIN,
    ),
    "closed": (seen(members=(member("a"), member("b", connected=False))), WITHOUT_B),
    "one of a node's many is enough": (seen(members=(member("b"), member("b", connected=False))), WITHOUT_B),
    "two at once": (
        seen(members=(member("c", connected=False), member("a", connected=False))),
        changes("node_lost", {"b"}, "a", "c"),
    ),
    "a loss while recovering": (seen(JobState.RECOVERING, members=(member("b", connected=False),)), WITHOUT_B),
    "silent for long": (seen(members=(member("b", silent_s=2.0),)), WITHOUT_B),
    "silent, not for long": (seen(members=(member("b", silent_s=1.9),)), KEEP),
    "silent, and a peer in trouble": (seen(members=(member("b", silent_s=0.5),), troubles=(trouble("a"),)), WITHOUT_B),
    "in trouble itself is no second observer": (
        seen(members=(member("b", silent_s=0.5),), troubles=(trouble("b"),)),
        KEEP,
    ),
    "not silent long enough for two": (seen(members=(member("b", silent_s=0.4),), troubles=(trouble("a"),)), KEEP),
    "not needed": (seen(vital=frozenset({"a", "c"}), members=(member("b", connected=False),)), KEEP),
    "never reached": (seen(members=(member("a"), member("c")), ready=frozenset({"a", "c"})), KEEP),
    "trouble, just now": (seen(troubles=(trouble("a", age_s=2.9),)), KEEP),
    "trouble that stays": (seen(troubles=(trouble("a", age_s=3.0),)), changes("group_broken", {"a", "b", "c"})),
    "trouble that stays, and a link that is gone": (
        seen(troubles=(trouble("a", age_s=3.0),), apart=A_AND_B),
        WITHOUT_B,
    ),
    "trouble, just now, and a link that is gone": (seen(troubles=(trouble("a"),), apart=A_AND_B), WITHOUT_B),
    "trouble while recovering, and a link that is gone": (
        seen(JobState.RECOVERING, troubles=(trouble("a"),), apart=A_AND_B),
        WITHOUT_B,
    ),
    "trouble that stays, and nobody knows of links yet": (
        seen(troubles=(trouble("a", age_s=9.9),), apart=None),
        KEEP,
    ),
    "trouble while recovering, and nobody knows of links yet": (
        seen(JobState.RECOVERING, troubles=(trouble("a"),), apart=None),
        KEEP,
    ),
    "trouble that stays, and nobody knows of links for long": (
        seen(troubles=(trouble("a", age_s=10.0),), apart=None),
        changes("group_broken", {"a", "b", "c"}),
    ),
    "trouble that stays, and a node shows no sign of life": (
        seen(
            members=(member("a"), member("b", silent_s=1.0), member("c")),
            troubles=(trouble("b", age_s=3.0),),
            apart=A_AND_B,
        ),
        changes("group_broken", {"a", "b", "c"}),
    ),
    "a link that is gone, and no trouble": (seen(apart=A_AND_B), KEEP),
    "trouble that stays, and a link to a node that is not needed": (
        seen(vital=frozenset({"a", "c"}), troubles=(trouble("a", age_s=3.0),), apart=A_AND_B),
        changes("group_broken", {"a", "b", "c"}),
    ),
    "a loss beside a link that is gone": (
        seen(members=(member("c", connected=False),), troubles=(trouble("a"),), apart=A_AND_B),
        changes("node_lost", {"a", "b"}, "c"),
    ),
    "a fault of one node": (seen(troubles=(trouble("b", local=True, age_s=0.2), trouble("a"))), WITHOUT_B),
    "a fault of one node, just now": (seen(troubles=(trouble("b", local=True, age_s=0.1),)), KEEP),
    "a fault and a loss": (
        seen(members=(member("a", connected=False),), troubles=(trouble("b", local=True),)),
        changes("node_lost", {"c"}, "a", "b"),
    ),
    "a fault of a node that is left out already": (
        seen(
            JobState.RECOVERING,
            ready=NODES - {"b"},
            expected=NODES - {"b"},
            troubles=(trouble("b", local=True, age_s=1.0),),
            left_out=(("b", "no space"),),
        ),
        changes("interrupted", {"a", "c"}),
    ),
    "every rank blames itself": (
        seen(troubles=tuple(trouble(node, local=True) for node in sorted(NODES)), all_at_fault=True),
        (End, JobState.FAILED, "rank_failed"),
    ),
    "one after the other blames itself": (
        seen(
            vital=frozenset({"c"}),
            ready=frozenset({"c"}),
            expected=frozenset({"c"}),
            troubles=(trouble("c", local=True),),
            left_out=(("a", "no space"), ("b", "no space")),
        ),
        (End, JobState.FAILED, "rank_failed"),
    ),
    "the last one is at fault, as others are lost": (
        seen(
            members=(member("a", connected=False), member("c", connected=False)),
            ready=frozenset({"b"}),
            expected=frozenset({"b"}),
            troubles=(trouble("b", local=True),),
        ),
        changes("node_lost", set(), "a", "b", "c"),
    ),
    "the last one is at fault, others are away": (
        seen(**LAST_B, away=frozenset({"a", "c"}), troubles=(trouble("b", local=True, age_s=0.2),)),
        changes("node_lost", set(), "b"),
    ),
    "the last one is at fault, just now": (
        seen(**LAST_B, away=frozenset({"a", "c"}), troubles=(trouble("b", local=True, age_s=0.1),)),
        KEEP,
    ),
    "the last one is at fault, and was once away": (
        seen(**LAST_B, away=frozenset({"b"}), troubles=(trouble("b", local=True, age_s=0.2),)),
        (End, JobState.FAILED, "rank_failed"),
    ),
    "nobody can be used": (
        begin(JobState.STARTING, ready=frozenset(), expected=frozenset(), left_out=(("a", "odd"),)),
        WAIT,
    ),
    "still draining": (seen(JobState.DRAINING), KEEP),
    "drained": (
        seen(JobState.DRAINING, ended="stopped", vital=frozenset({"a", "b"})),
        changes("node_joined", {"a", "b", "c"}),
    ),
    "drained, and nobody knows of it": (
        seen(ended="stopped", vital=frozenset({"a", "b"})),
        changes("node_joined", {"a", "b", "c"}),
    ),
    "to go away": (seen(doomed=DOOMED_B, leave_fits=True), DRAIN),
    "to go away, but needed": (seen(doomed=DOOMED_B, leave_fits=False), KEEP),
    "to go away, but needed, and with all state": (seen(doomed=DOOMED_B, leave_fits=False, rescue=True), DRAIN),
    "stopped for that": (seen(JobState.DRAINING, doomed=DOOMED_B, ended="stopped", rescue=True), SAVE),
    "stopped for that, and saved": (
        seen(JobState.DRAINING, doomed=DOOMED_B, ended="stopped"),
        changes("preemption_notice", {"a", "c"}),
    ),
    "to go away, and it is not known what fits": (seen(doomed=DOOMED_B), KEEP),
    "to go away, and of no use": (seen(doomed=DOOMED_B, leave_fits=True, vital=frozenset({"a", "c"})), KEEP),
    "nobody joins who is to go away": (seen(doomed=DOOMED_B, vital=frozenset({"a", "c"}), join_gain=2.0), KEEP),
    "drained before it goes": (
        seen(JobState.DRAINING, ended="stopped", doomed=DOOMED_B),
        changes("preemption_notice", {"a", "c"}),
    ),
    "gone before it was drained": (
        seen(JobState.DRAINING, doomed=DOOMED_B, members=(member("b", connected=False),), ready=frozenset({"a", "c"})),
        WITHOUT_B,
    ),
    "another one is lost": (
        seen(doomed=DOOMED_B, members=(member("a", connected=False),)),
        changes("node_lost", {"c"}, "a"),
    ),
    "only those are left that are to go away": (
        seen(doomed=DOOMED_B, members=(member("a", connected=False), member("c", connected=False))),
        changes("node_lost", {"b"}, "a", "c"),
    ),
    "begin without those that are to go away": (
        begin(JobState.STARTING, doomed=DOOMED_B),
        changes("start", {"a", "c"}),
    ),
    "draining into the end": (seen(JobState.DRAINING, ended="finished"), (End, JobState.SUCCEEDED, "finished")),
    "begin": (begin(JobState.STARTING), STARTED),
    "begin at once": (begin(JobState.QUEUED), STARTED),
    "nobody yet": (begin(JobState.STARTING, ready=frozenset()), KEEP),
    "nobody for long": (begin(JobState.STARTING, ready=frozenset(), in_state_s=60.0), WAIT),
    "nobody, and that is known": (begin(JobState.WAITING, ready=frozenset(), in_state_s=60.0), KEEP),
    "some are late": (begin(JobState.STARTING, ready=frozenset({"a"})), KEEP),
    "some are too late": (begin(JobState.STARTING, ready=frozenset({"a"}), in_state_s=60.0), changes("start", {"a"})),
    "tried with these": (begin(JobState.WAITING, tried=NODES), KEEP),
    "more than were tried": (begin(JobState.WAITING, tried=frozenset({"a"})), changes("nodes_returned", set(NODES))),
    "fewer than were tried": (
        begin(JobState.WAITING, tried=NODES, ready=frozenset({"a"}), expected=frozenset({"a"})),
        changes("nodes_returned", {"a"}),
    ),
    "the state is lost with these": (
        begin(JobState.WAITING, tried=NODES, agents=NODES, tried_agents=NODES),
        KEEP,
    ),
    "an agent is back that may have the state": (
        begin(JobState.WAITING, tried=NODES, agents=NODES | {"d"}, tried_agents=NODES),
        changes("nodes_returned", set(NODES)),
    ),
    "agents do not matter to a plan that does not fit": (
        begin(JobState.WAITING, tried=NODES, agents=NODES | {"d"}),
        KEEP,
    ),
    "interrupted": (seen(JobState.RECOVERING), AGAIN),
    "interrupted once": (seen(JobState.RECOVERING, interrupted=1, since_attempt_s=0.0), AGAIN),
    "interrupted twice": (seen(JobState.RECOVERING, interrupted=2, since_attempt_s=0.1), KEEP),
    "interrupted twice, a while ago": (seen(JobState.RECOVERING, interrupted=2, since_attempt_s=0.2), AGAIN),
    "interrupted often": (seen(JobState.RECOVERING, interrupted=99, since_attempt_s=4.9), KEEP),
    "interrupted often, long ago": (seen(JobState.RECOVERING, interrupted=99, since_attempt_s=5.0), AGAIN),
    "a start interrupted twice": (begin(JobState.STARTING, interrupted=2, since_attempt_s=0.1), KEEP),
    "a loss waits for nothing": (
        seen(JobState.RECOVERING, interrupted=9, since_attempt_s=0.0, members=(member("b", connected=False),)),
        WITHOUT_B,
    ),
    "a node that helps": (seen(vital=frozenset({"a", "b"}), join_gain=1.05), DRAIN),
    "a node that hardly helps": (seen(vital=frozenset({"a", "b"}), join_gain=1.04), KEEP),
    "a node whose help is not known": (seen(vital=frozenset({"a", "b"})), KEEP),
    "a straggler that is worth another plan": (seen(repaced=SLOW_B, join_gain=1.1), DRAIN),
    "a straggler that is not": (seen(repaced=SLOW_B, join_gain=1.09), KEEP),
    "a straggler, and it is not known what is best": (seen(repaced=SLOW_B), KEEP),
    "a straggler while it drains": (seen(JobState.DRAINING, repaced=SLOW_B, join_gain=2.0), KEEP),
    "a straggler that is to go away": (seen(repaced=SLOW_B, doomed=DOOMED_B, leave_fits=True), DRAIN),
    "drained for a straggler": (
        seen(JobState.DRAINING, ended="stopped", repaced=SLOW_B),
        changes("straggler", {"a", "b", "c"}),
    ),
    "paused": (seen(JobState.PAUSED, vital=frozenset({"a", "b"}), join_gain=2.0), KEEP),
    "a pause begins with a stop": (seen(pause=NOT_STORED), DRAIN),
    "a pause stops nothing that could not be stored": (seen(pause=NO_STORE), KEEP),
    "a pause while it drains": (seen(JobState.DRAINING, pause=NOT_STORED), KEEP),
    "a pause, stopped": (seen(JobState.DRAINING, ended="stopped", pause=NOT_STORED), SAVE),
    "a pause, stopped, the store gone since": (seen(JobState.DRAINING, ended="stopped", pause=NO_STORE), SAVE),
    "a pause, on its way": (seen(JobState.DRAINING, ended="stopped", pause=ON_ITS_WAY), KEEP),
    "a pause, stored": (seen(JobState.DRAINING, ended="stopped", pause=STORED), PAUSE),
    "a pause, stored, and a loss": (
        seen(JobState.DRAINING, ended="stopped", pause=STORED, members=(member("b", connected=False),)),
        WITHOUT_B,
    ),
    "a pause, and all is done": (seen(ended="finished", pause=NOT_STORED), (End, JobState.SUCCEEDED, "finished")),
    "a pause, and no use any more": (
        seen(JobState.DRAINING, ended="stopped", pause=STORED, cancel_wanted=True),
        (End, JobState.CANCELLED, "cancelled_by_user"),
    ),
    "a pause while it recovers": (seen(JobState.RECOVERING, pause=STORED), AGAIN),
    "a pause, stored, after a change of plan that was interrupted": (
        seen(JobState.RECOVERING, ended="stopped", pause=STORED, interrupted=1),
        PAUSE,
    ),
    "a pause before it began": (begin(JobState.STARTING, pause=STORED), PAUSE),
    "a pause while it waits, stored": (begin(JobState.WAITING, tried=NODES, pause=STORED), PAUSE),
    "a pause while it waits": (begin(JobState.WAITING, tried=NODES, pause=NOT_STORED), SAVE),
    "a pause while it waits, on its way": (begin(JobState.WAITING, tried=NODES, pause=ON_ITS_WAY), KEEP),
    "a pause while it waits, and nowhere to store": (begin(JobState.WAITING, tried=NODES, pause=NO_STORE), KEEP),
    "a pause that can only be had by going on": (
        begin(JobState.WAITING, tried=frozenset({"a"}), pause=NO_STORE),
        changes("nodes_returned", set(NODES)),
    ),
    "a pause called off when all have stopped": (
        seen(JobState.DRAINING, ended="stopped"),
        changes("resumed", set(NODES)),
    ),
    "stalled": (seen(stalled_s=700.0), changes("stalled", set(NODES))),
    "stalled, and one is lost": (seen(stalled_s=700.0, members=(member("b", connected=False),)), WITHOUT_B),
    "resumed": (begin(JobState.STARTING, begun=True), changes("resumed", set(NODES))),
}


def assert_allowed(observation: Observation, decision: Decision) -> None:
    """The state that it leads to may follow the one that the job is in."""
    match decision:
        case ChangePlan():
            entered = JobState.RECOVERING if observation.begun else JobState.STARTING
        case End():
            entered = decision.state
        case Drain():
            entered = JobState.DRAINING
        case Pause():
            entered = JobState.PAUSED
        case Wait():
            entered = JobState.WAITING
        case Keep() | Save():
            entered = observation.state
        case _:
            assert_never(decision)
    assert entered is observation.state or entered in TRANSITIONS[observation.state]


@pytest.mark.parametrize(("observation", "expected"), SCENARIOS.values(), ids=SCENARIOS)
def test_scenarios(observation: Observation, expected: tuple[Any, ...]) -> None:
    decision = decide(observation, RULES)
    assert summary(decision) == expected
    assert_allowed(observation, decision)
    if not isinstance(decision, Keep):
        assert decision.reason.endswith(".") or isinstance(decision, End), decision.reason


def test_reasons_name_nodes_and_evidence() -> None:
    lost = decide(seen(members=(member("b", connected=False),)))
    assert isinstance(lost, ChangePlan)
    assert lost.reason == "Lost b (b: the connection to the agent of b closed)."
    assert lost.lost == (("b", "the connection to the agent of b closed"),)
    confirmed = decide(seen(members=(member("b", silent_s=0.6),), troubles=(trouble("a"),)))
    assert isinstance(confirmed, ChangePlan)
    assert "silent for 0.6 s, and a cannot reach a peer" in confirmed.reason
    alone = decide(seen(members=tuple(member(node, connected=False) for node in sorted(NODES)), ready=frozenset()))
    assert isinstance(alone, ChangePlan)
    assert not alone.use
    blamed = decide(seen(troubles=(trouble("b", local=True, age_s=1.0),)))
    assert isinstance(blamed, ChangePlan)
    assert blamed.at_fault == {"b"}
    assert blamed.reason == "Lost b (b: rank process b:0 cannot go on there: no space)."
    everywhere = decide(seen(vital={"b"}, ready={"b"}, expected={"b"}, troubles=(trouble("b", local=True),)))
    assert isinstance(everywhere, End)
    assert everywhere.reason == "rank process b:0 cannot go on, and no node is left that could: no space\nin file f"
    lacks = dataclasses.replace(trouble("c", local=True), problem="no data", code="data_broken")
    gone = (("d", "rank process d:0 cannot go on there: no space"), ("e", "it is odd."))
    several = decide(seen(troubles=(trouble("a", local=True), trouble("b", local=True), lacks), left_out=gone))
    assert isinstance(several, End)
    assert several.reason == (
        "rank process a:0 cannot go on, and no node is left that could: no space. The same on b, d. c: no data. "
        "e: it is odd.\nin file f"
    )
    assert decide(seen(vital={"c"}, ready={"c"}, expected={"c"}, troubles=(lacks,))) == End(
        state=JobState.FAILED,
        code="data_broken",
        reason="rank process c:0 cannot go on, and no node is left that could: no data",
    )
    late = decide(begin(JobState.WAITING, ready=frozenset({"a"}), in_state_s=61.0))
    assert isinstance(late, ChangePlan)
    assert late.reason == "Going on with a without b, c, which did not answer."
    joined = decide(seen(vital=frozenset({"a", "b"}), join_gain=1.5))
    assert isinstance(joined, Drain)
    assert joined.reason == "c joined: steps should be 50 % faster with it."
    leaving = decide(seen(doomed=DOOMED_B, leave_fits=True))
    assert isinstance(leaving, Drain)
    assert leaving.reason == "b is to go away (spot: wanted back, in 9 s): leaving it before that."
    slow = decide(seen(repaced=SLOW_B, join_gain=1.5))
    assert isinstance(slow, Drain) and slow.cause == "straggler"
    assert slow.reason == "b is 2 times slower: steps should be 50 % faster with a plan for that."
    suited = decide(seen(ended="stopped", repaced=(*SLOW_B, ("c", "is well"))))
    assert isinstance(suited, ChangePlan)
    assert suited.reason == "b is 2 times slower; c is well; planning for that."
    left = decide(seen(JobState.DRAINING, ended="stopped", doomed=DOOMED_B))
    assert isinstance(left, ChangePlan)
    assert left.doomed == {"b"}
    assert left.reason == "b is to go away (spot: wanted back, in 9 s); going on without it."


nodes = st.sampled_from(sorted(NODES | {"d"}))
sets = st.frozensets(nodes)
times_s = st.sampled_from((0.0, 0.1, 0.49, 0.5, 1.99, 2.0, 2.99, 3.0, 59.0, 60.0, 1e6))
members_of = st.lists(st.builds(member, nodes, connected=st.booleans(), silent_s=times_s), max_size=6).map(tuple)
faults_of = st.lists(st.builds(trouble, nodes, age_s=times_s, local=st.booleans()), max_size=3).map(tuple)
troubles_of = st.lists(st.builds(trouble, nodes, fatal=st.booleans(), age_s=times_s), max_size=3).map(tuple)
observations = st.builds(
    Observation,
    state=st.sampled_from(list(JobState)),
    cancel_wanted=st.booleans(),
    members=members_of,
    vital=sets,
    ready=sets,
    expected=sets,
    tried=sets,
    agents=sets,
    tried_agents=st.none() | sets,
    in_state_s=times_s,
    away=sets,
    troubles=troubles_of,
    ended=st.sampled_from((None, "finished", "stopped")),
    last_step=st.sampled_from(("safe", "coming", "missing", "never")),
    join_gain=st.none() | st.floats(0.1, 4.0),
    doomed=sets.map(lambda nodes: tuple((node, "told") for node in sorted(nodes))),
    leave_fits=st.none() | st.booleans(),
    rescue=st.booleans(),
    repaced=sets.map(lambda nodes: tuple((node, "is slow") for node in sorted(nodes))),
    interrupted=st.integers(0, 40),
    since_attempt_s=times_s,
    begun=st.booleans(),
    pause=st.sampled_from((None, None, STORED, NOT_STORED, ON_ITS_WAY, NO_STORE)),
)


@given(observations)
def test_every_decision_has_a_reason_and_uses_what_answers(observation: Observation) -> None:
    decision = decide(observation, RULES)
    if not isinstance(decision, Keep):
        assert decision.reason
    if isinstance(decision, ChangePlan):
        lost = {node for node, _ in decision.lost}
        hash(decision)  # frozen through and through
        assert decision.use <= observation.ready
        assert not decision.use & lost
        assert decision.doomed <= observation.ready & observation.going - lost - decision.use
        assert not decision.use & observation.going or decision.use <= observation.going
        assert lost <= observation.vital
        assert all(evidence for _, evidence in decision.lost)
    if observation.state in TERMINAL:
        assert isinstance(decision, Keep)


# A supervisor has entered its cluster before it decides; that a job is cancelling is written by control planes alone.
DECIDES_IN = tuple(state for state in JobState if state not in (*AT_REST, JobState.QUEUED, JobState.CANCELLING))


@given(observations, st.sampled_from(DECIDES_IN))
def test_every_decision_leads_where_a_job_may_go(observation: Observation, state: JobState) -> None:
    one = dataclasses.replace(observation, state=state)
    quiet = dataclasses.replace(one, cancel_wanted=False, members=(), troubles=())
    for each in (one, quiet, dataclasses.replace(quiet, ended="stopped")):
        assert_allowed(each, decide(each, RULES))


@given(observations, faults_of, st.booleans())
def test_a_fault_costs_a_node_or_the_job(observation: Observation, faults: Any, everywhere: bool) -> None:
    seen = dataclasses.replace(observation, troubles=faults, all_at_fault=everywhere)
    decision = decide(seen, RULES)
    blamed = {each.node for each in faults if each.local} & seen.vital
    if isinstance(decision, ChangePlan):
        assert decision.at_fault <= blamed
        assert not decision.at_fault & decision.use
        assert decision.at_fault <= {node for node, _ in decision.lost}
    if isinstance(decision, End) and decision.state is JobState.FAILED:
        assert blamed or seen.last_step == "never"
        if seen.last_step != "never":
            assert everywhere or (seen.ready | seen.expected | seen.away) <= blamed, "others may come"


@given(observations)
def test_silence_below_the_limits_is_never_a_loss(observation: Observation) -> None:
    quiet = tuple(
        dataclasses.replace(each, connected=True, silent_s=min(each.silent_s, 0.49)) for each in observation.members
    )
    decision = decide(dataclasses.replace(observation, members=quiet), RULES)
    assert not (isinstance(decision, ChangePlan) and (decision.lost or decision.cause == "node_lost"))


@given(observations)
def test_a_running_job_is_left_alone_unless_there_is_evidence(observation: Observation) -> None:
    """Whatever the supervisor fails to reach: no member, no trouble, no end, no gain means nothing to do."""
    blind = dataclasses.replace(
        observation,
        state=JobState.RUNNING,
        cancel_wanted=False,
        members=(),
        ready=frozenset(),
        troubles=(),
        ended=None,
        join_gain=None,
        leave_fits=None,
        pause=None,
    )
    assert decide(blind, RULES) == Keep()


@given(observations)
def test_a_job_rests_only_where_its_user_wants_it_and_its_state_is_stored(observation: Observation) -> None:
    decision = decide(observation, RULES)
    if isinstance(decision, Pause) or (isinstance(decision, Save) and decision.code == "pausing"):
        assert observation.pause is not None
        assert observation.ended == "stopped" or observation.state not in (JobState.RUNNING, JobState.RECOVERING)
    if isinstance(decision, Pause):
        assert observation.pause is not None and observation.pause.stored is not None


@given(observations)
def test_only_a_fatal_trouble_fails_a_job_or_a_store_that_takes_nothing(observation: Observation) -> None:
    decision = decide(observation, RULES)
    if isinstance(decision, End) and decision.state is JobState.FAILED and observation.last_step != "never":
        assert any(each.fatal for each in observation.troubles)


@given(st.integers(0, 200))
def test_pauses_grow_up_to_a_limit(interrupted: int) -> None:
    assert RULES.pause_s(interrupted) <= RULES.pause_s(interrupted + 1) <= RULES.longest_retry_s


def test_ranks_of_the_users_code_that_end_again_and_again_end_the_job() -> None:
    ended = ("a", "b", "a")
    decision = decide(seen(own_code=True, ended_ranks=ended))
    assert isinstance(decision, End) and (decision.state, decision.code) == (JobState.FAILED, "user_code_failed")
    assert decision.reason.startswith("Ranks ended 3 times in a row without a step, on a, b, while their nodes")
    assert decide(seen(own_code=True, ended_ranks=ended[:2])) == Keep()
    assert decide(seen(ended_ranks=ended)) == Keep(), "what ends ranks of ours is a node's affair"
