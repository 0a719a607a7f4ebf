"""Programs of a plan, and the proof that catches broken ones."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.errors import ScheduleError
from shoal_planner.job import ModelSpec
from shoal_planner.orders import one_f_one_b
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.programs import (
    Backward,
    Forward,
    Gather,
    Instruction,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    Vote,
)
from shoal_planner.schedule import programs, prove


def model(layers: int = 6, *, tie: bool = False) -> ModelSpec:
    return ModelSpec(layers=layers, hidden=64, heads=4, ffn=128, vocab=256, tie_embeddings=tie)


def make_plan(*pipelines: tuple[int, int, list[tuple[int, list[tuple[int, int]]]]]) -> Plan:
    """Pipelines as (micro_batch, micro_batches, stages), stages as (layers, [(tp, samples) per replica])."""
    node = 0
    built = []
    for micro_batch, micro_batches, stages in pipelines:
        first, made = 0, []
        for layers, replicas in stages:
            places = []
            for tp, samples in replicas:
                places.append(Replica(node=f"n-{node}", devices=tuple(range(tp)), tp=tp, samples=samples))
                node += 1
            made.append(Stage(layers=((first, first + layers),), replicas=tuple(places)))
            first += layers
        built.append(Pipeline(micro_batch=micro_batch, micro_batches=micro_batches, stages=tuple(made)))
    return Plan(pipelines=tuple(built))


UNEVEN = make_plan(
    (2, 3, [(2, [(2, 2)]), (2, [(1, 2)]), (2, [(1, 2)])]),
    (4, 2, [(3, [(1, 3), (2, 1)]), (3, [(1, 4)])]),
    (2, 1, [(6, [(4, 2)])]),
)


def test_one_stage_alternates_forward_and_backward() -> None:
    order = list(one_f_one_b(1, 2))
    assert order == [Forward(micro_batch=0), Backward(micro_batch=0), Forward(micro_batch=1), Backward(micro_batch=1)]


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_one_f_one_b_keeps_few_micro_batches_alive(depth: int, micro_batches: int) -> None:
    alive = most = 0
    for work in one_f_one_b(depth, micro_batches):
        alive += 1 if isinstance(work, Forward) else -1
        most = max(most, alive)
    assert alive == 0
    assert most == min(depth, micro_batches)


def test_program_of_a_middle_stage() -> None:
    plan = make_plan((1, 2, [(2, [(1, 1)]), (2, [(1, 1)]), (2, [(1, 1)])]))
    rows = {"first": 0, "last": 1}
    assert programs(plan, model())[1] == (
        ReceiveActivation(micro_batch=0, peer=0, **rows),
        Forward(micro_batch=0),
        SendActivation(micro_batch=0, peer=2, **rows),
        ReceiveActivation(micro_batch=1, peer=0, **rows),
        Forward(micro_batch=1),
        SendActivation(micro_batch=1, peer=2, **rows),
        ReceiveGradient(micro_batch=0, peer=2, **rows),
        Backward(micro_batch=0),
        SendGradient(micro_batch=0, peer=0, **rows),
        ReceiveGradient(micro_batch=1, peer=2, **rows),
        Backward(micro_batch=1),
        SendGradient(micro_batch=1, peer=0, **rows),
        Reduce(unit=4),
        Reduce(unit=3),
        Vote(),
        Update(),
        Gather(unit=3),
        Gather(unit=4),
    )


def test_rows_travel_between_unequal_replicas() -> None:
    plan = make_plan((4, 1, [(3, [(1, 3), (1, 1)]), (3, [(1, 1), (1, 3)])]))
    sends = [item for item in programs(plan, model())[0] if isinstance(item, SendActivation)]
    assert [(item.peer, item.first, item.last) for item in sends] == [(2, 0, 1), (3, 1, 3)]


def test_tensor_parallel_ranks_take_from_the_sender_of_their_number_modulo_the_group() -> None:
    plan = make_plan((1, 1, [(2, [(2, 1)]), (2, [(4, 1)]), (2, [(1, 1)])]))
    built = programs(plan, model())
    sources = {
        rank: [item.peer for item in program if isinstance(item, ReceiveActivation | ReceiveGradient)]
        for rank, program in enumerate(built)
    }
    assert sources == {0: [2], 1: [3], 2: [0, 6], 3: [1, 6], 4: [0, 6], 5: [1, 6], 6: [2]}
    prove(built)


def test_tied_embedding_is_synchronised_under_unit_0_by_every_holder() -> None:
    plan = make_plan((1, 1, [(3, [(1, 1)]), (3, [(1, 1)])]))
    units = [[item.unit for item in program if isinstance(item, Reduce)] for program in programs(plan, model(tie=True))]
    assert [sorted(found) for found in units] == [[0, 1, 2, 3], [0, 4, 5, 6, 7]]
    gathered = [item.unit for item in programs(plan, model())[1] if isinstance(item, Gather)]
    assert sorted(gathered) == [4, 5, 6, 7]


def test_stages_that_are_cut_differently_do_not_wait_for_each_other_down_the_whole_model() -> None:
    """Rounds of exchanges, each rank in one at a time: as many as the widest stage has units, not as the model has."""
    plan = make_plan(
        (1, 2, [(2, [(1, 1)]), (2, [(1, 1)]), (2, [(1, 1)])]),
        (1, 2, [(1, [(1, 1)]), (2, [(1, 1)]), (2, [(1, 1)]), (1, [(1, 1)])]),
    )
    built = programs(plan, model())
    prove(built)
    for kind in (Reduce, Gather):
        free: dict[int, int] = {}
        ended: dict[int, int] = {}
        orders = [[item.unit for item in program if isinstance(item, kind)] for program in built]
        while any(orders):
            unit = next(
                found[0]
                for found in orders
                if found and all(other[0] == found[0] for other in orders if found[0] in other)
            )
            holders = [rank for rank, order in enumerate(orders) if unit in order]
            ended[unit] = 1 + max(free.get(rank, 0) for rank in holders)
            for rank in holders:
                free[rank] = ended[unit]
                orders[rank].pop(0)
        assert sorted(ended) == list(range(8))
        assert max(ended.values()) == 3


@pytest.mark.parametrize("tie", [False, True])
def test_an_uneven_plan_is_proven(tie: bool) -> None:
    prove(programs(UNEVEN, model(tie=tie)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pipelines = []
    for _ in range(draw(st.integers(1, 3))):
        micro_batch = draw(st.integers(1, 4))
        depth = draw(st.integers(1, 4))
        cuts = sorted(draw(st.lists(st.integers(0, 6), min_size=depth - 1, max_size=depth - 1, unique=True)))
        stages = []
        for first, last in zip([0, *cuts], [*cuts, 6], strict=True):
            shares = _shares(draw, micro_batch)
            stages.append((last - first, [(draw(st.sampled_from([1, 2, 4])), share) for share in shares]))
        pipelines.append((micro_batch, draw(st.integers(1, 5)), stages))
    return make_plan(*pipelines)


def _shares(draw: st.DrawFn, samples: int) -> list[int]:
    shares = []
    while samples:
        shares.append(draw(st.integers(1, samples)))
        samples -= shares[-1]
    return shares


@settings(deadline=None, max_examples=100)
@given(plan=plans(), tie=st.booleans())
def test_every_plan_is_proven(plan: Plan, tie: bool) -> None:
    prove(programs(plan, model(tie=tie)))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_no_dropped_instruction_goes_unnoticed(data: st.DataObject) -> None:
    built = list(programs(data.draw(plans()), model(tie=True)))
    rank = data.draw(st.integers(0, len(built) - 1))
    index = data.draw(st.integers(0, len(built[rank]) - 1))
    built[rank] = built[rank][:index] + built[rank][index + 1 :]
    with pytest.raises(ScheduleError):
        prove(tuple(built))


def broken(rank: int, change: dict[int, Instruction | None], pairs: list[tuple[int, int]] = ()) -> tuple[Program, ...]:  # type: ignore[assignment]
    """Two stages, two micro-batches, with instructions of one rank replaced, then exchanged in pairs."""
    plan = make_plan((2, 2, [(3, [(1, 2)]), (3, [(1, 2)])]))
    built = [list(program) for program in programs(plan, model())]
    for index, instruction in change.items():
        built[rank][index] = instruction  # type: ignore[call-overload]
    for left, right in pairs:
        built[rank][left], built[rank][right] = built[rank][right], built[rank][left]
    return tuple(tuple(item for item in program if item is not None) for program in built)


def test_the_programs_that_the_cases_below_break() -> None:
    first, second = broken(0, {})
    assert [type(item).__name__[0] for item in first] == list("FSFSRBRBRRRRVUGGGG")
    assert [type(item).__name__ for item in second[:4]] == [
        "ReceiveActivation",
        "Forward",
        "Backward",
        "SendGradient",
    ]


CASES = {
    "rows differ": (broken(0, {1: SendActivation(micro_batch=0, peer=1, first=0, last=1)}), "which rank 1 receives as"),
    "empty rows": (broken(0, {1: SendActivation(micro_batch=0, peer=1, first=1, last=1)}), "at least one row"),
    "to itself": (broken(0, {1: SendActivation(micro_batch=0, peer=0, first=0, last=2)}), "another rank"),
    "twice": (broken(0, {3: SendActivation(micro_batch=0, peer=1, first=0, last=2)}), "the same rows twice"),
    "sent in another order": (broken(0, {}, [(1, 3), (1, 2)]), "which rank 1 receives as"),
    "sent before it is made": (broken(0, {}, [(0, 1)]), "before the work that makes it"),
    "received too late": (broken(1, {}, [(0, 1)]), "after the work that needs it"),
    "backward first": (broken(1, {}, [(1, 2)]), "before its forward"),
    "forward twice": (broken(0, {2: Forward(micro_batch=0)}), "not each micro-batch once"),
    "backward missing": (broken(0, {5: None}), "do not match"),
    "vote missing": (broken(0, {12: None}), "vote once"),
    "vote before reduce": (broken(0, {}, [(11, 12)]), "in this order"),
    "gather before update": (broken(0, {}, [(13, 14)]), "in this order"),
    "gather another unit": (broken(0, {14: Gather(unit=9)}), "must be the same"),
    "reduce twice": (broken(0, {9: Reduce(unit=3)}), "must be the same"),
    "different rows": (
        broken(0, {1: SendActivation(micro_batch=0, peer=1, first=0, last=1)})[:1]
        + broken(1, {0: ReceiveActivation(micro_batch=0, peer=0, first=0, last=1)})[1:],
        "different rows in different micro-batches",
    ),
    "rows with a gap": (
        broken(1, {0: ReceiveActivation(micro_batch=1, peer=0, first=3, last=4)}),
        "join without gaps",
    ),
    "one micro-batch is not received": (broken(1, {0: None}), "but not for the one after it"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_program_is_found(name: str) -> None:
    built, message = CASES[name]
    with pytest.raises(ScheduleError, match=message):
        prove(built)


def test_a_deadlock_is_found() -> None:
    plan = make_plan((1, 1, [(6, [(1, 1)])]), (1, 1, [(6, [(1, 1)])]))
    first, second = programs(plan, model())
    swapped = (*second[:2], second[3], second[2], *second[4:])
    with pytest.raises(ScheduleError, match="waits for ever at Reduce") as caught:
        prove((first, swapped))
    assert caught.value.rank == 0
    assert dataclasses.is_dataclass(first[2])
