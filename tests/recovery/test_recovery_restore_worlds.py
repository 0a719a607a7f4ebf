"""plan_restore on what is left of random clusters, against an oracle that asks of each element where it is."""

from __future__ import annotations

import pytest
from hypothesis import Phase, event, given, seed, settings
from restore_worlds import World, check_load, check_state, check_zones, expected, expected_steps, worlds

from shoal_recovery.errors import StateLost
from shoal_recovery.restore import whole_steps


def _check(world: World) -> None:
    assert whole_steps(world.inventory, world.manifests, world.model) == expected_steps(world)
    wanted = expected(world)
    event("lost" if wanted is None else f"step {wanted[0]}")
    if wanted is None:
        with pytest.raises(StateLost):
            world.restore()
        return
    plan = world.restore()
    for tier, num_bytes in wanted[1].items():
        event(f"{tier} {num_bytes > 0}")
    assert (plan.step, plan.bytes_by_tier()) == wanted
    event(f"zones {len(set(world.zones.values()))}")
    check_state(world, plan)
    check_zones(world, plan)
    check_load(world, plan)
    assert world.restore() == plan


@settings(max_examples=25)
@given(worlds())
def test_every_rank_gets_exactly_its_state_from_the_nearest_source(world: World) -> None:
    _check(world)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_so_it_does_in_ten_thousand_worlds(part: int) -> None:
    """A tenth of them each; a failure is not made smaller, so that it is told in time."""

    @seed(part)
    @settings(max_examples=1000, database=None, phases=(Phase.generate,))
    @given(worlds())
    def check(world: World) -> None:
        _check(world)

    check()
