"""Limits of a job hold for plans that are asked for before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_planner.alone import plan_alone, share_of
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.errors import NoPlanFits, PriceAboveLimit
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.profile import Profile


def job(**limits: Any) -> JobSpec:
    return parse_job(
        {
            "name": "limited",
            "model": {"layers": 8, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 1000},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": 16, "seq_len": 512, "steps": 10},
            "limits": limits,
        }
    )


def cluster() -> ClusterSnapshot:
    return parse_cluster(
        {
            "nodes": [
                {
                    "name": "a",
                    "device": "A100-80G",
                    "devices": 2,
                    "count": 2,
                    "price_per_hour": 8,
                    "host_memory_gib": 200,
                },
                {"name": "t", "device": "T4", "count": 3, "price_per_hour": 1, "host_memory_gib": 100},
            ]
        }
    )


@pytest.mark.parametrize(
    ("limits", "most_devices", "most_usd"),
    [({"max_devices": 3}, 3, 99), ({"max_price_per_hour": 9.5}, 99, 9.5), ({"max_devices": 1}, 2, 99)],
)
def test_no_plan_has_more_than_its_limits_allow(limits: dict[str, Any], most_devices: int, most_usd: float) -> None:
    """But for one node, which is the least that there is to give."""
    found = plan_alone(job(**limits), cluster(), Profile())
    share = share_of(job(**limits), cluster(), Profile())
    used = {one.node for pipeline in found.plan.pipelines for stage in pipeline.stages for one in stage.replicas}
    assert used <= {node.id for node in share.nodes}
    assert share.num_devices <= most_devices and sum(node.price_per_hour for node in share.nodes) <= most_usd
    (name, value), *_ = limits.items()
    assert found.plan.reason.startswith(f"With limits.{name} = {value:g} it has {len(share.nodes)} of 5 nodes. ")


def test_without_limits_or_within_them_it_has_all() -> None:
    for limits in ({}, {"max_devices": 7, "max_price_per_hour": 19.0}):
        assert share_of(job(**limits), cluster(), Profile()).nodes == cluster().nodes
        assert not plan_alone(job(**limits), cluster(), Profile()).plan.reason.startswith("With limits")


def test_a_limit_of_price_below_all_plans_is_named_with_what_the_cheapest_would_cost() -> None:
    with pytest.raises(PriceAboveLimit, match=r"per_hour = 0\.5 USD, and the cheapest .* cost 1 USD") as found:
        plan_alone(job(max_devices=4, max_price_per_hour=0.5), cluster(), Profile())
    assert (found.value.limit, found.value.least) == (0.5, 1.0)


def test_limits_that_allow_no_nodes_are_named() -> None:
    with pytest.raises(NoPlanFits, match=r"limits\.max_devices = 4 and limits\.max_price_per_hour = 99") as found:
        plan_alone(job(max_devices=4, max_price_per_hour=99, min_devices=4, device_types=["L4"]), cluster(), Profile())
    assert not isinstance(found.value, PriceAboveLimit)
