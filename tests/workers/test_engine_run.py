"""What a run promises beside its numbers: stopping, resuming, refusing, limits, safety and the order of samples."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from engine_runs import (
    LAYOUTS,
    UnsafeOnce,
    assert_same_bits,
    job,
    part,
    plan,
    run_poisoned,
    run_poisoned_once,
    run_spoilt_once,
)

from shoal_workers.courier import STAGING
from shoal_workers.diagnosis import FirstFault, told
from shoal_workers.engine import Finished, Outcome, StepReport, Stopped
from shoal_workers.errors import EpochAbandoned, OutOfDeviceMemory
from shoal_workers.exchange import SoloExchange
from shoal_workers.live import GRADIENTS, OPTIMIZER, WEIGHTS
from shoal_workers.processes import Processes, run_plan
from shoal_workers.segments import ACTIVATIONS
from shoal_workers.solo import RunRequest, build_rank, solo_plan, whole_state
from shoal_workers.stage import PIPELINE

UNEVEN = LAYOUTS["3 stages beside 1"]


def test_all_ranks_stop_after_the_earliest_step_that_any_was_told(processes: Processes) -> None:
    request = RunRequest(job=job(), plan=UNEVEN, until_step=20, stop_after={1: 3, 4: 2})
    run = processes.run(request)
    assert [rank.outcome for rank in run.ranks] == [Stopped(step=2)] * 5
    assert {len(rank.reports) for rank in run.ranks} == {2}


def test_told_to_stop_late_is_stopped_after_the_next_step() -> None:
    built = build_rank(RunRequest(job=job(), plan=solo_plan(job()), until_step=5), 0, SoloExchange())
    outcome = built.engine.run(until_step=5, report=lambda report: None, stop_after=lambda: 0)
    assert outcome == Stopped(step=1)


def test_nothing_left_to_do_is_finished() -> None:
    built = build_rank(RunRequest(job=job(), plan=solo_plan(job()), until_step=0), 0, SoloExchange())
    reports: list[StepReport] = []
    assert built.engine.run(until_step=0, report=reports.append, stop_after=lambda: None) == Finished(step=0)
    assert not reports


def test_an_abandoned_rank_computes_no_further_than_what_it_is_at() -> None:
    """Although it has nothing to exchange that would wake it."""
    request = RunRequest(job=job(), plan=solo_plan(job()), until_step=1)
    exchange, asked = SoloExchange(), 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        if asked == 6:  # the first forward has begun
            exchange.abandon()
        return float(asked)

    built = build_rank(request, 0, exchange, clock=clock)
    with pytest.raises(EpochAbandoned):
        built.engine.run(until_step=1, report=lambda report: None, stop_after=lambda: None)
    assert built.live.tag == 0
    assert asked == 6, "the forward went on to its end"


def test_resumed_run_gives_the_same_bits(processes: Processes) -> None:
    request = RunRequest(job=job(), plan=UNEVEN, until_step=6)
    whole = processes.run(request)
    first = processes.run(replace(request, until_step=3))
    rest = processes.run(replace(request, start=first.state))
    assert_same_bits(rest.state, whole.state)
    assert first.losses + rest.losses == whole.losses


def test_first_stages_feed_every_sample_once_whatever_the_plan(processes: Processes) -> None:
    for layout in ("3 stages beside 1", "replicas of 3 and 1", "tp 1 beside tp 2"):
        run = processes.run(RunRequest(job=job(), plan=LAYOUTS[layout], until_step=2))
        for rank in run.ranks:
            assert [report.samples for report in rank.reports] == [((0, 8),), ((8, 16),)], layout


@pytest.mark.parametrize(
    ("layout", "poisoned_rank", "where"),
    [
        ("two equal pipelines", 0, "layer 0, on rank 0 (here:0)"),
        ("two equal pipelines", 1, "layer 0, on rank 1 (here:1)"),
        ("3 stages beside 1", 1, "layer 0, on ranks 0 (here:0), 1 (here:1)"),
        ("3 stages beside 1", 3, "layer 4, on rank 3 (here:3)"),
    ],
)
def test_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    processes: Processes, layout: str, poisoned_rank: int, where: str
) -> None:
    """And is told by the layer. The ranks of a replica see the same activations."""
    request = RunRequest(job=job(), plan=LAYOUTS[layout], until_step=3)
    for refusal in processes.call(request.plan.num_devices, run_poisoned, request, poisoned_rank):
        assert refusal.tag == 0
        assert not refusal.changed
        assert refusal.num_votes == 3, "tried once more, then asked where it went wrong"
        assert "step 1 was refused: loss or gradients are not finite on rank" in refusal.reason
        assert refusal.reason.endswith(f"the first value that is not finite comes out of {where}")


def test_a_step_that_was_spoilt_on_its_way_is_done_at_the_second_attempt(processes: Processes) -> None:
    request = RunRequest(job=job(), plan=LAYOUTS["two equal pipelines"], until_step=4)
    ranks, num_votes = zip(*processes.call(2, run_spoilt_once, request, 1, 2), strict=True)
    undisturbed = processes.run(request)
    assert num_votes == (5, 5)
    assert_same_bits(whole_state(request.job, ranks), undisturbed.state)
    assert {rank.losses for rank in ranks} == {undisturbed.losses}
    assert not any(report.skipped for rank in ranks for report in rank.reports)


def test_a_gradient_that_is_not_finite_is_told_by_its_layer() -> None:
    spec = job()
    live = build_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=0), 0, SoloExchange()).live
    for fqn in ("layers.1.mlp.up.weight", "layers.3.attention_norm.weight"):
        live.gradient(next(span for span in live.state.owns if span.fqn == fqn)).fill_(math.inf)
    answers = torch.stack([FirstFault().answer(live, spec.model.layers), torch.tensor([math.inf, -1.0])])
    said = told(answers, (0,), ("a:0", "b:0"), spec.model.layers)
    assert said.endswith("activations are finite, but the gradient of layer 3 is not, on rank 0 (a:0)")
    live.zero_gradients()
    answers = FirstFault().answer(live, spec.model.layers).unsqueeze(0)
    assert told(answers, (0,), ("a:0",), spec.model.layers).endswith("only sums of them are not")


def test_a_step_that_is_skipped_is_done_without_an_update(processes: Processes) -> None:
    spec = job()
    spec = replace(spec, train=replace(spec.train, on_nan="skip"))
    request = RunRequest(job=spec, plan=LAYOUTS["two equal pipelines"], until_step=3)
    before = processes.run(replace(request, until_step=2))
    skipped = processes.call(2, run_poisoned_once, request, 1, 3)
    assert_same_bits(whole_state(spec, skipped), before.state)
    for rank in processes.call(2, run_poisoned_once, replace(request, until_step=5), 1, 3):
        assert rank.outcome == Finished(step=5)
        assert [report.samples for report in rank.reports] == [((8 * step, 8 * step + 8),) for step in range(5)]
        assert [report.step for report in rank.reports if report.skipped] == [3]
        assert (rank.reports[2].skipped or "").endswith("comes out of layer 0, on rank 1 (here:1)")
        assert {report.tokens for report in rank.reports} == {spec.train.tokens_per_step}
        assert [math.isfinite(report.loss) for report in rank.reports] == [True, True, False, True, True]


def test_too_many_skipped_steps_in_a_row_are_refused(processes: Processes) -> None:
    spec = job()
    request = RunRequest(
        job=replace(spec, train=replace(spec.train, on_nan="skip")),
        plan=LAYOUTS["two equal pipelines"],
        until_step=20,
    )
    for refusal in processes.call(2, run_poisoned, request, 1):
        assert (refusal.tag, refusal.num_votes, refusal.changed) == (9, 30, False)
        assert "step 10 was refused" in refusal.reason
        assert "10 in a row" in refusal.reason


def test_deterministic_kernels_are_on_while_the_engine_runs_and_give_the_same_bits(processes: Processes) -> None:
    spec = job(precision="bf16")
    spec = replace(spec, train=replace(spec.train, deterministic=True))
    request = RunRequest(job=spec, plan=LAYOUTS["replicas of 3 and 1"], until_step=4)
    assert_same_bits(processes.run(request).state, processes.run(request).state)
    alone = build_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=1), 0, SoloExchange())
    seen: list[bool] = []
    alone.engine.run(
        until_step=1,
        report=lambda report: seen.append(torch.are_deterministic_algorithms_enabled()),
        stop_after=lambda: None,
    )
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_memory_limit_holds_exactly_and_names_device_and_bytes(processes: Processes) -> None:
    request = RunRequest(job=job(), plan=LAYOUTS["two equal pipelines"], until_step=2)
    peak_bytes = max(rank.peak_bytes for rank in processes.run(request).ranks)
    processes.run(replace(request, limit_bytes=peak_bytes))
    with pytest.raises(OutOfDeviceMemory) as caught:
        processes.run(replace(request, limit_bytes=peak_bytes - 1))
    assert caught.value.device in ("here:0", "here:1")
    assert caught.value.limit_bytes == peak_bytes - 1
    assert caught.value.need_bytes >= peak_bytes
    assert str(peak_bytes - 1) in str(caught.value)


def test_ledger_counts_what_is_there() -> None:
    built = build_rank(RunRequest(job=job(), plan=solo_plan(job()), until_step=1), 0, SoloExchange())
    built.engine.run(until_step=1, report=lambda report: None, stop_after=lambda: None)
    numel = sum(key.numel for key in built.live.kept_keys())
    breakdown = built.memory.breakdown
    assert breakdown[WEIGHTS] == breakdown[GRADIENTS] == numel * 4
    assert breakdown[OPTIMIZER] == numel * 8, "weights in fp32 are their own master"
    assert breakdown[ACTIVATIONS] > 8 * 32 * 64 * 4 * 6, "more than one activation per layer"
    assert built.memory.used_bytes == numel * 16
    built.live.release()
    assert built.memory.used_bytes == 0


def test_pipelines_and_replicas_are_charged_for_their_buffers(processes: Processes) -> None:
    run = processes.run(RunRequest(job=job(), plan=UNEVEN, until_step=1))
    assert any(rank.breakdown.get(PIPELINE) for rank in run.ranks)
    assert all(
        set(rank.breakdown) <= {WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, PIPELINE, STAGING} for rank in run.ranks
    )


def test_nothing_is_applied_before_the_step_before_is_safe() -> None:
    sink = UnsafeOnce(step=1)
    built = build_rank(RunRequest(job=job(), plan=solo_plan(job()), until_step=3), 0, SoloExchange(), sink)
    done: list[int] = []
    outcomes: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: outcomes.append(
            built.engine.run(until_step=3, report=lambda report: done.append(report.step), stop_after=lambda: None)
        )
    )
    thread.start()
    assert sink.waiting.wait(timeout=30.0)
    assert built.live.tag == 1, "step 2 waits for step 1 to be safe"
    assert done == [1]
    sink.released.set()
    thread.join(timeout=30.0)
    assert outcomes == [Finished(step=3)]
    calls = ("begin", "wait_safe")
    assert sink.asked == [(call, step) for step in range(4) for call in calls]


def test_plan_runs_in_processes_of_its_own() -> None:
    run = run_plan(job(), plan((1, (part(3, (1, 8)), part(3, (1, 8))))), 1)
    assert [rank.outcome for rank in run.ranks] == [Finished(step=1)] * 2
