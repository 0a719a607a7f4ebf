"""Messages from device to device, over wires without tags: the bits of the host's exchange, whatever the order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from device_wires import receive_out_of_order, run_over_wires, wait_until_abandoned
from engine_runs import LAYOUTS, assert_same_bits, job, part, plan

from shoal_planner.levels import Sharding
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Plan
from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, whole_state

STEPS = 3
ZERO_PP = Sharding(weights="cluster", gradients="cluster", gather="int8", scatter="int4", secondary=True)


def _interleaved() -> Plan:
    """Two stages with two chunks each: activations and gradients go both ways between the same ranks."""
    (pipeline,) = LAYOUTS["layers 1+5"].pipelines
    first, last = pipeline.stages
    stages = (replace(first, layers=((0, 1), (3, 4))), replace(last, layers=((1, 3), (4, 6))))
    return Plan(pipelines=(replace(pipeline, stages=stages),), schedule="interleaved")


PLANS = {
    "unequal pipelines": LAYOUTS["3 stages beside 1"],
    "interleaved": _interleaved(),
    "zero bubble, tp 2": replace(plan((4, (part(2, (2, 2)), part(4, (2, 2))))), schedule="zero_bubble"),
    "gradients beside computing": replace(LAYOUTS["two equal pipelines"], overlap=Overlap(gradients=True)),
    "zero++": replace(plan((2, (part(6, (1, 1), (1, 2), (2, 1)),))), sharding=ZERO_PP),
}
LONG = ("unequal pipelines", "zero++")


@pytest.mark.parametrize(
    "layout", [name if name not in LONG else pytest.param(name, marks=pytest.mark.long) for name in PLANS]
)
def test_a_plan_over_wires_has_the_bits_of_one_over_hosts(processes: Processes, layout: str) -> None:
    request = RunRequest(job=job(), plan=PLANS[layout], until_step=STEPS)
    size = sum(1 for _ in request.plan.places())
    over_wires = processes.call(size, run_over_wires, request)
    assert_same_bits(whole_state(request.job, over_wires), processes.run(request).state)


@pytest.mark.parametrize("able", [True, False])
def test_messages_are_told_apart_in_any_order(processes: Processes, able: bool) -> None:
    assert processes.call(2, receive_out_of_order, able) == [(able, [0.0, 1.0, 2.0])] * 2


def test_a_wait_for_what_nobody_sends_ends_when_it_is_abandoned(processes: Processes) -> None:
    assert max(processes.call(2, wait_until_abandoned)) < 5.0
