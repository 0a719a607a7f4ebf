"""A better cluster never gets a worse plan: one more device, more memory, a faster link. On
thousands: `benchmarks.planner_campaigns`."""

from __future__ import annotations

import campaign
import pytest
from random_clusters import CHANGES, draw_small

from shoal_planner.cluster import ClusterSnapshot


def judged(name: str, seeds: range, **options: int) -> None:
    tallies = campaign.run(name, seeds, **options)
    assert not any(tally.failures for tally in tallies), campaign.summary(name, tallies)


def test_small_clusters_on_a_sample() -> None:
    """Strictly none is worse."""
    judged("monotone", range(7), processes=1)


@pytest.mark.parametrize(
    "seed", [142, 194, 213, 255, 287, 320, 359, 365, 649, 796, pytest.param(875, marks=pytest.mark.long), 2170]
)
def test_where_the_search_by_itself_once_lost_a_plan(seed: int) -> None:
    judged("monotone", range(seed, seed + 1), processes=1)


@pytest.mark.parametrize("seed", [34, 1224, 3036, 3057])
def test_where_plans_that_overlap_once_got_worse(seed: int) -> None:
    judged("overlapping", range(seed, seed + 1), processes=1)


@pytest.mark.long
def test_larger_ones_on_a_sample() -> None:
    judged("larger", range(4, 6), processes=1, most_devices=12, changes=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", [712, 2318])
def test_where_it_once_lost_one_on_clusters_that_take_longer(seed: int) -> None:
    judged("monotone", range(seed, seed + 1), processes=1)


# --- the changes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_are_for_the_better_alone(kind: str) -> None:
    """One figure differs, and it is larger (a latency: smaller); or there is one device more."""
    for seed in range(100):
        instance = draw_small(seed)
        what, changed = CHANGES[kind](instance)
        more = changed.num_devices - instance.cluster.num_devices
        assert more == (kind == "device"), what
        if kind != "device" and what != "nothing":
            pairs = list(zip(figures(instance.cluster), figures(changed), strict=True))
            assert any(after > before for before, after in pairs), what
            assert all(after >= before for before, after in pairs), what


def figures(cluster: ClusterSnapshot) -> list[float]:
    """All that a change may raise, in one order; latencies with their sign turned."""
    found = [
        figure
        for node in cluster.nodes
        for figure in (node.host_memory_bytes, node.intra_bytes_per_s, node.inter_bytes_per_s, node.nics)
    ]
    found += [entry.memory_bytes or 0 for entry in sorted(cluster.overrides, key=lambda entry: entry.name)]
    for link in sorted(cluster.links, key=lambda link: (link.from_zone, link.to_zone)):
        found += [link.bytes_per_s, -link.latency_s]
    return found
