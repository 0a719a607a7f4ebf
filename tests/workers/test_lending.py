"""A new live state takes over what lies right in the one before: it is whole in the end, and until then the one before
is as it was, whatever has come from elsewhere."""

from __future__ import annotations

import layouts
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.job import ModelSpec
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Inventory, Kind, Live, RankState, ShardKey, Tier
from shoal_recovery.store import open_store
from shoal_workers.change import live_keys
from shoal_workers.fetching import Fetcher, Sources
from shoal_workers.greeting import epoch_pass
from shoal_workers.lending import coming
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory

STEP = 3


def _filled(model: ModelSpec, state: RankState) -> LiveState:
    live = LiveState.build(model, state, "fp32", DeviceMemory("here:0", None))
    for key in _keys(state):
        live.view(key).numpy()[:] = _truth(model, key)
    live.tag = STEP
    return live


def _keys(state: RankState) -> tuple[ShardKey, ...]:
    return (*(span.key(Kind.WEIGHT) for span in state.keeps), *layouts.owned_keys(state))


def _truth(model: ModelSpec, key: ShardKey) -> np.ndarray:
    return layouts.arrays(model, STEP)[key.fqn, key.kind][key.first : key.last]


def _check(live: LiveState, model: ModelSpec, state: RankState) -> None:
    for key in _keys(state):
        np.testing.assert_array_equal(live.view(key).numpy(), _truth(model, key))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_new_state_is_whole_and_the_old_one_stays_until_then(data: st.DataObject) -> None:
    model = data.draw(layouts.models())
    before, after = (shard_map(data.draw(layouts.plans(model)), model) for _ in range(2))
    truth = layouts.arrays(model, STEP)
    held = tuple(layouts.snapshot(layouts.shard(state, truth), "elsewhere", STEP) for state in before.ranks)
    old = {state.device: state for state in before.ranks}
    live = tuple(Live(device=state.device, step=STEP, keys=live_keys(state, "fp32")) for state in before.ranks)
    plan = plan_restore(after, Inventory(live=live, snapshots=held), (), model, "fp32")
    for state in after.ranks:
        mine = [transfer for transfer in plan.transfers if transfer.rank == state.rank]
        source = _filled(model, old[state.device]) if state.device in old else None
        lent = None if source is None else source.lend(coming(mine))
        new = LiveState.build(model, state, "fp32", DeviceMemory("here:0", None), lent=lent)
        fetcher = Fetcher(
            Sources(
                job="job",
                step=STEP,
                old=source,
                agents={},
                open_store=lambda: open_store(""),
                shown=epoch_pass("job", 2),
            )
        )
        for transfer in mine:
            if transfer.tier is not Tier.OWN:
                new.view(transfer.key).fill_(float("nan"))  # before it is verified, anything may have come
        fetcher.bring(new, [one for one in mine if one.tier is Tier.OWN and not one.is_derived])
        if source is not None:
            _check(source, model, old[state.device])
        for transfer in mine:
            if transfer.tier is not Tier.OWN:
                new.view(transfer.key).numpy()[:] = _truth(model, transfer.key)
        fetcher.bring(new, [one for one in mine if one.is_derived])
        _check(new, model, state)


def test_weights_that_stay_are_not_moved() -> None:
    model = ModelSpec(layers=2, hidden=16, heads=4, ffn=12, vocab=256)
    before, after = (shard_map(layouts.side_by_side(*nodes), model) for nodes in (("n0", "n1", "n2"), ("n0", "n1")))
    held = tuple(
        layouts.snapshot(layouts.shard(state, layouts.arrays(model, STEP)), "n1", STEP) for state in before.ranks
    )
    live = tuple(
        Live(device=state.device, step=STEP, keys=live_keys(state, "fp32")) for state in before.ranks[:2]
    )  # the third is lost
    plan = plan_restore(after, Inventory(live=live, snapshots=held), (), model, "fp32")
    fetched = {transfer.key.kind for transfer in plan.transfers if transfer.tier is not Tier.OWN}
    assert fetched == {Kind.EXP_AVG, Kind.EXP_AVG_SQ}, "each survivor has the weights, which in fp32 are their masters"
    mine = [transfer for transfer in plan.transfers if not transfer.rank]
    source = _filled(model, before.ranks[0])
    new = LiveState.build(model, after.ranks[0], "fp32", DeviceMemory("here:0", None), lent=source.lend(coming(mine)))
    for span in after.ranks[0].keeps:
        assert new.weight(span).data_ptr() == source.weight(span).data_ptr()
    moment = after.ranks[0].owns[0].key(Kind.EXP_AVG)
    own = before.ranks[0].owns[0].key(Kind.EXP_AVG)
    assert new.view(moment).data_ptr() != source.view(own).data_ptr(), "it grows, and the old one is still needed"
