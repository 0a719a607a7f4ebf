"""The engine on a CUDA device: the numbers of the CPU, its kernels, its memory, its snapshots.

Bounds: fp32 products are not rounded to TF32 (torch's default), yet kernels sum in other orders than a CPU does, so
weights may differ by 1e-4 of a tensor's largest after 20 steps; losses in bf16 by 2 %.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from agents import open_slots, running_agents
from device_wires import run_and_way
from engine_runs import LAYOUTS, assert_same_bits, hosting, job, on_nodes, worst_difference
from torch.profiler import ProfilerActivity, profile

from shoal_planner.overlap import Overlap
from shoal_planner.parameters import parameters
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Kind
from shoal_workers.devices import Downloads
from shoal_workers.engine import Finished
from shoal_workers.errors import OutOfDeviceMemory
from shoal_workers.exchange import SoloExchange
from shoal_workers.lifeline import Lifeline
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.processes import PlanRun, Processes
from shoal_workers.shortage import shortage
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.slots import Slots
from shoal_workers.snapshots import AgentSnapshots
from shoal_workers.solo import RunRequest, build_rank, run_rank, run_solo, solo_plan, whole_state
from shoal_workers.timing import time_parts, time_update

STEPS = 20
BOUND = 1e-4
GPU = torch.device("cuda", 0)
FLASH = {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"}
EFFICIENT = {"aten::_scaled_dot_product_efficient_attention"}
OF_TWO = {name: LAYOUTS[name] for name in ("tp 2", "layers 1+5", "two equal pipelines")} | {
    "gradients beside computing": replace(LAYOUTS["two equal pipelines"], overlap=Overlap(gradients=True))
}


def test_one_device_has_the_numbers_of_a_cpu() -> None:
    ours, reference = run_solo(job(), STEPS, device="cuda:0"), run_solo(job(), STEPS)
    np.testing.assert_allclose(ours.losses, reference.losses, rtol=1e-4)
    assert worst_difference(ours.weights, reference.weights) <= BOUND


def test_the_seconds_that_a_device_computes_are_told_as_it_computes_them() -> None:
    spec = job()
    reports = run_rank(
        RunRequest(job=spec, plan=solo_plan(spec), until_step=STEPS, device="cuda:0"), 0, SoloExchange()
    ).reports
    assert 0.0 < sum(report.compute_s for report in reports) <= sum(report.duration_s for report in reports)


def test_bf16_follows_the_losses_of_fp32() -> None:
    ours, reference = run_solo(job(precision="bf16"), STEPS, device="cuda:0"), run_solo(job(), STEPS)
    np.testing.assert_allclose(ours.losses, reference.losses, rtol=0.02)


def test_deterministic_kernels_give_the_same_bits() -> None:
    spec = replace(job(), train=replace(job().train, deterministic=True))
    request = RunRequest(job=spec, plan=solo_plan(spec), until_step=5, device="cuda:0")
    one, other = (whole_state(spec, [run_rank(request, 0, SoloExchange())]) for _ in range(2))
    assert_same_bits(one, other)


@pytest.mark.filterwarnings("ignore")  # torch warns of what it does itself when it compiles
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="nothing compiles for GPUs without Triton")
def test_a_compiled_run_has_the_numbers_of_a_cpu() -> None:
    spec = replace(job(), train=replace(job().train, compile=True))
    assert worst_difference(run_solo(spec, STEPS, device="cuda:0").weights, run_solo(job(), STEPS).weights) <= BOUND


@pytest.mark.parametrize(("precision", "kernels"), [("bf16", FLASH), ("fp32", EFFICIENT)])
def test_attention_is_a_fused_kernel(precision: Literal["fp32", "bf16"], kernels: set[str]) -> None:
    """With fewer key heads than heads, too, which those for 32 bits do not know."""
    spec = job(precision=precision)
    assert spec.model.num_kv_heads < spec.model.heads
    built = build_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=2, device="cuda:0"), 0, SoloExchange())
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        built.engine.run(until_step=1, report=lambda report: None, stop_after=lambda: None)
    names = {event.key for event in seen.key_averages()}
    assert names & kernels
    assert "aten::_scaled_dot_product_attention_math" not in names


def test_the_ledger_holds_on_a_device_too() -> None:
    request = RunRequest(job=job(), plan=solo_plan(job()), until_step=1, limit_bytes=1 << 20, device="cuda:0")
    with pytest.raises(OutOfDeviceMemory, match="weights"):
        run_rank(request, 0, SoloExchange())


def test_what_the_device_itself_refuses_is_told_with_stage_and_prediction() -> None:
    spec = replace(job(), model=replace(job().model, hidden=1024, heads=16, kv_heads=16, ffn=4096))
    plan = solo_plan(spec)
    state, memory = shard_map(plan, spec.model).ranks[0], DeviceMemory("solo:0", None)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.25 * 2**30 / torch.cuda.get_device_properties(GPU).total_memory, GPU)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            LiveState.build(spec.model, state, "fp32", memory, device=GPU)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    told = shortage(caught.value, memory, plan, 0, {"memory_bytes": {"solo:0": 3 * 2**30}})
    assert "in stage 0 of pipeline 0 (layers 0 to 5): CUDA out of memory" in told
    assert "3.000 GiB were predicted for this device" in told


def test_state_is_copied_out_while_the_device_computes() -> None:
    """More than both staging buffers take at once, and as it was when the copy was asked for."""
    source = torch.arange(20_000_000, dtype=torch.float32, device=GPU)
    target = torch.empty(20_000_000)
    expected = source.cpu()
    Downloads(GPU).begin([(target[:3], source[:3]), (target[3:], source[3:])])()
    assert torch.equal(target, expected)


def test_a_snapshot_of_a_device_restores_to_the_same_bits(tmp_path: Path) -> None:
    spec = job()
    request = RunRequest(job=spec, plan=solo_plan(spec), until_step=3, device="cuda:0")
    with running_agents(tmp_path, "n0") as (agent,):
        built = build_rank(request, 0, SoloExchange())
        keys = built.live.vouched_keys()
        lifeline = Lifeline(cut_off_s=10.0, ends_itself_s=60.0)
        slots = (Slots(opened=open_slots(keys), keys=keys),)
        snapshots = AgentSnapshots(agent.connect(epoch=1), slots, GPU, SlotMaps(), lifeline)
        snapshots.begin(0, built.live)
        snapshots.wait_safe(0)
        (held,) = agent.inventory()
        assert held.step == 0
        restored = LiveState.build(spec.model, built.live.state, "fp32", DeviceMemory("n0:0", None), device=GPU)
        (slot, _) = snapshots._snapshots[0].slots
        for key, saved in zip(keys, slot, strict=True):
            restored.view(key).copy_(saved)
            assert torch.equal(restored.view(key), built.live.view(key)), key
    assert Kind.MASTER in {key.kind for key in keys}


def test_a_run_goes_on_from_the_state_of_another_to_the_same_bits() -> None:
    spec = replace(job(), train=replace(job().train, deterministic=True))
    whole = RunRequest(job=spec, plan=solo_plan(spec), until_step=6, device="cuda:0")
    half = whole_state(spec, [run_rank(replace(whole, until_step=3), 0, SoloExchange())])
    one = whole_state(spec, [run_rank(replace(whole, start=half), 0, SoloExchange())])
    assert_same_bits(one, whole_state(spec, [run_rank(whole, 0, SoloExchange())]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_on_the_host_is_updated_there(precision: Literal["fp32", "bf16"]) -> None:
    spec = job(precision=precision)
    request = RunRequest(job=spec, plan=hosting(solo_plan(spec), (0, 4)), until_step=STEPS, device="cuda:0")
    built = build_rank(request, 0, SoloExchange())
    built.engine.run(until_step=STEPS, report=lambda report: None, stop_after=lambda: None)
    assert built.live.state.hosted
    for span in built.live.state.hosted:
        master = built.live.master(span)
        assert master.device.type == "cpu"
        assert torch.equal(built.live.weight(span).cpu(), master.to(built.live.dtype))
    beside = run_rank(replace(request, plan=solo_plan(spec)), 0, SoloExchange())
    ours = whole_state(spec, [built.finish(Finished(step=STEPS), ())]).values[Kind.MASTER]
    bound = BOUND if precision == "fp32" else 0.02
    assert worst_difference(ours, whole_state(spec, [beside]).values[Kind.MASTER]) <= bound


def test_ranks_with_state_on_the_host_exchange(processes: Processes) -> None:
    """Owners send new weights from the host."""
    plan = hosting(LAYOUTS["two equal pipelines"], (0, 6))
    _equals_a_cpu(processes, RunRequest(job=job(), plan=plan, until_step=STEPS, device="cuda:0"), on_device=False)


def test_layers_and_updates_are_timed_on_the_device() -> None:
    assert all(forward_s > 0 and backward_s > 0 for _, _, forward_s, backward_s, _ in time_parts(job(), 1, GPU))
    assert time_update(job(), 1, GPU) > 0


@pytest.mark.parametrize(
    ("layout", "apart"),
    [(layout, apart) for layout in OF_TWO for apart in (False, True) if not (apart and layout == "tp 2")],
)
def test_two_ranks_of_one_device_exchange_through_their_hosts(processes: Processes, layout: str, apart: bool) -> None:
    plan = on_nodes(OF_TWO[layout], "a", "b") if apart else OF_TWO[layout]
    _equals_a_cpu(processes, RunRequest(job=job(), plan=plan, until_step=STEPS, device="cuda:0"), on_device=False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each rank")
@pytest.mark.parametrize("layout", OF_TWO)
def test_two_devices_exchange_over_nccl(processes: Processes, layout: str) -> None:
    request = RunRequest(job=job(), plan=OF_TWO[layout], until_step=STEPS, device="cuda")
    _equals_a_cpu(processes, request, on_device=True)


def _equals_a_cpu(processes: Processes, request: RunRequest, *, on_device: bool) -> None:
    answers = processes.call(2, run_and_way, request)
    assert {way for way, _ in answers} == {on_device}
    runs = [run for _, run in answers]
    state = whole_state(request.job, runs)
    reference = run_solo(request.job, STEPS)
    assert worst_difference(PlanRun(ranks=tuple(runs), state=state).weights, reference.weights) <= BOUND
    assert len(state.values[Kind.MASTER]) == len(parameters(request.job.model))
