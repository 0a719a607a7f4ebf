"""A device of a tenth of the speed, added to a cluster, never makes the plan slower. On hundreds of clusters:
`benchmarks.planner_campaigns`."""

from __future__ import annotations

import campaign
import pytest


def test_a_slow_device_does_no_harm_on_a_sample() -> None:
    tallies = campaign.run("slow", range(4, 7), processes=1, most_devices=12)
    assert not any(tally.failures for tally in tallies), campaign.summary("slow", tallies)


@pytest.mark.long
@pytest.mark.parametrize("seed", [369])
def test_where_a_slow_one_once_hid_a_plan(seed: int) -> None:
    tallies = campaign.run("slow", range(seed, seed + 1), processes=1)
    assert not any(tally.failures for tally in tallies), campaign.summary("slow", tallies)
