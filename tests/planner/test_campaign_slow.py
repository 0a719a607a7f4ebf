"""A device of a tenth of the speed, added to a cluster, never makes the plan slower."""

from __future__ import annotations

import campaign
import pytest

# Of a hundred clusters: where the slow device also changes who can keep copies, a plan may still be lost.
MOST = 4


def judged(seeds: range, **options: int) -> None:
    tallies = campaign.run("slow", seeds, **options)
    failed = sum(bool(tally.failures) for tally in tallies)
    assert failed * 100 <= MOST * len(seeds), campaign.summary("slow", tallies)


def test_a_slow_device_does_no_harm_on_a_sample() -> None:
    judged(range(4), processes=1, most_devices=16)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_slow_device_does_no_harm() -> None:
    judged(range(200))
