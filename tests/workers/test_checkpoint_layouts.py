"""A checkpoint that ranks of one plan wrote loads into any other plan, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_runs import LAYOUTS, hosting, job, part, plan

from shoal_planner.levels import Sharding
from shoal_planner.plan import Plan
from shoal_recovery.checkpoints import commit, load_manifest, put_shard
from shoal_recovery.crc import checksum
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import OWNED_KINDS, Inventory, Kind, Manifest, Piece, Tier
from shoal_recovery.store_directory import DirectoryStore
from shoal_workers.fetching import Fetcher, Sources
from shoal_workers.greeting import epoch_pass
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory

STEP, MODEL = 40, job().model
WRITER = LAYOUTS["3 stages beside 1"]
_FOUR = plan((2, (part(6, (1, 1), (1, 1), (1, 1), (1, 1)),)))
PLANS = {
    **{name: layout for name, layout in LAYOUTS.items() if layout is not WRITER},
    "alone": plan((8, (part(6, (1, 1)),))),
    "all split": dataclasses.replace(_FOUR, sharding=Sharding(weights="cluster", gradients="cluster")),
    "nothing split": dataclasses.replace(_FOUR, sharding=Sharding(optimizer="none")),
    "state on hosts": hosting(LAYOUTS["layers 1+5"], (0, 3)),
}
Truth = dict[tuple[str, Kind], torch.Tensor]


def _states(layout: Plan, precision: str = "fp32") -> list[LiveState]:
    ranks = shard_map(layout, MODEL).ranks
    return [LiveState.build(MODEL, state, precision, DeviceMemory("here:0", None)) for state in ranks]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[DirectoryStore, Truth]:
    """What it wrote, and the same as whole tensors."""
    store, pieces, truth = DirectoryStore(tmp_path_factory.mktemp("store")), [], {}
    generator = torch.Generator().manual_seed(1)
    for state, live in zip(shard_map(WRITER, MODEL).ranks, _states(WRITER), strict=True):
        content, mine = bytearray(), []
        for key in live.vouched_keys():
            values = torch.randn(key.numel, generator=generator)
            whole = truth.setdefault((key.fqn, key.kind), {})
            whole[key.first] = values
            data = values.numpy().tobytes()
            mine.append(Piece(key=key, offset=len(content), num_bytes=len(data), checksum=checksum(data)))
            content += data
        pieces += put_shard(store, job="j", step=STEP, epoch=1, shard=f"{state.rank}", data=content, pieces=mine)
    manifest = Manifest(version=1, job="j", step=STEP, epoch=1, next_sample=320, pieces=tuple(pieces))
    commit(store, manifest, MODEL)
    return store, {address: torch.cat([parts[first] for first in sorted(parts)]) for address, parts in truth.items()}


def test_there_are_ten_other_plans() -> None:
    assert len({layout.plan_id for layout in PLANS.values()} - {WRITER.plan_id}) == 10


@pytest.mark.parametrize("name", PLANS)
def test_the_checkpoint_loads_to_the_bit(stored: tuple[DirectoryStore, Truth], name: str) -> None:
    store, truth = stored
    layout, precision = PLANS[name], "bf16" if name == "tp 2" else "fp32"
    shards, manifest = shard_map(layout, MODEL), load_manifest(store, "j", STEP)
    restore = plan_restore(shards, Inventory(), (manifest,), MODEL, precision)  # type: ignore[arg-type]
    assert restore.step == STEP
    sources = Sources(job="j", step=STEP, old=None, agents={}, open_store=lambda: store, shown=epoch_pass("j", 2))
    for state, live in zip(shards.ranks, _states(layout, precision), strict=True):
        mine = [transfer for transfer in restore.transfers if transfer.rank == state.rank]
        brought = Fetcher(sources).bring(live, mine)
        assert not brought.failed and not brought.num_bytes[Tier.PEER.value]
        for span in state.owns:
            for kind in OWNED_KINDS:
                _same(live.view(span.key(kind)), truth[span.fqn, kind][span.first : span.last])
        for span in state.keeps:
            _same(live.view(span.key(Kind.WEIGHT)), truth[span.fqn, Kind.MASTER][span.first : span.last])


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    np.testing.assert_array_equal(found.float().numpy(), expected.to(found.dtype).float().numpy())
