"""The fleet of nodes that are all alike with which others are compared: as many as the speed needs, for the least."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from rent_ground import rent_job

from shoal_planner.cluster import ClusterSnapshot, Node, parse_cluster
from shoal_planner.limits import LimitsSpec
from shoal_planner.profile import Profile
from shoal_planner.search import plan
from shoal_planner.uniform import UniformFleet, cheapest_uniform

JOB = rent_job(layers=4, batch=16)
NONE = ClusterSnapshot(nodes=())


def node(device: str, price: float, devices: int = 4) -> Node:
    shape = {"name": device.lower(), "count": 1, "device": device, "devices": devices, "price_per_hour": price}
    links = {"intra_gb_per_s": 300, "inter_gbit_per_s": 100, "host_memory_gib": 512}
    return parse_cluster({"nodes": [{**shape, **links}]}).nodes[0]


A100, V100 = node("A100-80G", 16.0), node("V100-16G", 9.0)


def found(tokens_per_s: float, *nodes: Node, time_limit_s: float = 1e9) -> UniformFleet | None:
    return cheapest_uniform(
        JOB, nodes, tokens_per_s, beside=NONE, profile=Profile(), time_limit_s=time_limit_s, clock=lambda: 0.0
    )


def speed(kind: Node, count: int) -> float:
    nodes = tuple(dataclasses.replace(kind, id=f"n-{index}") for index in range(count))
    prediction = plan(JOB, ClusterSnapshot(nodes=nodes), thorough=False).plan.prediction
    assert prediction is not None
    return prediction.tokens_per_s


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_nodes_are_taken_as_the_speed_needs(count: int) -> None:
    wanted = speed(A100, count)
    fleet = found(wanted, A100)
    assert fleet is not None and fleet.as_fast
    assert (fleet.count, fleet.tokens_per_s) == (count, pytest.approx(wanted))
    assert fleet.price_per_hour == 16.0 * count
    assert fleet.usd_per_million_tokens == pytest.approx(16.0 * count / 3600 / wanted * 1e6)
    assert fleet.step_s == pytest.approx(JOB.train.tokens_per_step / wanted)


def test_of_the_kinds_that_are_fast_enough_the_cheapest_per_token_is_taken() -> None:
    wanted = speed(A100, 2)
    dear, cheap = A100, dataclasses.replace(A100, price_per_hour=15.0)
    fleet = found(wanted, dear, cheap)
    assert fleet is not None and fleet.node.price_per_hour == 15.0
    given = found(wanted, V100, dear)
    both = [each for each in (found(wanted, V100), found(wanted, dear)) if each is not None and each.as_fast]
    assert given == min(both, key=lambda each: each.usd_per_million_tokens)


def test_limits_and_markets_of_the_job_do_not_count() -> None:
    limited = dataclasses.replace(JOB, limits=LimitsSpec(device_types=("T4",), max_devices=1))
    spot = dataclasses.replace(A100, spot=True, speed=0.5)
    fleet = cheapest_uniform(limited, [spot], 1.0, beside=NONE, profile=Profile())
    assert fleet is not None and (fleet.count, fleet.node.spot, fleet.node.speed) == (1, False, 1.0)


def test_where_no_number_is_fast_enough_the_fastest_is_told() -> None:
    """A batch of 16 does not spread over any number of devices."""
    fleet = found(1e12, A100)
    assert fleet is not None and not fleet.as_fast
    assert fleet.tokens_per_s >= max(speed(A100, count) for count in (1, 2, 4))


def test_what_fits_nowhere_is_no_fleet() -> None:
    large = dataclasses.replace(JOB, model=dataclasses.replace(JOB.model, layers=2000))
    tiny = node("T4", 1.0, devices=1)
    assert cheapest_uniform(large, [tiny], 1.0, beside=NONE, profile=Profile(), time_limit_s=-1.0) is None
    assert cheapest_uniform(JOB, [], 1.0, beside=NONE, profile=Profile()) is None
    unknown = dataclasses.replace(A100, device="X1")
    assert cheapest_uniform(JOB, [unknown], 1.0, beside=NONE, profile=Profile(), time_limit_s=0.0) is None


def test_nothing_more_is_tried_when_time_is_over() -> None:
    ticks = itertools.count(0.0, 10.0)
    fleet = cheapest_uniform(
        JOB, [A100], 1e12, beside=NONE, profile=Profile(), time_limit_s=15.0, clock=lambda: next(ticks)
    )
    assert fleet is not None and fleet.count == 1
