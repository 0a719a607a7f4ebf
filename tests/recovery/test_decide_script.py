"""What is decided about a script of a user's: where it starts, what a loss is, when it is over."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shoal_recovery.decide_script import (
    START_WAIT_S,
    TRIES,
    Await,
    Ended,
    Finish,
    KeepOn,
    Launch,
    NoteLoss,
    Place,
    ScriptSeen,
    decide_script,
    leaves,
    may_grow,
    seat,
    size,
    usable,
)
from shoal_recovery.journal import JobState
from shoal_recovery.script_errors import in_short, own_line

HEAD = Place(node="the head", slots=0, head=True)
BIG = Place(node="big", slots=1)
SPOT = tuple(Place(node=f"spot-{index}", slots=1, spot=True) for index in range(3))
SEEN = ScriptSeen(
    state=JobState.RUNNING,
    places=(HEAD, BIG, *SPOT),
    expected=frozenset({"big", "spot-0", "spot-1", "spot-2"}),
    min_workers=2,
    in_state_s=1.0,
    script="big",
    launches=1,
)


def seen(**changes: Any) -> ScriptSeen:
    return dataclasses.replace(SEEN, **changes)


def fresh(**changes: Any) -> ScriptSeen:
    return seen(**{"state": JobState.STARTING, "script": None, "launches": 0} | changes)


def doomed(place: Place) -> Place:
    return dataclasses.replace(place, doomed=True)


def test_a_script_starts_where_nobody_takes_the_node_away() -> None:
    decision = decide_script(fresh())
    assert decision == Launch(node="big", code="started", reason="The script is started on big.")
    assert seat((HEAD, *SPOT)) == "the head"
    assert seat(SPOT) == "spot-0"
    assert seat((doomed(BIG), *SPOT)) == "spot-0"
    assert seat(()) is None


def test_a_start_waits_for_nodes_that_the_cluster_has_but_not_for_ever() -> None:
    some = (HEAD, BIG, SPOT[0])
    assert decide_script(fresh(places=some)) == KeepOn()
    assert decide_script(fresh(places=(HEAD,), expected=frozenset())) == KeepOn()
    assert isinstance(decide_script(fresh(places=some, in_state_s=START_WAIT_S)), Launch)


def test_too_little_room_is_waited_for_and_said() -> None:
    decision = decide_script(fresh(places=(HEAD, BIG), expected=frozenset({"big"})))
    assert isinstance(decision, Await) and "2 workers are needed (workers.min), and 1 fit" in decision.reason
    assert isinstance(decide_script(seen(state=JobState.RECOVERING, places=(HEAD, BIG))), Await)
    waiting = seen(state=JobState.WAITING, script=None)
    assert isinstance(decide_script(waiting), Launch)


def test_wishes_come_before_everything() -> None:
    gone = (("big", "the connection closed"),)
    cancelled = decide_script(seen(cancel_wanted=True, pause_wanted=True, gone=gone))
    assert isinstance(cancelled, Finish) and cancelled.state is JobState.CANCELLED
    paused = decide_script(seen(pause_wanted=True, ended=Ended(exit=0)))
    assert isinstance(paused, Finish) and paused.state is JobState.PAUSED
    assert decide_script(seen(state=JobState.SUCCEEDED, cancel_wanted=True)) == KeepOn()


def test_a_lost_node_is_a_loss_and_the_script_is_started_elsewhere_only_if_it_was_there() -> None:
    workers = decide_script(seen(gone=(("spot-1", "silent"),)))
    assert isinstance(workers, NoteLoss) and not workers.script
    assert "Lost spot-1 (spot-1: silent). Its workers are started anew" in workers.reason
    both = decide_script(seen(gone=(("big", "closed"), ("spot-1", "silent")), ended=Ended(exit=1)))
    assert isinstance(both, NoteLoss) and both.script
    again = decide_script(seen(state=JobState.RECOVERING, script=None, places=(HEAD, *SPOT)))
    assert isinstance(again, Launch) and (again.node, again.code) == ("the head", "started_again")


def test_the_end_of_a_script_is_the_end_of_its_job() -> None:
    ended = decide_script(seen(ended=Ended(exit=0)))
    assert isinstance(ended, Finish) and ended.state is JobState.SUCCEEDED
    failed = decide_script(seen(ended=Ended(exit=1, code="script_missing", problem="there is no such file")))
    assert failed == Finish(state=JobState.FAILED, code="script_missing", reason="there is no such file")


def test_a_script_that_is_lost_again_and_again_before_it_got_anywhere_is_given_up() -> None:
    lost = Ended(exit=None, code="script_lost", problem="The script was lost: killed.", lost=True)
    again = decide_script(seen(ended=lost, steps=1))
    assert isinstance(again, Launch) and "The script was lost: killed. The script is started again" in again.reason
    assert isinstance(decide_script(seen(ended=lost)), Launch), "it may have been bad luck"
    gone = dataclasses.replace(lost, with_node=True)
    assert isinstance(decide_script(seen(ended=gone, launches=TRIES)), Launch)
    over = decide_script(seen(ended=lost, launches=TRIES))
    assert isinstance(over, Finish) and (over.state, over.code) == (JobState.FAILED, "script_lost")


def test_nodes_that_go_are_left_while_enough_others_are_there() -> None:
    places = (HEAD, BIG, doomed(SPOT[0]), SPOT[1])
    assert usable(places, 2) == {"big": 1, "spot-1": 1}
    assert leaves(places, frozenset({"spot-0", "big"}), 2) == {"spot-0"}
    assert usable(places, 3) == {"big": 1, "spot-0": 1, "spot-1": 1}
    assert leaves(places, frozenset({"spot-0", "big"}), 3) == frozenset()


@pytest.mark.parametrize(("slots", "expected"), [({}, None), ({"a": 1}, None), ({"a": 1, "b": 1}, 2), ({"a": 9}, 4)])
def test_as_many_workers_as_fit_between_least_and_most(slots: dict[str, int], expected: int | None) -> None:
    assert size(slots, 2, 4) == expected


def test_workers_are_taken_in_only_where_nothing_reported_is_undone() -> None:
    assert may_grow(3, 3)
    assert not may_grow(4, 3)
    assert not may_grow(0, 0)


def test_the_line_of_an_error_is_the_users_own() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/tmp/project/train.py", line 12, in loop\n    model(x)\n'
        '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in __call__\n    return f(x)\n'
        "ValueError: wrong shape\n"
    )
    assert own_line(text) == "/tmp/project/train.py:12, in loop"
    assert in_short(text) == "ValueError: wrong shape (/tmp/project/train.py:12, in loop)"
    assert in_short("killed") == "killed"
    assert in_short("") == "no word of why"
