"""Schedules beside 1F1B: their chunks, orders, programs, seconds and bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_ground import make_cluster, make_job

from shoal_planner.closed_forms import Passes, interleaved_s, zero_bubble_s
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, ScheduleError
from shoal_planner.job import JobSpec, Schedule
from shoal_planner.loads import replica_loads, segments
from shoal_planner.memory import block_activation_bytes, block_weight_bytes
from shoal_planner.orders import InFlight, Place, fullest, order
from shoal_planner.parameters import stage_units
from shoal_planner.plan import Override, Pipeline, Plan, Replica, Stage, parse_plan, plan_to_mapping
from shoal_planner.predict import predict
from shoal_planner.profile import Profile
from shoal_planner.programs import InputGradient, Program, SendActivation, WeightGradient
from shoal_planner.schedule import programs, prove
from shoal_planner.simulate import simulate

ALL: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero_bubble")


def in_chunks(
    stages: int, chunks: int, micro_batches: int, *, layers: int = 1, schedule: Schedule = "interleaved"
) -> Plan:
    """Equal stages, each a device of its own node."""
    made = tuple(
        Stage(
            layers=tuple(((c * stages + s) * layers, (c * stages + s + 1) * layers) for c in range(chunks)),
            replicas=(Replica(node=f"n-{s}", devices=(0,)),),
        )
        for s in range(stages)
    )
    pipeline = Pipeline(micro_batch=1, micro_batches=micro_batches, stages=made)
    return Plan(pipelines=(pipeline,), schedule=schedule, copies=0)


def ground(plan: Plan) -> tuple[JobSpec, ClusterSnapshot]:
    layers, batch = plan.num_layers, plan.global_batch
    job = make_job(layers=layers, batch=batch, seq_len=16, hidden=2048, tie=False, copies=0)
    return job, make_cluster(("n", "A100-80G", len(plan.pipelines[0].stages), 1), memory_mib={})


@pytest.mark.parametrize(
    ("layers", "schedule", "message"),
    [
        ([[[0, 2], [4, 6]], [[2, 4], [6, 8]]], "1f1b", "schedule = '1f1b': must be 'interleaved'"),
        ([[[0, 2], [4, 6]], [[2, 4], [6, 8]]], "zero_bubble", "schedule = 'zero_bubble': must be 'interleaved'"),
        ([[[0, 2], [4, 6]], [[2, 8]]], "interleaved", "stages[1].layers = [[2, 8]]: must be as many chunks as in"),
        ([[[0, 2], [2, 4]], [[4, 6], [6, 8]]], "interleaved", "chunk 0 must begin at 2: a pipeline covers every layer"),
        ([[[4, 6], [0, 2]], [[2, 4], [6, 8]]], "interleaved", "layers = [[4, 6], [0, 2]]: must be chunks in asc"),
        ([[[0, 2], [4, 4]], [[2, 4], [4, 8]]], "interleaved", "in their first and last chunk; chunk 1 holds none"),
        ([[[0, 4], [4, 8]]], "interleaved", "must be one chunk: a pipeline of one stage"),
        ([[], [[0, 8]]], "interleaved", "must have at least one chunk"),
    ],
)  # fmt: skip
def test_chunks_that_do_not_cover_the_layers_are_refused(layers: list[Any], schedule: str, message: str) -> None:
    stages = [{"layers": chunks, "replicas": [{"node": f"n-{s}", "devices": [0]}]} for s, chunks in enumerate(layers)]
    document = {"schedule": schedule, "pipelines": [{"micro_batch": 1, "micro_batches": 4, "stages": stages}]}
    with pytest.raises(InvalidField) as caught:
        parse_plan(document)
    assert message in str(caught.value)


def test_a_plan_of_chunks_is_read_as_it_was_written() -> None:
    plan = in_chunks(2, 2, 4, layers=2)
    assert parse_plan(plan_to_mapping(plan)) == plan
    assert [stage_units(plan, 0, s) for s in (0, 1)] == [(0, 1, 2, 5, 6), (3, 4, 7, 8, 9)]
    ends = Stage(layers=((0, 0), (3, 5)), replicas=(Replica(node="a", devices=(0,)),))
    other = Stage(layers=((0, 3), (5, 5)), replicas=(Replica(node="b", devices=(0,)),))
    assert Pipeline(micro_batch=1, micro_batches=1, stages=(ends, other)).num_chunks == 2


def test_overrides_stay_within_a_chunk() -> None:
    stage = in_chunks(2, 2, 4, layers=2).pipelines[0].stages[0]
    kept = dataclasses.replace(stage, overrides=(Override(layers=(1, 2), recompute="full"), Override(layers=(4, 6))))
    assert kept.recomputed() == {"none": 3, "selective": 0, "full": 1}
    assert [kept.recomputed(chunk)["full"] for chunk in (0, 1)] == [1, 0]
    with pytest.raises(InvalidField, match="and one chunk"):
        dataclasses.replace(stage, overrides=(Override(layers=(1, 5), recompute="full"),))


def test_the_first_stage_passes_groups_through_its_chunks() -> None:
    """Two stages, two chunks, four micro-batches, as in Narayanan et al. 2021, figure 4."""
    works = [
        f"{type(work).__name__[0]}{work.micro_batch}{'ab'[work.chunk]}"
        for work in order("interleaved", Place(stage=0, stages=2, micro_batches=4, chunks=2))
    ]
    assert works[:8] == ["F0a", "F1a", "F0b", "F1b", "F2a", "B0b", "F3a", "B1b"]
    assert works[-4:] == ["B2b", "B3b", "B2a", "B3a"]


def test_zero_bubble_puts_weights_off_by_the_number_of_the_stage() -> None:
    works = [
        f"{type(work).__name__[0]}{work.micro_batch}"
        for work in order("zero_bubble", Place(stage=1, stages=2, micro_batches=3))
    ]
    assert works == ["F0", "I0", "F1", "I1", "W0", "F2", "I2", "W1", "W2"]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from(ALL))
    total, built, node = draw(st.integers(6, 8)), [], 0
    for _ in range(draw(st.integers(1, 2))):
        num = draw(st.integers(1, 4))
        most = total // num if num > 1 and schedule == "interleaved" else 1
        chunks = draw(st.integers(1, min(3, most)))
        cuts = sorted(draw(st.sets(st.integers(1, total - 1), min_size=num * chunks - 1, max_size=num * chunks - 1)))
        bounds = [0, *cuts, total]
        size, stages = draw(st.integers(1, 3)), []
        for s in range(num):
            shares = [size] if size == 1 or draw(st.booleans()) else [1, size - 1]
            replicas = []
            for samples in shares:
                tp = draw(st.sampled_from((1, 2, 4)))
                replicas.append(Replica(node=f"n-{node}", devices=tuple(range(tp)), tp=tp, samples=samples))
                node += 1
            layers = tuple((bounds[c * num + s], bounds[c * num + s + 1]) for c in range(chunks))
            stages.append(Stage(layers=layers, replicas=tuple(replicas)))
        built.append(Pipeline(micro_batch=size, micro_batches=draw(st.integers(1, 9)), stages=tuple(stages)))
    return Plan(pipelines=tuple(built), schedule=schedule)


@settings(max_examples=150, deadline=None)
@given(plans())
def test_programs_of_any_plan_are_proven(plan: Plan) -> None:
    prove(programs(plan, make_job(layers=plan.num_layers).model))


def programs_of(schedule: Schedule) -> tuple[Program, ...]:
    plan = in_chunks(2, 2 if schedule == "interleaved" else 1, 3, schedule=schedule)
    return programs(plan, make_job(layers=plan.num_layers).model)


def test_broken_programs_are_found() -> None:
    split, chunked = programs_of("zero_bubble"), programs_of("interleaved")
    for found, message in (
        (tuple(item for item in split[0] if item != WeightGradient(micro_batch=1)), "gradients of weights"),
        (tuple(sorted(split[0], key=lambda item: not isinstance(item, WeightGradient))), "before the gradient of its"),
        (tuple(item for item in split[0] if item != InputGradient(micro_batch=1)), "do not match forwards"),
    ):
        with pytest.raises(ScheduleError, match=message):
            prove((found, *split[1:]))
    late = [item for item in split[0] if not isinstance(item, WeightGradient)]
    with pytest.raises(ScheduleError, match="must finish micro-batches, then reduce"):
        prove(((*late, *(WeightGradient(micro_batch=number) for number in range(3))), *split[1:]))
    other = tuple(
        dataclasses.replace(item, peer_chunk=1) if isinstance(item, SendActivation) and not item.micro_batch else item
        for item in chunked[0]
    )
    with pytest.raises(ScheduleError, match="which rank 1 receives as"):
        prove((other, *chunked[1:]))


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 7, 8, 13])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (3, 2), (4, 3)])
def test_the_closed_form_is_the_simulation_on_equal_stages(stages: int, chunks: int, micro_batches: int) -> None:
    for schedule in ALL if chunks == 1 else ("interleaved",):
        plan = in_chunks(stages, chunks, micro_batches, schedule=schedule)
        loads, costs = bare(plan)
        assert predict(plan, costs).step_s == pytest.approx(simulate(plan, costs).step_s, rel=1e-9)
        assert len({load.time for load in loads}) == 1


class _Bare(CostModel):
    """Without messages, exchanges, ends of the model and optimizer: what schedules alone make of blocks."""

    def send_s(self, from_node: str, to_node: str, samples: int) -> float:
        return 0.0

    def half_exchange_s(self, members: frozenset[tuple[str, int]], count: int, num_bytes: float) -> float:
        return 0.0

    def stage(self, *args: Any, **options: Any) -> Any:
        return super().stage(*args, **options | {"embedding": False, "head": False})


def bare(plan: Plan) -> tuple[Any, CostModel]:
    job, cluster = ground(plan)
    costs = _Bare(job, cluster, Profile())
    return replica_loads(plan, costs, segments(plan, costs)), costs


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_bubbles_are_the_published_ones(stages: int, micro_batches: int) -> None:
    def bubble_s(schedule: Schedule, chunks: int = 1) -> float:
        plan = in_chunks(stages, chunks, micro_batches, layers=4 // chunks, schedule=schedule)
        loads, costs = bare(plan)
        return (simulate(plan, costs).step_s - after_s(plan, costs)) / (micro_batches * loads[0].time.total_s) - 1

    plain = (stages - 1) / micro_batches
    assert bubble_s("1f1b") == pytest.approx(plain, rel=1e-6)
    for chunks in (2, 4):
        assert bubble_s("interleaved", chunks) == pytest.approx(plain / chunks, rel=1e-6)
    # A little more than a third: attention has no weights, so their gradients are a little less than half of it.
    assert bubble_s("zero_bubble") == pytest.approx(plain / 3, rel=0.01)
    third = Passes(forward_s=1.0, input_s=1.0, weight_s=1.0)
    assert zero_bubble_s([third] * stages, micro_batches) == 3 * micro_batches + (stages - 1)
    assert interleaved_s([[1.0] * 3] * stages, micro_batches) == 3 * micro_batches + (stages - 1)


def after_s(plan: Plan, costs: CostModel) -> float:
    terms = predict(plan, costs).terms
    return terms.gradient_s + terms.optimizer_s


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0.1, 10)] * 3), min_size=1, max_size=5), st.integers(1, 12), st.data())
def test_nothing_that_gets_faster_makes_a_step_slower(
    seconds: list[tuple[float, float, float]], micro_batches: int, data: st.DataObject
) -> None:
    faster = [tuple(value * data.draw(st.sampled_from((1.0, 0.9, 0.1))) for value in stage) for stage in seconds]

    def both(stages: list[Any]) -> tuple[float, float]:
        passes = [Passes(forward_s=f, input_s=b, weight_s=w) for f, b, w in stages]
        return zero_bubble_s(passes, micro_batches), interleaved_s(stages, micro_batches)

    for after, before in zip(both(faster), both(list(seconds)), strict=True):
        assert after <= before * (1 + 1e-12)


def test_what_is_kept_at_the_fullest_moments() -> None:
    assert fullest("1f1b", Place(stage=1, stages=4, micro_batches=8)) == (InFlight(forward=(3,)),)
    zero = fullest("zero_bubble", Place(stage=1, stages=4, micro_batches=8))
    assert zero[0] == InFlight(forward=(3,), weight=1)
    assert all(moment.forward[0] + moment.weight <= 4 for moment in zero)
    # (v - 1) p + 2 (p - 1) + 1 chunks of the first stage, as many as a micro-batch of v chunks (1 + (p - 1) / (p v))
    # times p keeps (Narayanan et al. 2021b, 2.2).
    chunked = fullest("interleaved", Place(stage=0, stages=4, micro_batches=16, chunks=2))
    assert {sum(moment.forward) for moment in chunked} == {11}


def test_zero_bubble_keeps_no_more_than_the_first_stage_with_1f1b() -> None:
    model = make_job().model
    for precision in ("fp32", "bf16"):
        for tp in (1, 2):
            weight = block_weight_bytes(model, 128, precision, tp)
            assert weight <= block_activation_bytes(model, 128, precision, tp, "none")
    peaks = {}
    for schedule in ("1f1b", "zero_bubble"):
        loads, _ = bare(in_chunks(4, 1, 8, layers=2, schedule=schedule))
        peaks[schedule] = [load.memory.activations for load in loads]
    assert max(peaks["zero_bubble"][1:3]) <= peaks["1f1b"][0]
    assert peaks["zero_bubble"][0] == pytest.approx(peaks["1f1b"][0])
    assert all(split >= whole for split, whole in zip(peaks["zero_bubble"], peaks["1f1b"], strict=True))
