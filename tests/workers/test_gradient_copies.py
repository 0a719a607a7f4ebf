"""A copy that is kept up by gradients: the state of the rank, bit for bit, and no flipped bit gets into it unseen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from benchmarks.gradient_copies import GradientCopy, Spoilt, gradient_keys, sums
from shoal_planner.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_recovery.state import ELEMENT_BYTES, ShardKey, Span
from shoal_workers.exchange import SoloExchange
from shoal_workers.live import LiveState
from shoal_workers.shards import NUM_SLOTS
from shoal_workers.solo import RunRequest, build_rank, solo_plan

STEPS = 6
JOB = JobSpec(
    name="copies",
    model=ModelSpec(layers=2, hidden=24, heads=2, kv_heads=1, ffn=36, vocab=256),
    data=DataSpec(uri="stdlib:"),
    train=TrainSpec(global_batch=4, seq_len=16, steps=STEPS, warmup_steps=3, clip_norm=0.5, weight_decay=0.1),
)


class Follower:
    """A SnapshotSink with a copy that gets the state once, and after that gradients, which `between` may touch."""

    def __init__(self, between: Callable[[int, bytearray, bytearray], None]) -> None:
        self._between = between
        self._content = bytearray()
        self._slots: list[bytearray] = []
        self.keys: tuple[ShardKey, ...] = ()
        self.copy: GradientCopy | None = None
        self.compared: list[int] = []

    def begin(self, step: int, live: LiveState) -> None:
        if self.copy is None:
            self._begin(step, live)
            return
        keys, slot = gradient_keys(self.keys), self._slots[step % NUM_SLOTS]
        slot[:] = _bytes(keys, lambda key: live.gradient(Span(fqn=key.fqn, first=key.first, last=key.last)))
        came = sums(keys, memoryview(slot))
        self._between(step, slot, self._content)
        self.copy.apply(step, came)
        assert bytes(self._content) == _bytes(self.keys, live.view)
        self.compared.append(step)

    def wait_safe(self, step: int) -> None:
        """It stands in the copy already."""

    def _begin(self, step: int, live: LiveState) -> None:
        self.keys = live.vouched_keys()
        self._content = bytearray(_bytes(self.keys, live.view))
        num_bytes = sum(key.numel for key in gradient_keys(self.keys)) * ELEMENT_BYTES
        self._slots = [bytearray(num_bytes) for _ in range(NUM_SLOTS)]
        content = memoryview(self._content)
        self.copy = GradientCopy(JOB, self.keys, content, [memoryview(slot) for slot in self._slots])
        self.copy.begin(step, sums(self.keys, content))


def _bytes(keys: tuple[ShardKey, ...], view: Callable[[ShardKey], Tensor]) -> bytes:
    return b"".join(view(key).detach().clone().numpy().tobytes() for key in keys)


def follow(between: Callable[[int, bytearray, bytearray], None]) -> tuple[Follower, list[float]]:
    follower, norms = Follower(between), list[float]()
    request = RunRequest(job=JOB, plan=solo_plan(JOB), until_step=STEPS)
    engine = build_rank(request, 0, SoloExchange(), follower).engine
    engine.run(until_step=STEPS, report=lambda said: norms.append(said.grad_norm), stop_after=lambda: None)
    return follower, norms


def test_a_copy_is_the_rank_s_state_bit_for_bit_after_every_step() -> None:
    follower, norms = follow(lambda step, gradients, state: None)
    assert follower.compared == list(range(1, STEPS + 1))
    assert max(norms) > 0.5, "nothing was clipped, so it was not seen that clipped gradients come"
    assert follower.copy is not None and follower.copy.step == STEPS


@pytest.mark.parametrize("place", ["gradients", "state"])
def test_a_flipped_bit_is_found_before_anything_is_made_of_it(place: str) -> None:
    seen: list[bytes] = []

    def flip(step: int, gradients: bytearray, state: bytearray) -> None:
        if step == 3:
            (gradients if place == "gradients" else state)[1001] ^= 1
            seen.append(bytes(state))
            seen.append(state)

    with pytest.raises(Spoilt, match=f"of step {3 if place == 'gradients' else 2} had crc32:"):
        follow(flip)
    assert seen[0] == seen[1], "the copy was updated all the same"
