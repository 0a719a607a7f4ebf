"""No plan needs more memory than a device or a host has, as recounted from the plan, on clusters of any size. On ten
thousand: `benchmarks.planner_campaigns`."""

from __future__ import annotations

import campaign


def judged(seeds: range, **options: int) -> None:
    tallies = campaign.run("memory", seeds, **options)
    assert not any(tally.failures for tally in tallies), campaign.summary("memory", tallies)
    found = sum(len(tally.cpu_s) - tally.num_without for tally in tallies)
    assert found > len(seeds) // 2, "hardly any cluster had a plan: nothing was tried"


def test_plans_keep_within_memory_on_a_sample() -> None:
    judged(range(6, 11), processes=1, most_devices=16)
