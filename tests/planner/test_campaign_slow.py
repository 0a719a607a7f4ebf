"""A device of a tenth of the speed, added to a cluster, never makes the plan slower. On a thousand clusters:
`benchmarks.planner_campaigns`."""

from __future__ import annotations

import campaign


def test_a_slow_device_does_no_harm_on_a_sample() -> None:
    tallies = campaign.run("slow", range(4), processes=1, most_devices=16)
    assert not any(tally.failures for tally in tallies), campaign.summary("slow", tallies)
