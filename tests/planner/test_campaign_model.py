"""The model itself on any plan: a better cluster never makes the same plan slower, and names do not matter."""

from __future__ import annotations

import campaign


def judged(seeds: range, **options: int) -> None:
    tallies = campaign.run("model", seeds, **options)
    assert not any(tally.failures for tally in tallies), campaign.summary("model", tallies)
    assert sum(tally.num_checked for tally in tallies) > 10 * len(seeds), "hardly any plan fitted: nothing was tried"


def test_the_model_rewards_better_clusters_on_a_sample() -> None:
    judged(range(40), processes=1)
